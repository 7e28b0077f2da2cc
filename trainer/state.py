"""The clock of a run, and what a fit leaves behind."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.callbacks.base import Run


@dataclass
class TrainState:
    """Where a run stands. Every schedule, event and file name is expressed in ``step``.

    Attributes:
        step: Optimizer updates done, the skipped ones (fp16 overflow, total weight 0) included.
        epoch: Passes over the training data completed.
        step_in_epoch: Updates done in the current epoch.
        samples: Training samples consumed over all ranks.
        time_s: Seconds spent in ``fit`` over all runs that led here.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    samples: int = 0
    time_s: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return plain values only, so that it loads with ``weights_only=True``."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take every field from ``state``, as ``state_dict`` returned it."""
        for name in asdict(self):
            setattr(self, name, state[name])


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
    """

    step: int
    epoch: int
    samples: int
    metrics: dict[str, float]
    run_dir: Path
    last_checkpoint: Path | None
    best_checkpoint: Path | None
    stop_reason: str

    @classmethod
    def of(cls, run: Run, stop_reason: str | None) -> FitResult:
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
        )
