"""What a callback is, and the view of the run that it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config import TrainerConfig
from trainer.state import TrainState
from trainer.task import TaskModule

if TYPE_CHECKING:
    from trainer.loggers.base import Logger


@dataclass
class Run:
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
        loggers: The loggers of the run.
        learning_rates: The current rate of each parameter group: ``{"train/lr": ...}`` for one
            group, ``train/lr/<group>`` for several.
        metrics: The latest value of every metric by name.
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
    loggers: Sequence[Logger] = ()
    learning_rates: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    last_checkpoint: Path | None = None
    best_checkpoint: Path | None = None
    _state: TrainState = field(default_factory=TrainState)
    _stop_reason: str | None = None
    _save_requested: bool = False
    _measured_at: dict[str, int] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._state.step

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._state.epoch

    @property
    def samples(self) -> int:
        """Training samples consumed, over all ranks."""
        return self._state.samples

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


class Callback:
    """Observes a run on rank 0. Subclasses override what they need.

    Callbacks get plain numbers and cannot start a collective. They run in the order in which they
    are given; a value that ``on_log`` adds to ``metrics`` reaches the callbacks after it and the
    loggers. ``state_dict`` travels in every checkpoint.
    """

    def on_fit_start(self, run: Run) -> None:
        """Run before the first step."""

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        """Run every ``log_every_n_steps`` steps with the values since the last time."""

    def on_validation_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Run after each validation with its metrics (``val/loss``, ...)."""

    def on_save(self, run: Run, path: Path) -> None:
        """Run when the checkpoint in ``path`` is complete."""

    def on_fit_end(self, run: Run) -> None:
        """Run once after the last step, also when the run was stopped early."""

    def close(self) -> None:
        """Let go of what ``on_fit_start`` took (threads, files); called once, after errors too."""

    def state_dict(self) -> dict[str, Any]:
        """Return what has to survive a resume: tensors and plain values only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""
