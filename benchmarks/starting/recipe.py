"""The task of the MNIST recipe, with the benchmark's clock; the recipe itself runs it."""

from __future__ import annotations

from benchmarks.starting.digits import note_step
from recipes.mnist import MnistTask


class Digits(MnistTask):
    """The recipe's."""

    def after_optimizer_step(self) -> None:
        """Note it for the benchmark."""
        note_step(self.run.step + 1)
