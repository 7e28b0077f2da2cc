"""The clock of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class TrainState:
    """Where a run stands. Every schedule, event and file name is expressed in ``step``.

    Attributes:
        step: Optimizer updates done, the skipped ones (fp16 overflow, total weight 0) included.
        epoch: Passes over the training data completed.
        step_in_epoch: Updates done in the current epoch.
        samples: Training samples consumed over all ranks.
        logged_step: The step of the last log event, so that none comes twice.
        validated_step: The step of the last validation, likewise.
        ended_epoch: The epochs after which ``TaskModule.on_epoch_end`` has run, likewise.
        sample_weights: The planned weight of a sample (see ``step.py``), by the name of the loss;
            empty before the first step.
        time_s: Seconds spent in ``fit`` over all runs that led here.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    samples: int = 0
    logged_step: int = 0
    validated_step: int = -1
    ended_epoch: int = 0
    sample_weights: dict[str, float] = field(default_factory=dict)
    time_s: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return plain values only, so that it loads with ``weights_only=True``."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take every field from ``state``, as ``state_dict`` returned it."""
        for name, value in state.items():
            setattr(self, name, value)


class OnTheClock:
    """Reads the clock of a run, for those who may not set it."""

    _state: TrainState

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._state.step

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._state.epoch

    @property
    def step_in_epoch(self) -> int:
        """Optimizer steps done in the current epoch."""
        return self._state.step_in_epoch

    @property
    def samples(self) -> int:
        """Training samples consumed, over all ranks."""
        return self._state.samples
