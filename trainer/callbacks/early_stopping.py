"""Stop when a metric no longer improves."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from trainer.callbacks.base import Callback
from trainer.run import Run


class EarlyStopping(Callback):
    """Stops the run after ``patience`` validations in a row without improvement.

    It also stops at once when the metric is NaN or infinite.

    Args:
        monitor: Name of the metric: one of the validation's (``val/loss``), else the latest value
            of any other (``train/loss``).
        mode: ``"min"`` if smaller is better, ``"max"`` if larger is.
        patience: How many validations without improvement end the run.
        min_delta: An improvement is a change by more than this.
    """

    def __init__(
        self, monitor: str, mode: str = "min", patience: int = 3, min_delta: float = 0.0
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"EarlyStopping(mode={mode!r}): mode must be 'min' or 'max'")
        if patience < 1:
            raise ValueError(f"EarlyStopping(patience={patience}): patience must be at least 1")
        if min_delta < 0:
            raise ValueError(
                f"EarlyStopping(min_delta={min_delta}): min_delta must not be negative"
            )
        self.monitor = monitor
        self.mode = mode
        self.patience = patience
        self.min_delta = min_delta
        self._best: float | None = None
        self._last: float | None = None
        self._without_improvement = 0
        self._validations = 0

    def on_fit_start(self, run: Run) -> None:
        """Forget an earlier fit, unless this one goes on from it; that may have run to its end."""
        self._validations = 0
        if run.step == 0:
            self._best, self._last, self._without_improvement = None, None, 0
        self._stop_if_due(run)

    def on_validation_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Compare with the best value so far, and ask for a stop when patience runs out."""
        self._validations += 1
        known = {**run.metrics, **metrics}
        if self.monitor not in known:
            raise ValueError(
                f"EarlyStopping monitors {self.monitor!r}, which nothing logs; monitor one of "
                f"{', '.join(sorted(known)) or 'the metrics that the task logs (it logs none)'}"
            )
        self._last = value = known[self.monitor]
        if self._improves(value):
            self._best, self._without_improvement = value, 0
        else:
            self._without_improvement += 1
        self._stop_if_due(run)

    def on_fit_end(self, run: Run) -> None:
        """Warn if there was nothing to watch."""
        if not self._validations and self._last is None:
            warnings.warn(
                f"EarlyStopping(monitor={self.monitor!r}) had no effect: the run had no validation",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the best and the last value, and the count of validations since the best."""
        return {
            "best": self._best,
            "last": self._last,
            "without_improvement": self._without_improvement,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""
        self._best = state["best"]
        self._last = state["last"]
        self._without_improvement = state["without_improvement"]

    def _stop_if_due(self, run: Run) -> None:
        if self._last is not None and not math.isfinite(self._last):
            run.request_stop(f"{self.monitor} is {self._last} at step {run.step}")
        elif self._without_improvement >= self.patience:
            run.request_stop(
                f"{self.monitor} has not improved on {self._best:.6g} in "
                f"{self._without_improvement} validations"
            )

    def _improves(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self._best is None:
            return True
        gain = self._best - value if self.mode == "min" else value - self._best
        return gain > self.min_delta
