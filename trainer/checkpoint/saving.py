"""What a run keeps and takes back: the state of its parts, in checkpoints that rank 0 writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from trainer import distributed
from trainer.checkpoint import manifest
from trainer.checkpoint.writer import CheckpointWriter, Snapshot, read_state
from trainer.logbook import NotFiniteError
from trainer.run import Run
from trainer.session import Session


class Stateful(Protocol):
    """Whatever has state that outlives a process: optimizer, schedule, scaler, callback, ..."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take back what ``state_dict`` returned."""


class Saver:
    """Saves a run and resumes it. Every rank has one; rank 0's writes and reads."""

    def __init__(
        self,
        session: Session,
        view: Run,
        parts: Mapping[str, Stateful],
        run_config: Mapping[str, Any],
    ) -> None:
        """Note what belongs to the run.

        Args:
            session: Has the task, whose weights are kept beside the parts.
            view: Gives step and metrics; learns which checkpoints there are.
            parts: Everything else with state, by name. Ranks other than 0 may have fewer.
            run_config: The config that goes into every checkpoint.
        """
        self._session = session
        self._config = session.config
        self._view = view
        self._parts = parts
        self._run_config = run_config
        self._writer: CheckpointWriter | None = None
        self._saved_step = -1

    def resume(self) -> None:
        """Take everything back from the checkpoint that ``resume`` names, if there is one.

        Raises:
            ValueError: If it is not there, damaged, or of another task.
        """
        path, state = None, None
        if distributed.rank() == 0 and self._config.resume is not None:
            path = self._find(self._config.resume)
            state = None if path is None else read_state(path)
        state = distributed.broadcast_object(state)
        if state is None:
            return
        self._session.load(self._view.run_dir, path)
        for name, part in self._parts.items():
            if name in state:  # a callback may be new
                part.load_state_dict(state[name])

    def open(self) -> None:
        """Get ready to write; checkpoints beyond the current step are set aside."""
        if distributed.rank() == 0 and not self._config.fast_dev_run:
            folder = self._view.run_dir / manifest.FOLDER
            self._writer = CheckpointWriter(folder, self._config.checkpoint, self._view.step)

    def save(self) -> None:
        """Start writing a checkpoint of this step, unless it has been saved already.

        Must be called on every rank.

        Raises:
            NotFiniteError: If a weight is NaN or infinite; nothing is written then.
        """
        if self._saved_step == self._view.step:
            return
        self._saved_step = self._view.step
        distributed.share_buffers(self._session.task)
        check_finite(self._session.task, self._view.step)
        if self._writer is not None:
            self._writer.save(
                Snapshot(
                    step=self._view.step,
                    weights=self._session.task.state_dict(),
                    state={name: part.state_dict() for name, part in self._parts.items()},
                    config=self._run_config,
                    world_size=distributed.world_size(),
                    metric=self._monitored(),
                )
            )

    def completed(self) -> list[Path]:
        """Return the checkpoints completed since the last call; raise the writer's error."""
        if self._writer is None:
            return []
        finished = self._writer.finished()
        self._view.last_checkpoint = self._writer.last
        self._view.best_checkpoint = self._writer.best
        return finished

    def close(self) -> None:
        """Wait for the checkpoint that is being written."""
        if self._writer is not None:
            self._writer.close()

    def _find(self, resume: str) -> Path | None:
        if resume != "auto":
            path: Path | None = manifest.find(self._view.run_dir, resume)
        else:
            path = manifest.newest_valid(self._view.run_dir)
        print(f"resuming from {path or 'nothing: there is no checkpoint yet'}", flush=True)
        return path

    def _monitored(self) -> float | None:
        """Return the metric that decides which checkpoint is best, if it was measured just now."""
        monitor, view = self._config.checkpoint.monitor, self._view
        name = monitor or "val/loss"
        if monitor is not None and name not in view.metrics and self._has_measured_all():
            raise ValueError(
                f"checkpoint.monitor={monitor} is logged by nobody after a whole epoch; there are: "
                f"{', '.join(sorted(view.metrics))}"
            )
        return view.measured_now(name)

    def _has_measured_all(self) -> bool:
        """Whether a whole epoch and the first validation, if there is to be one, are over."""
        config, view = self._config, self._view
        epochs, steps = config.validate_every_n_epochs, config.validate_every_n_steps
        if epochs is None and steps is None:
            return view.epoch > 0
        by_epochs = epochs is not None and view.epoch >= epochs
        by_steps = steps is not None and view.step >= steps
        return view.epoch > 0 and (by_epochs or by_steps)


def check_finite(task: nn.Module, step: int) -> None:
    """Refuse weights that are NaN or infinite, as after a gradient that was, with a finite loss.

    Raises:
        NotFiniteError: Naming them; on every rank, for all ranks have the same weights.
    """
    bad = [name for name, p in task.named_parameters() if not bool(p.isfinite().all())]
    if bad:
        raise NotFiniteError(
            f"at step {step} {', '.join(bad[:8])} became NaN or infinite, though the loss did not. "
            "Nothing was saved since. A gradient must have been: of a square root or norm at 0, "
            "say; detect_anomaly=true names the operation"
        )
