"""Where the time of a step goes, over all ranks, and which rank the others wait for.

Loading, forward, the backward's own computation and the optimizer are a rank's own; then it waits
for gradients: until they have come over the network, and until slower ranks have theirs. So what a
slow rank costs the others is told apart from communication by the ranks' own parts. What a rank has
measured travels with what is logged, in the same collective.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from trainer import distributed
from trainer.step_times import StepClock, StepTimes
from trainer.strategies.comm_clock import CommTimes

_MOST_COLUMNS = 100  # for the steps of a log interval: of more than this, several go together
_NAMES = [f"perf/{name}_ms" for name in StepTimes._fields]
_NUM_MEANS = len(_NAMES) + len(CommTimes._fields)


class Pace:
    """Measures steps on this rank, and sums up what all ranks have measured."""

    def __init__(self, device: torch.device) -> None:
        """Get ready to measure on ``device``."""
        self._clock = StepClock(device)
        self._times: StepTimes | None = None
        self._knows_comm = False
        self._tells_comm = False  # in some intervals
        self._column_steps = np.zeros(0)  # how many steps go together in each column

    def table(self, take_comm_times: Callable[[], CommTimes | None]) -> torch.Tensor | None:
        """Return what this rank has measured since the last call, to be summed over the ranks.

        Args:
            take_comm_times: The strategy's; called when the host has waited for the device.

        Returns:
            Nanoseconds as int64, a row per rank: loading and forward of each step, then the means.
            None for one rank alone.
        """
        own, self._times = self._clock.take()
        comm = take_comm_times()
        self._knows_comm = comm is not None
        self._tells_comm |= self._knows_comm
        if distributed.world_size() == 1:
            return None
        columns = min(len(own), _MOST_COLUMNS)
        table = torch.zeros(distributed.world_size(), columns + _NUM_MEANS, dtype=torch.int64)
        if self._times is not None:
            starts = np.arange(columns) * len(own) // columns
            self._column_steps = np.diff(starts, append=len(own))
            means = [*self._times, *(comm or CommTimes(0, 0))]
            row = np.append(np.add.reduceat(own, starts), means)
            table[distributed.rank()] = torch.from_numpy(np.rint(row * 1e9).astype(np.int64))
        return table

    def measured(self, table: torch.Tensor | None) -> dict[str, float]:
        """Return the values to log, named ``perf/...``; those that are not known are left out.

        Times are means over the ranks. What the ranks wait for the slowest of each step is no
        communication, so it is taken out there. Where communication is known in other intervals,
        but not in this one, what is reckoned with it is left out, too.

        Args:
            table: What `table` returned, summed over the ranks.
        """
        if self._times is None:
            return {}
        if table is None:
            return {n: 1000 * s for n, s in zip(_NAMES, self._times, strict=True)}
        millis = table.numpy() / 1e6
        own, times, comm = np.split(millis, [-_NUM_MEANS, -len(CommTimes._fields)], axis=1)
        if self._tells_comm and not self._knows_comm:
            values = dict(zip(_NAMES, times.mean(axis=0).tolist(), strict=True))
            del values["perf/backward_ms"]  # has all waiting in it
            return values
        exposed = comm[:, 0] - comm[:, 1]
        *_, backward, optimizer = times.T
        backward[:] = np.maximum(backward - exposed, 0.0)
        arrivals, num_steps = own, self._column_steps.sum()
        if self._knows_comm:  # else how long a rank itself computes backward is not known either
            arrivals = own + np.outer(backward + optimizer, self._column_steps)
        wait = float((arrivals.max(axis=0) - arrivals).mean(axis=0).sum() / num_steps)
        totals = arrivals.sum(axis=1) / num_steps
        slowest = int(totals.argmax())
        values = dict(zip(_NAMES, times.mean(axis=0).tolist(), strict=True))
        values["perf/wait_ms"] = wait
        values["perf/slowest_rank"] = slowest
        values["perf/slowest_by_ms"] = float(totals[slowest] - np.delete(totals, slowest).mean())
        if self._knows_comm:
            hidden = float(comm[:, 1].mean())
            values["perf/comm_ms"] = hidden + max(0.0, float(exposed.mean()) - wait)
            values["perf/comm_hidden_ms"] = hidden
        return values
