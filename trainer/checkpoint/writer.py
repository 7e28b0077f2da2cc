"""Checkpoints: written so that a kill at any moment leaves whole ones.

A checkpoint is a folder ``checkpoints/step-<step>`` with the weights (``model.safetensors``), all
other state (``state.pt``), the config (``config.yaml``) and a ``manifest.json``, written last, that
holds the size and SHA-256 of the other files. Nothing in it is executed when it is loaded.
"""

from __future__ import annotations

import importlib
import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import torch

from trainer.checkpoint.files import write_file
from trainer.checkpoint.manifest import (
    CONFIG,
    FORMAT_VERSION,
    MANIFEST,
    STATE,
    WEIGHTS,
    manifest_text,
    step_of,
    verified,
)
from trainer.checkpoint.snapshot import Snapshot, Staging
from trainer.checkpoint.store import CheckpointStore
from trainer.checkpoint.weights import read_torch, write_weights
from trainer.launching import attempt
from trainer.messages import counted, reason, warn

if TYPE_CHECKING:
    from trainer.config import CheckpointConfig


# Imported before: a loader worker that is forked while a thread imports a module could never import
# it.
_USED_IN_THREAD = ("omegaconf", "torch.utils.serialization.config")


class _Saved(NamedTuple):
    name: str
    step: int
    metric: float | None


class _Outcome(NamedTuple):
    path: Path | None  # of the checkpoint, if it is there
    error: OSError | None


class CheckpointWriter:
    """Writes the checkpoints of a run and decides which ones stay. Lives on rank 0.

    Args:
        store: Where they lie. Checkpoints that are already there belong to the run, so ``keep``
            and ``best`` go on where they were.
        config: The ``checkpoint.*`` options.
        step: The step the run starts from, where that is known. Checkpoints beyond it are of a
            future that will not happen; they are moved to ``aside/``.

    Attributes:
        failed: Whether a checkpoint was not written and nobody has been told yet. The next call of
            `save`, `finished` or `close` tells.

    Raises:
        ValueError: If ``store`` cannot be written.
    """

    def __init__(
        self, store: CheckpointStore, config: CheckpointConfig, step: int | None = None
    ) -> None:
        self.failed = False
        self._store = store
        self._config = config
        self._pool = (
            ThreadPoolExecutor(1, "checkpoint", _step_back) if config.asynchronous else None
        )
        self._staging = Staging(training_waits=not config.asynchronous)
        self._pending: Future[_Outcome] | None = None
        self._in_flight: int | None = None
        self._completed: list[Path] = []
        self._saved: list[_Saved] = []
        try:
            store.open()
            if step is not None:
                self._set_aside_after(step)
            there = map(self._read, store.names())
            self._saved = [saved for saved in there if saved is not None]
            self._link()
        except OSError as error:
            raise ValueError(
                f"cannot write checkpoints to {store.path('')}: {reason(error)}; set run_dir to a "
                "folder that can be written"
            ) from error

    @property
    def last(self) -> Path | None:
        """The newest complete checkpoint."""
        return self._store.path(self._saved[-1].name) if self._saved else None

    @property
    def best(self) -> Path | None:
        """The best complete checkpoint by the monitored metric; the last one if none has it."""
        best = self._best
        return None if best is None else self._store.path(best.name)

    @property
    def _best(self) -> _Saved | None:
        measured = [s for s in self._saved if s.metric is not None]
        if not measured:
            return self._saved[-1] if self._saved else None
        sign = 1 if self._config.mode == "min" else -1
        return min(measured, key=lambda s: sign * (s.metric or 0.0))

    def has(self, step: int) -> bool:
        """Whether there is a checkpoint of ``step``, or it is being written."""
        return step == self._in_flight or any(s.step == step for s in self._saved)

    def save(self, snapshot: Snapshot) -> None:
        """Copy ``snapshot`` to the CPU and write it, beside the training if asynchronous.

        One checkpoint is in flight: a save that comes too early waits for the one before.

        Raises:
            ValueError: If the state holds something that is neither a tensor nor a plain value.
            OSError: If this checkpoint (or, when asynchronous, the one before) was not written, and
                ``on_error`` says stop.
        """
        for name in _USED_IN_THREAD:
            importlib.import_module(name)
        self._collect(wait=True)
        copy = self._staging.copy(snapshot)
        self._in_flight = snapshot.step
        if self._pool is None:
            self._settle(self._write(copy))
        else:
            self._pending = self._pool.submit(self._write_beside, copy)

    def finished(self) -> list[Path]:
        """Return the checkpoints completed since the last call, without waiting.

        Raises:
            OSError: If a checkpoint was not written, and ``on_error`` says stop.
        """
        self._collect(wait=self.failed)  # what has failed is as good as done
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
            outcome, self._pending = self._pending, None
            self.failed = False
            self._settle(outcome.result())

    def _settle(self, outcome: _Outcome) -> None:
        self._in_flight = None
        if outcome.path is not None:
            self._completed.append(outcome.path)
        if outcome.error is None:
            return
        if self._config.on_error == "stop":
            raise outcome.error
        warn(f"{outcome.error}; training goes on")

    # From here on in the thread, if there is one.

    def _write_beside(self, snapshot: Snapshot) -> _Outcome:
        outcome = None
        try:
            outcome = self._write(snapshot)
            return outcome
        finally:
            self.failed = outcome is None or outcome.error is not None

    def _write(self, snapshot: Snapshot) -> _Outcome:
        name = f"step-{snapshot.step:08d}"
        path, what = self._store.path(name), f"the checkpoint of step {snapshot.step}"
        try:
            metric = self._put(name, snapshot)
        except OSError as error:
            return _Outcome(
                None,
                OSError(
                    f"saving {what} to {path} failed: {reason(error)}; the ones before it are "
                    "untouched"
                ),
            )
        others = [s for s in self._saved if s.name != name]
        self._saved = [*others, _Saved(name, snapshot.step, metric)]
        try:
            there = self._store.names()
            self._saved = [s for s in self._saved if s.name in there]  # others can remove them too
            self._link()
            self._remove_old()
        except OSError as error:
            return _Outcome(
                path, OSError(f"{what} is in {path}, but cleaning up failed: {reason(error)}")
            )
        return _Outcome(path, None)

    def _put(self, name: str, snapshot: Snapshot) -> float | None:
        metric = snapshot.metric
        metric = float(metric) if metric is not None and math.isfinite(metric) else None
        contents: dict[str, Callable[[BinaryIO], Any]] = {
            WEIGHTS: lambda file: write_weights(file, snapshot.weights),
            STATE: lambda file: torch.save(snapshot.state, file),
            CONFIG: lambda file: file.write(_config_text(snapshot.config)),
        }
        workspace = self._store.workspace(name)
        try:
            files = {name: write_file(workspace / name, write) for name, write in contents.items()}
            facts = {
                "format_version": FORMAT_VERSION,
                "step": snapshot.step,
                "world_size": snapshot.world_size,
                "launch": attempt.current().launch,
                "monitor": self._config.monitor,
                "metric": metric,
                "files": files,
            }
            text = manifest_text(facts).encode()
            write_file(workspace / MANIFEST, lambda file: file.write(text))
            self._store.put(workspace, name)
        finally:
            shutil.rmtree(workspace, ignore_errors=True)  # else at the next start
        return metric

    def _link(self) -> None:
        best = self._best
        self._store.link("last", self._saved[-1].name if self._saved else None)
        self._store.link("best", best.name if best else None)

    def _remove_old(self) -> None:
        if self._config.keep is None:
            return
        stay = {*self._saved[-self._config.keep :], self._best}
        for saved in self._saved:
            if saved not in stay:
                self._store.remove(saved.name)
        self._saved = [s for s in self._saved if s in stay]

    # At the start.

    def _set_aside_after(self, step: int) -> None:
        beyond = [name for name in self._store.names() if step_of(name) > step]
        if beyond:
            where = self._store.set_aside(beyond)
            print(
                f"moved {counted(len(beyond), 'checkpoint')} beyond step {step}, which this run "
                f"starts from, to {where}",
                file=sys.stderr,
            )

    def _read(self, name: str) -> _Saved | None:
        try:
            facts = self._store.facts(name)
        except ValueError as error:
            print(f"leaving a checkpoint alone: {error}", file=sys.stderr)
            return None
        # Values of another metric say nothing about this one.
        metric = facts["metric"] if facts["monitor"] == self._config.monitor else None
        return _Saved(name, facts["step"], metric)


def read_state(path: Path) -> dict[str, Any]:
    """Return what the checkpoint ``path`` holds beside weights and config, on the CPU.

    Raises:
        ValueError: If the file is missing or damaged, or holds more than tensors and plain values.
    """
    state: dict[str, Any] = read_torch(verified(path, STATE))
    return state


def _step_back() -> None:
    """Let the training go first where there are fewer processors than threads that want one."""
    if sys.platform == "linux":  # elsewhere this is of the whole process
        os.nice(5)


def _config_text(config: Mapping[str, Any]) -> bytes:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dict(config))).encode()
