"""The learning rate in the log."""

from __future__ import annotations

from trainer.callbacks.base import Callback
from trainer.run import Run


class LearningRate(Callback):
    """Adds ``train/lr`` (``train/lr/<group>`` for several groups) to every log event."""

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        """Add the current rates."""
        metrics.update(run.learning_rates)
