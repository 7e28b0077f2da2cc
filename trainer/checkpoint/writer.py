"""Checkpoints: written so that a kill at any moment leaves whole ones.

A checkpoint is a folder ``checkpoints/step-<step>`` with the weights (``model.safetensors``), all
other state (``state.pt``), the config (``config.yaml``) and a ``manifest.json``, written last, that
holds the size and SHA-256 of the other files. Nothing in it is executed when it is loaded.
"""

from __future__ import annotations

import math
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

from trainer.checkpoint.manifest import (
    CONFIG,
    FORMAT_VERSION,
    MANIFEST,
    STATE,
    WEIGHTS,
    fsync,
    manifest_text,
    read_manifest,
    seal,
    step_folders,
    step_of,
    verified,
)
from trainer.checkpoint.weights import memory, read_torch, write_weights

if TYPE_CHECKING:
    from trainer.config import CheckpointConfig

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
            there = map(self._read, step_folders(self._folder))
            self._saved = [saved for saved in there if saved is not None]
            self._link()
        except OSError as error:
            raise ValueError(
                f"cannot write checkpoints to {self._folder}: {error.strerror}; set run_dir to a "
                "folder that can be written"
            ) from error

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
            write_weights(temporary / WEIGHTS, snapshot.weights)
            torch.save(snapshot.state, temporary / STATE)
            _write_config(temporary / CONFIG, snapshot.config)
            facts = {
                "format_version": FORMAT_VERSION,
                "step": snapshot.step,
                "world_size": snapshot.world_size,
                "monitor": self._config.monitor,
                "metric": metric,
                "files": {name: seal(temporary / name) for name in (WEIGHTS, STATE, CONFIG)},
            }
            (temporary / MANIFEST).write_text(manifest_text(facts), encoding="utf-8")
            fsync(temporary / MANIFEST)
            fsync(temporary)
            self._put(temporary, target)
            saved = [s for s in self._saved if s.step != snapshot.step]
            self._saved = [*saved, _Saved(target, snapshot.step, metric)]
            self._link()
            self._remove_old()
        except (OSError, RuntimeError, SafetensorError) as error:  # the three ways a disk is full
            raise OSError(
                f"saving the checkpoint of step {snapshot.step} to {target} failed ({error}); "
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
        fsync(self._folder)
        if older.exists():
            self._remove(older)

    def _link(self) -> None:
        for name, saved in (("last", self.last), ("best", self.best)):
            link, temporary = self._folder / name, self._folder / f"{_TEMPORARY}{name}"
            if saved is None:
                link.unlink(missing_ok=True)
            else:
                temporary.unlink(missing_ok=True)
                temporary.symlink_to(saved.name)
                temporary.replace(link)
        fsync(self._folder)

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
        beyond = [p for p in step_folders(self._folder) if step_of(p) > step]
        if not beyond:
            return
        aside = self._folder / "aside"
        aside.mkdir(exist_ok=True)
        for path in beyond:
            if (aside / path.name).exists():
                shutil.rmtree(aside / path.name)
            path.rename(aside / path.name)
        print(
            f"moved {len(beyond)} checkpoint{'s' if len(beyond) > 1 else ''} beyond step {step}, "
            "which this run starts from, to "
            f"{aside}",
            file=sys.stderr,
        )

    def _read(self, path: Path) -> _Saved | None:
        try:
            facts = read_manifest(path)
        except ValueError as error:
            print(f"leaving a checkpoint alone: {error}", file=sys.stderr)
            return None
        # Values of another metric say nothing about this one.
        metric = facts["metric"] if facts["monitor"] == self._config.monitor else None
        return _Saved(path, facts["step"], metric)


def read_state(path: Path) -> dict[str, Any]:
    """Return what the checkpoint ``path`` holds beside weights and config, on the CPU.

    Raises:
        ValueError: If the file is missing or damaged, or holds more than tensors and plain values.
    """
    state: dict[str, Any] = read_torch(verified(path, STATE))
    return state


def _copy(value: Any, where: str, copies: dict[Any, torch.Tensor], layout: Any) -> Any:
    """Copy nested state to the CPU; a tensor that appears twice (tied weights) stays one."""
    if isinstance(value, torch.Tensor):
        key = memory(value)
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


def _write_config(path: Path, config: Mapping[str, Any]) -> None:
    from omegaconf import OmegaConf

    OmegaConf.save(OmegaConf.create(dict(config)), path)
