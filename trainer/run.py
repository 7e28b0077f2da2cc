"""A run as rank 0's callbacks and loggers see it, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any

from trainer.config import TrainerConfig
from trainer.state import OnTheClock, TrainState
from trainer.task import TaskModule

if TYPE_CHECKING:
    from trainer.loggers.base import Logger


@dataclass
class Run(OnTheClock):
    """A run as rank 0's callbacks and loggers see it: plain values, and two requests.

    Attributes:
        task: The unwrapped module. During a callback it is in eval mode, without gradients.
        config: Every option of the Trainer, validated.
        run_dir: The folder that holds everything the run writes.
        world_size: Number of ranks.
        global_batch_size: Samples per optimizer step, over all ranks; None, like the next two, if
            a user's batch sampler gives every batch its own size.
        micro_batch_size: Most samples per forward on one rank.
        accumulation_steps: Most micro-batches per step on one rank.
        total_steps: Optimizer steps of the whole run; None if only the data's end tells.
        steps_per_epoch: Optimizer steps in one epoch; None if only the data's end tells.
        device: Where the task is.
        faster_loading: What to try where training waits for its data.
        run_config: The config of the whole run, resolved, in plain values.
        hosts: The names of the machines that it runs on.
        status: ``running``, and at the end ``finished``, ``failed`` or ``stopped by <signal>``.
        learning_rates: The current rate of each parameter group: ``{"train/lr": ...}`` for one
            group, ``train/lr/<group>`` for several.
        metrics: The latest value of every metric by name.
        memory_mb: The most memory that each rank has had, in 10^6 bytes, by the last log event: of
            its device, or on the CPU resident; empty before the first one.
        last_checkpoint: The newest checkpoint on disk, or None.
        best_checkpoint: The best one by the monitored metric, or None.
    """

    task: TaskModule
    config: TrainerConfig
    run_dir: Path
    world_size: int
    global_batch_size: int | None
    micro_batch_size: int | None
    accumulation_steps: int | None
    total_steps: int | None
    steps_per_epoch: int | None
    device: str
    faster_loading: Sequence[str] = ()
    run_config: Mapping[str, Any] = field(default_factory=dict)
    hosts: Sequence[str] = ()
    status: str = "running"
    learning_rates: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    memory_mb: Sequence[float] = ()
    last_checkpoint: Path | None = None
    best_checkpoint: Path | None = None
    _loggers: Sequence[Logger] = ()
    _state: TrainState = field(default_factory=TrainState)
    _stop_reason: str | None = None
    _save_requested: bool = False
    _measured_at: dict[str, int] = field(default_factory=dict)

    @property
    def loggers(self) -> list[Any]:
        """The loggers of the run, as the user gave them; external ones once they are open."""
        return [logger.own for logger in self._loggers]

    @property
    def time_s(self) -> float:
        """Seconds spent in ``fit``, earlier runs that this one resumes included."""
        return self._state.time_s

    @property
    def stop_reason(self) -> str | None:
        """Why the run ends before its limits; None if it does not."""
        return self._stop_reason

    def record(self, values: Mapping[str, float]) -> None:
        """Note values measured at the current step; the loop calls this."""
        self.metrics.update(values)
        self._measured_at.update(dict.fromkeys(values, self.step))

    def measured_now(self, name: str) -> float | None:
        """Return a metric if it was measured at exactly the current step, else None."""
        return self.metrics[name] if self._measured_at.get(name) == self.step else None

    def state_dict(self) -> dict[str, Any]:
        """Return the latest metrics, and when each was measured; how fast a run is, is not kept."""
        kept = [name for name in self.metrics if not name.startswith("perf/")]
        return {
            "metrics": {name: self.metrics[name] for name in kept},
            "measured_at": {name: self._measured_at[name] for name in kept},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""
        self.metrics.update(state["metrics"])
        self._measured_at.update(state["measured_at"])

    def request_stop(self, reason: str) -> None:
        """Ask the loop to end; it does so for all ranks at once, right after this event."""
        self._stop_reason = reason

    def request_save(self) -> None:
        """Ask the loop for a checkpoint, right after this event."""
        self._save_requested = True

    def take_requests(self) -> tuple[str | None, bool]:
        """Return the reason to stop, if any, and whether to save; the loop calls this."""
        save, self._save_requested = self._save_requested, False
        return self._stop_reason, save


@dataclass(frozen=True)
class FitResult:
    """What a fit leaves behind.

    Attributes:
        step: Optimizer steps done.
        epoch: Epochs completed.
        samples: Training samples consumed, over all ranks.
        metrics: The last value of every metric by name.
        run_dir: The folder with everything the run wrote.
        last_checkpoint: The newest checkpoint, or None.
        best_checkpoint: The best one by the monitored metric, or None.
        stop_reason: Why the run ended.
        signal: The signal that asked it to stop, or None.
    """

    step: int
    epoch: int
    samples: int
    metrics: dict[str, float] = field(repr=False)  # a repr is one line
    run_dir: Path
    last_checkpoint: Path | None = field(repr=False)
    best_checkpoint: Path | None = field(repr=False)
    stop_reason: str
    signal: Signals | None = field(default=None, repr=False)

    @classmethod
    def of(cls, run: Run, stop_reason: str | None, signal: Signals | None) -> FitResult:
        """Sum up a run that has ended."""
        return cls(
            step=run.step,
            epoch=run.epoch,
            samples=run.samples,
            metrics=dict(run.metrics),
            run_dir=run.run_dir,
            last_checkpoint=run.last_checkpoint,
            best_checkpoint=run.best_checkpoint,
            stop_reason=stop_reason or "",
            signal=signal,
        )
