"""Which rank the others wait for in ordinary steps, and for how long.

Loading and forward are a rank's own; in the backward the ranks wait for the slowest. How long each
step's own part took travels with what is logged, in the same collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trainer import distributed

_MOST_PARTS = 100  # of a log interval: of more steps than this, several go together


class Pace:
    """The steps since the last log event, on all ranks.

    Attributes:
        table: Microseconds of loading and forward by rank and step; of this rank alone, until it
            is summed over the ranks.
    """

    def __init__(self, own_steps: Sequence[float]) -> None:
        """Fill this rank's row of the table.

        Args:
            own_steps: The seconds of loading and forward in each step, of as many steps on every
                rank.
        """
        self._num_steps = len(own_steps)
        parts = min(self._num_steps, _MOST_PARTS)
        self.table = torch.zeros(distributed.world_size(), parts, dtype=torch.int64)
        if parts:
            micros = np.rint(np.multiply(own_steps, 1e6)).astype(np.int64)
            starts = np.arange(parts) * self._num_steps // parts
            self.table[distributed.rank()] = torch.from_numpy(np.add.reduceat(micros, starts))

    def measured(self) -> dict[str, float]:
        """Return ``perf/slowest_rank`` and ``perf/wait_ms``; nothing for one rank alone.

        The slowest rank is the one that took longest for all steps together. The other value is
        how long a rank waits for the slowest one of a step, the mean over ranks and steps.
        """
        world_size = len(self.table)
        if world_size == 1 or not self._num_steps:
            return {}
        waits = self.table.max(dim=0).values - self.table
        return {
            "perf/slowest_rank": float(self.table.sum(dim=1).argmax()),
            "perf/wait_ms": float(waits.sum()) / world_size / self._num_steps / 1000,
        }
