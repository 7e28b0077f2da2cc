"""Checkpoints: write them so that a kill at any moment leaves whole ones, check, find, load.

A checkpoint is a folder ``checkpoints/step-<step>`` with the weights (``model.safetensors``), all
other state (``state.pt``), the config (``config.yaml``) and a ``manifest.json``, written last, that
holds the size and SHA-256 of the other files. Nothing in it is executed when it is loaded.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import shutil
import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from trainer.config import CheckpointConfig
    from trainer.task import TaskModule

FORMAT_VERSION = 1
FOLDER = "checkpoints"
WEIGHTS, STATE, CONFIG, MANIFEST = "model.safetensors", "state.pt", "config.yaml", "manifest.json"

_STEP_FOLDER = re.compile(r"step-(\d{8,})(\.old)?")
_TEMPORARY = ".tmp-"
# What torch.load(weights_only=True) takes back as it was.
_PLAIN = (str, int, float, bool, bytes, complex, type(None), torch.Size, torch.dtype, torch.device)


@dataclass(frozen=True)
class Snapshot:
    """Everything a checkpoint holds, as it is at one step.

    Attributes:
        step: Optimizer updates done.
        weights: The task's ``state_dict()``, with its plain names.
        state: Everything else (optimizer, scheduler, callbacks, ...): nested dicts and lists of
            tensors and plain values.
        config: The resolved config of the run, as plain values.
        world_size: Number of ranks that trained it.
        metric: The monitored metric, measured at exactly this step; None if it was not.
    """

    step: int
    weights: Mapping[str, Any]
    state: Mapping[str, Any]
    config: Mapping[str, Any]
    world_size: int
    metric: float | None = None


class _Saved(NamedTuple):
    path: Path
    step: int
    metric: float | None


class CheckpointWriter:
    """Writes the checkpoints of a run and decides which ones stay. Lives on rank 0.

    Args:
        folder: The run's ``checkpoints`` folder; made if it is missing. Checkpoints that are
            already there belong to the run, so ``keep`` and ``best`` go on where they were.
        config: The ``checkpoint.*`` options.
        step: The step the run starts from, where that is known. Checkpoints beyond it are of a
            future that will not happen; they are moved to ``aside/``.

    Raises:
        ValueError: If ``folder`` cannot be written.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, step: int | None = None) -> None:
        self._folder = Path(folder)
        self._config = config
        self._pool = ThreadPoolExecutor(1, "checkpoint") if config.asynchronous else None
        self._pending: Future[Path] | None = None
        self._completed: list[Path] = []
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._clean()
            if step is not None:
                self._set_aside_after(step)
        except OSError as error:
            raise ValueError(
                f"cannot write checkpoints to {self._folder}: {error.strerror}; set run_dir to a "
                "folder that can be written"
            ) from error
        self._saved = [s for p in _step_folders(self._folder) if (s := self._read(p)) is not None]

    @property
    def last(self) -> Path | None:
        """The newest complete checkpoint."""
        return self._saved[-1].path if self._saved else None

    @property
    def best(self) -> Path | None:
        """The best complete checkpoint by the monitored metric; the last one if none has it."""
        measured = [s for s in self._saved if s.metric is not None]
        if not measured:
            return self.last
        sign = 1 if self._config.mode == "min" else -1
        return min(measured, key=lambda s: sign * (s.metric or 0.0)).path

    def save(self, snapshot: Snapshot) -> None:
        """Copy ``snapshot`` to the CPU and write it, beside the training if asynchronous.

        One checkpoint is in flight: a save that comes too early waits for the one before.

        Raises:
            ValueError: If the state holds something that is neither a tensor nor a plain value.
            OSError: If this checkpoint (or, when asynchronous, the one before) was not written.
        """
        self._collect(wait=True)
        copies: dict[Any, torch.Tensor] = {}
        weights = {
            name: _copy(value, name, copies, torch.contiguous_format)
            for name, value in snapshot.weights.items()
        }
        state = _copy(snapshot.state, "state", copies, torch.preserve_format)
        copy = replace(snapshot, weights=weights, state=state)
        if self._pool is None:
            self._completed.append(self._write(copy))
        else:
            self._pending = self._pool.submit(self._write, copy)

    def finished(self) -> list[Path]:
        """Return the checkpoints completed since the last call, without waiting.

        Raises:
            OSError: If a checkpoint could not be written.
        """
        self._collect(wait=False)
        completed, self._completed = self._completed, []
        return completed

    def close(self) -> None:
        """Wait for the checkpoint in flight, raise its error, and end the thread."""
        try:
            self._collect(wait=True)
        finally:
            if self._pool is not None:
                self._pool.shutdown()

    def _collect(self, wait: bool) -> None:
        if self._pending is not None and (wait or self._pending.done()):
            pending, self._pending = self._pending, None
            self._completed.append(pending.result())

    def _write(self, snapshot: Snapshot) -> Path:
        from safetensors import SafetensorError

        target = self._folder / f"step-{snapshot.step:08d}"
        temporary = self._folder / f"{_TEMPORARY}{target.name}"
        metric = snapshot.metric
        metric = float(metric) if metric is not None and math.isfinite(metric) else None
        try:
            temporary.mkdir()
            _write_weights(temporary / WEIGHTS, snapshot.weights)
            torch.save(snapshot.state, temporary / STATE)
            _write_config(temporary / CONFIG, snapshot.config)
            facts = {
                "format_version": FORMAT_VERSION,
                "step": snapshot.step,
                "world_size": snapshot.world_size,
                "monitor": self._config.monitor,
                "metric": metric,
                "files": {name: _seal(temporary / name) for name in (WEIGHTS, STATE, CONFIG)},
            }
            (temporary / MANIFEST).write_text(_manifest_text(facts), encoding="utf-8")
            _fsync(temporary / MANIFEST)
            _fsync(temporary)
            self._put(temporary, target)
            saved = [s for s in self._saved if s.step != snapshot.step]
            self._saved = [*saved, _Saved(target, snapshot.step, metric)]
            self._link("last", self.last)
            self._link("best", self.best)
            self._remove_old()
        except (OSError, RuntimeError, SafetensorError) as error:  # the three ways a disk is full
            raise OSError(
                f"the checkpoint of step {snapshot.step} was not written to {target} ({error}); "
                "the ones before it are untouched"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return target

    def _put(self, temporary: Path, target: Path) -> None:
        # A folder cannot replace another in one move. If this step was saved before, the older one
        # steps aside under a name that readers know, so that at any moment one of them is there.
        older = target.with_name(f"{target.name}.old")
        if target.exists():
            target.rename(older)
        temporary.rename(target)
        _fsync(self._folder)
        if older.exists():
            self._remove(older)

    def _link(self, name: str, target: Path | None) -> None:
        assert target is not None
        temporary = self._folder / f"{_TEMPORARY}{name}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target.name)
        temporary.replace(self._folder / name)
        _fsync(self._folder)

    def _remove_old(self) -> None:
        if self._config.keep is None:
            return
        stay = {s.path for s in self._saved[-self._config.keep :]} | {self.best, self.last}
        for saved in self._saved:
            if saved.path not in stay:
                self._remove(saved.path)
        self._saved = [s for s in self._saved if s.path in stay]

    def _remove(self, path: Path) -> None:
        # Renamed first: a kill half-way must not leave something that looks like a checkpoint.
        doomed = self._folder / f"{_TEMPORARY}removed-{path.name}"
        path.rename(doomed)
        shutil.rmtree(doomed)

    def _clean(self) -> None:
        for path in self._folder.glob(f"{_TEMPORARY}*"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        for older in self._folder.glob("step-*.old"):
            target = older.with_suffix("")
            if target.exists():
                shutil.rmtree(older)
            else:
                older.rename(target)

    def _set_aside_after(self, step: int) -> None:
        beyond = [p for p in _step_folders(self._folder) if _step_of(p) > step]
        if not beyond:
            return
        aside = self._folder / "aside"
        aside.mkdir(exist_ok=True)
        for path in beyond:
            if (aside / path.name).exists():
                shutil.rmtree(aside / path.name)
            path.rename(aside / path.name)
        print(
            f"moved {len(beyond)} checkpoints beyond step {step}, which this run starts from, to "
            f"{aside}",
            file=sys.stderr,
        )

    def _read(self, path: Path) -> _Saved | None:
        try:
            facts = _read_manifest(path)
        except ValueError as error:
            print(f"leaving a checkpoint alone: {error}", file=sys.stderr)
            return None
        # Values of another metric say nothing about this one.
        metric = facts["metric"] if facts["monitor"] == self._config.monitor else None
        return _Saved(path, facts["step"], metric)


def find(run_dir: Path, which: str | os.PathLike[str]) -> Path:
    """Return the checkpoint that a user means.

    Args:
        run_dir: The folder of the run.
        which: ``"best"``, ``"last"``, or a path: a checkpoint folder or a ``.safetensors`` file,
            as it stands or inside ``run_dir`` or its ``checkpoints``.

    Raises:
        ValueError: If there is none; says which ones there are.
    """
    folder = Path(run_dir) / FOLDER
    named = which in ("best", "last")
    places = [folder / which] if named else [Path(which), Path(run_dir) / which, folder / which]
    for place in places:
        if (place / MANIFEST).is_file() or (place.is_file() and place.suffix == ".safetensors"):
            return place.resolve()
    there = [path.name for path in _step_folders(folder)]
    for path in (Path(which), Path(which) / FOLDER):
        if path.is_dir() and not named:
            there += [str(p) for p in _step_folders(path)]
    wanted = f"no checkpoint {str(which)!r} in {folder}" if named else f"{which} is no checkpoint"
    raise ValueError(
        f"{wanted}: a checkpoint is a folder with a {MANIFEST}, or a .safetensors file; "
        + (f"there are {', '.join(there)} in {folder}" if there else f"{folder} holds none")
        + "; give best, last, or the path of one"
    )


def newest_valid(run_dir: Path) -> Path | None:
    """Return the newest checkpoint of a run whose every byte is as it was written.

    Damaged ones are passed over, and named on stderr with what is wrong.
    """
    for path in reversed(_step_folders(Path(run_dir) / FOLDER)):
        try:
            verify(path)
        except ValueError as error:
            print(f"NOT using a damaged checkpoint: {error}", file=sys.stderr, flush=True)
        else:
            return path
    return None


def verify(path: Path) -> None:
    """Check every file of the checkpoint ``path`` against its manifest.

    Raises:
        ValueError: If the checkpoint is missing, incomplete or damaged; says where.
    """
    for name in _read_manifest(path)["files"]:
        _verified(path, name)


def read_state(path: Path) -> dict[str, Any]:
    """Return what the checkpoint ``path`` holds beside weights and config, on the CPU.

    Raises:
        ValueError: If the file is missing or damaged, or holds more than tensors and plain values.
    """
    state: dict[str, Any] = _read_torch(_verified(path, STATE))
    return state


class Differences(NamedTuple):
    """Names in which a module and a file of weights differ.

    Attributes:
        missing: In the module but not in the file.
        unexpected: In the file but not in the module.
        reshaped: In both, with different shapes.
    """

    missing: list[str]
    unexpected: list[str]
    reshaped: list[str]


def load_weights(
    module: nn.Module, path: str | os.PathLike[str], strict: bool = True
) -> Differences:
    """Load weights into ``module``.

    Args:
        module: Any module; a `TaskModule` or a part of another model.
        path: A checkpoint folder, or a ``.safetensors`` file of any origin.
        strict: Whether names and shapes must agree. If not, what fits is loaded and the rest of
            the module stays as it is.

    Returns:
        What differed; empty if ``strict``.

    Raises:
        ValueError: If the file is missing or damaged; if ``strict`` and anything differs; if
            nothing fits.
    """
    weights = _read_weights(Path(path))
    own = module.state_dict(keep_vars=True)
    _tie(weights, own)
    reshaped = [
        name
        for name in weights.keys() & own.keys()
        if getattr(weights[name], "shape", None) != getattr(own[name], "shape", None)
    ]
    fitting = {name: value for name, value in weights.items() if name not in reshaped}
    if not fitting.keys() & own.keys() and own:
        raise ValueError(
            f"{path} has no weight that fits {type(module).__name__}: it holds "
            f"{_some(weights)}, the module {_some(own)}"
        )
    missing, unexpected = module.load_state_dict(fitting, strict=False)
    differences = Differences(
        sorted(set(missing) - set(reshaped)), sorted(unexpected), sorted(reshaped)
    )
    if strict and any(differences):
        shapes = {
            name: f"{name} {_shape(weights[name])} instead of {_shape(own[name])}"
            for name in reshaped
        }
        parts = [
            ("missing in the file", differences.missing),
            ("unknown to the module", differences.unexpected),
            ("of another shape", [shapes[name] for name in differences.reshaped]),
        ]
        raise ValueError(
            f"the weights in {path} do not fit {type(module).__name__}: "
            + "; ".join(f"{what}: {_some(names)}" for what, names in parts if names)
            + ". Build the module as it was trained, or load what fits with strict=False"
        )
    return differences


def load_task(path: str | os.PathLike[str], **overrides: Any) -> TaskModule:
    """Build the task of a checkpoint from its config, with its weights.

    Args:
        path: A checkpoint folder.
        overrides: Arguments of the task's constructor that replace those in the config.

    Raises:
        ValueError: If the checkpoint is missing or damaged, or was not made from a config.
    """
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    node = OmegaConf.select(OmegaConf.load(_verified(Path(path), CONFIG)), "task")
    if node is None or "_target_" not in node:
        raise ValueError(
            f"{path} cannot build its task: its {CONFIG} has no task._target_ (the run was started "
            "from Python, not from a config); construct the task and call load_weights(task, path)"
        )
    task: TaskModule = instantiate(node, **overrides)
    load_weights(task, path)
    return task


def _step_folders(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, oldest first."""
    found = [p for p in folder.glob("step-*") if _STEP_FOLDER.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=lambda p: (_step_of(p), p.suffix != ".old"))


def _step_of(path: Path) -> int:
    match = _STEP_FOLDER.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _copy(value: Any, where: str, copies: dict[Any, torch.Tensor], layout: Any) -> Any:
    """Copy nested state to the CPU; a tensor that appears twice (tied weights) stays one."""
    if isinstance(value, torch.Tensor):
        key = _memory(value)
        if key not in copies:
            copies[key] = value.detach().to("cpu", copy=True, memory_format=layout)
        return copies[key]
    if isinstance(value, np.generic):
        return _copy(value.item(), where, copies, layout)
    if type(value) in (dict, OrderedDict, Counter):
        items = ((k, _copy(v, f"{where}[{k!r}]", copies, layout)) for k, v in value.items())
        return type(value)(dict(items))
    if type(value) in (list, tuple):
        return type(value)(_copy(v, f"{where}[{i}]", copies, layout) for i, v in enumerate(value))
    if type(value) in _PLAIN:
        return value
    raise ValueError(
        f"{where} is of type {type(value).__module__}.{type(value).__qualname__}, which a "
        "checkpoint cannot hold: state_dict() may return tensors, numbers, strings, None, and "
        "dicts, lists and tuples of these"
    )


def _memory(tensor: torch.Tensor) -> Any:
    """Identify the memory that ``tensor`` shows: equal for tied weights and only for them."""
    if not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _write_weights(path: Path, weights: Mapping[str, Any]) -> None:
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}
    tied: dict[str, str] = {}
    plain: list[str] = []
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor):  # a module's extra state
            buffer = io.BytesIO()
            torch.save(value, buffer)
            tensors[name] = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8).clone()
            plain.append(name)
        elif id(value) in names:
            tied[name] = names[id(value)]
        else:
            names[id(value)] = name
            tensors[name] = value
    metadata = {"format": "pt", "tied": json.dumps(tied), "extra_state": json.dumps(plain)}
    save_file(tensors, path, metadata)


def _read_weights(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    if path.suffix == ".safetensors":
        if not path.is_file():
            raise ValueError(f"there is no file {path}")
        file = path
    else:
        file = _verified(path, WEIGHTS)
    try:
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()
            weights: dict[str, Any] = {name: opened.get_tensor(name) for name in names}
            metadata = opened.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged, or no safetensors file: {error}") from error
    for name in json.loads(metadata.get("extra_state", "[]")):
        weights[name] = _read_torch(io.BytesIO(weights[name].numpy().tobytes()))
    for name, same in json.loads(metadata.get("tied", "{}")).items():
        weights[name] = weights[same]
    return weights


def _tie(weights: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Give names that share memory in the module, and of which the file has one, that value."""
    tensors = {name: _memory(t) for name, t in own.items() if isinstance(t, torch.Tensor)}
    known = {memory: name for name, memory in tensors.items() if name in weights}
    for name, memory in tensors.items():
        if name not in weights and memory in known:
            weights[name] = weights[known[memory]]


def _read_torch(source: Path | io.BytesIO) -> Any:
    from pickle import UnpicklingError

    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{source} cannot be read as tensors and plain values: {error}") from error


def _write_config(path: Path, config: Mapping[str, Any]) -> None:
    from omegaconf import OmegaConf

    OmegaConf.save(OmegaConf.create(dict(config)), path)


def _manifest_text(facts: Mapping[str, Any]) -> str:
    body = json.dumps(facts, indent=2)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return json.dumps({**facts, "sha256": digest}, indent=2) + "\n"


def _read_manifest(path: Path) -> dict[str, Any]:
    file = Path(path) / MANIFEST
    if not file.is_file():
        raise ValueError(
            f"{path} is no checkpoint: "
            + (f"it has no {MANIFEST}" if Path(path).is_dir() else "there is no such folder")
        )
    try:
        text = file.read_text(encoding="utf-8")
        facts: dict[str, Any] = json.loads(text)
        del facts["sha256"]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if text != _manifest_text(facts):
        raise ValueError(f"{file} is damaged: its SHA-256 does not match")
    if facts["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {facts['format_version']}, this trainer reads "
            f"{FORMAT_VERSION}; use the trainer's version that wrote it"
        )
    return facts


def _seal(path: Path) -> dict[str, Any]:
    """Bring ``path`` to the disk; return its size and digest."""
    _fsync(path)
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def _verified(path: Path, name: str) -> Path:
    """Return the file ``name`` of a checkpoint once it is as the manifest says."""
    expected = _read_manifest(path)["files"][name]
    file = Path(path) / name
    if not file.is_file():
        raise ValueError(f"{file} is missing")
    size = file.stat().st_size
    if size != expected["size"]:
        raise ValueError(f"{file} is damaged: it has {size} bytes instead of {expected['size']}")
    if _sha256(file) != expected["sha256"]:
        raise ValueError(f"{file} is damaged: its SHA-256 does not match the {MANIFEST}")
    return file


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):  # large enough for hashlib to let go of the GIL
            digest.update(chunk)
    return digest.hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__


def _some(names: Any, most: int = 8) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
