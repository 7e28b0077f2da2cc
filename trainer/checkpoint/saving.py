"""What a run keeps and takes back: the state of its parts, in checkpoints that rank 0 writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

from torch import nn

from trainer import distributed
from trainer.checkpoint import manifest
from trainer.checkpoint.writer import CheckpointWriter, Snapshot, read_state
from trainer.logbook import NotFiniteError
from trainer.messages import listed
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
        self._written: tuple[int, float | None] = (-1, None)  # the last one: step and metric

    def resume(self) -> None:
        """Take everything back from the checkpoint that ``resume`` names, if there is one.

        Raises:
            ValueError: If it is not there, damaged, or of another task or batch size.
        """
        path, state = None, None
        if distributed.rank() == 0 and self._config.resume is not None:
            path = self._find(self._config.resume)
            state = None if path is None else read_state(path)
        state = distributed.broadcast_object(state)
        if state is None:
            return
        self._check_data_order(state["data_order"])
        self._session.load(self._view.run_dir, path)
        for name, part in self._parts.items():
            if name in state:
                part.load_state_dict(state[name])
            else:
                print(f"resume: the checkpoint has no state for {name}, which starts anew")
        self._written = (self._view.step, None)

    def open(self) -> None:
        """Get ready to write; checkpoints beyond the current step are set aside."""
        if distributed.rank() == 0 and not self._config.fast_dev_run:
            folder = self._view.run_dir / manifest.FOLDER
            self._writer = CheckpointWriter(folder, self._config.checkpoint, self._view.step)

    def save(self) -> None:
        """Start writing a checkpoint of this step, unless there is one that knows as much.

        Must be called on every rank.

        Raises:
            NotFiniteError: If a weight is NaN or infinite; nothing is written then.
            ValueError: If ``checkpoint.monitor`` is measured by nobody.
        """
        task = self._session.task
        distributed.share_buffers(task)
        check_finite(task, self._view.step)
        if self._writer is None:
            return
        metric = self._monitored()
        if self._written[0] == self._view.step and metric in (None, self._written[1]):
            return
        self._written = (self._view.step, metric)
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        self._writer.save(
            Snapshot(
                step=self._view.step,
                weights=task.state_dict(),
                state={**parts, "data_order": self._data_order()},
                config=self._run_config,
                world_size=distributed.world_size(),
                metric=metric,
            )
        )

    def check_monitor(self) -> None:
        """At the end, refuse a ``checkpoint.monitor`` that was never measured."""
        monitor = self._config.checkpoint.monitor
        if self._writer is not None and monitor is not None and monitor not in self._view.metrics:
            self._explain_monitor(monitor)

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
            path: Path | None = manifest.find(self._view.run_dir, resume, of_run="last")
        else:
            path = manifest.newest_valid(self._view.run_dir)
        print(f"resuming from {path or 'nothing: there is no checkpoint yet'}", flush=True)
        return path

    def _monitored(self) -> float | None:
        """Return the metric that decides which checkpoint is best, if it was measured just now."""
        monitor, measured = self._config.checkpoint.monitor, self._view.metrics
        if monitor is not None and monitor not in measured:
            kind = monitor.split("/")[0] + "/"
            if any(name.startswith(kind) for name in measured):  # its event came without it
                self._explain_monitor(monitor)
        return self._view.measured_now(monitor or "val/loss")

    def _explain_monitor(self, monitor: str) -> NoReturn:
        raise ValueError(
            f"checkpoint.monitor={monitor} is measured by nobody; there are: "
            f"{', '.join(sorted(self._view.metrics)) or 'none'}"
        )

    def _data_order(self) -> dict[str, Any]:
        """What the order of the samples follows from, beside the clock."""
        return {"seed": self._config.seed, "global_batch_size": self._view.global_batch_size}

    def _check_data_order(self, saved: Mapping[str, Any]) -> None:
        changed = {
            name: (saved[name], value)
            for name, value in self._data_order().items()
            if saved[name] != value
        }
        if changed:
            diff = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items())
            raise ValueError(
                f"resume with another order of the samples: {diff}. Some samples would come twice "
                "and others never; set them back, or start a new run from the weights by "
                "load_weights"
            )


def check_finite(task: nn.Module, step: int) -> None:
    """Refuse weights that are NaN or infinite, as after a gradient that was, with a finite loss.

    Raises:
        NotFiniteError: Naming them; on every rank, for all ranks have the same weights.
    """
    bad = [name for name, p in task.named_parameters() if not bool(p.isfinite().all())]
    if bad:
        raise NotFiniteError(
            f"at step {step} {listed(bad)} became NaN or infinite, though the loss did not. "
            "Nothing was saved since. A gradient must have been: of a square root or norm at 0, "
            "say; detect_anomaly=true names the operation"
        )
