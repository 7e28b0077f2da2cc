"""What one rank computes, by the size of its micro-batch."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.planning.simulation import Compute


@dataclass(frozen=True)
class Profile:
    """Measured at a few sizes of micro-batch, linear between them, proportional above.

    Attributes:
        optimizer_s: The optimizer's step.
        sizes: Samples, ascending.
        forward_s: For each size.
        backward_s: For each size.
        ready_s: For each size, when the gradient of each parameter is there.
        activation_bytes: For each size, what autograd keeps for backward.
    """

    optimizer_s: float
    sizes: list[int]
    forward_s: list[float]
    backward_s: list[float]
    ready_s: list[list[float]]
    activation_bytes: list[int]

    def compute(self, micros: Sequence[int]) -> Compute:
        """Return what a rank computes whose micro-batches have so many samples."""
        *earlier, last = micros
        before_s = sum(self._at(self.forward_s, n) + self._at(self.backward_s, n) for n in earlier)
        return Compute(
            before_s=float(before_s + self._at(self.forward_s, last)),
            backward_s=float(self._at(self.backward_s, last)),
            ready_s=self._at(self.ready_s, last).tolist(),
            after_s=self.optimizer_s,
        )

    def activations(self, size: int) -> float:
        """Return the bytes that autograd keeps of a micro-batch of ``size`` samples."""
        return float(self._at(self.activation_bytes, size))

    def _at(self, values: Sequence[Any], size: int) -> Any:
        above = bisect(self.sizes, size)
        if above == len(self.sizes):
            return np.asarray(values[-1]) * (size / self.sizes[-1])
        if above == 0:
            return np.asarray(values[0])
        low, high = self.sizes[above - 1], self.sizes[above]
        share = (size - low) / (high - low)
        return (1 - share) * np.asarray(values[above - 1]) + share * np.asarray(values[above])
