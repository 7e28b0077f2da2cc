"""Where the time of a step goes, over all ranks, and which rank the others wait for.

Loading, forward, the backward's own computation and the optimizer are a rank's own; then it waits
for gradients: until they have come over the network, and until slower ranks have theirs. So what a
slow rank costs the others is told apart from communication by the ranks' own parts. What a rank has
measured travels with what is logged, in the same collective, and with it how much memory it needs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from trainer import distributed
from trainer.speed.memory import peak_bytes
from trainer.speed.step_times import StepClock, Steps, StepTimes
from trainer.strategies.comm_clock import CommTimes

_MOST_COLUMNS = 100  # for the steps of a log interval: of more than this, several go together
_NAMES = [f"perf/{name}_ms" for name in StepTimes._fields]
_NUM_LAST = len(_NAMES) + 3  # and a backward's computation, hidden communication, and memory
_MEMORY = "perf/memory_mb"


class Pace:
    """Measures steps on this rank, and sums up what all ranks have measured.

    Attributes:
        memory_mb: The most memory that each rank has had so far, in 10^6 bytes.
    """

    def __init__(self, device: torch.device) -> None:
        """Get ready to measure on ``device``."""
        self.memory_mb: list[float] = []
        self._device = device
        self._clock = StepClock(device)
        self._mean: StepTimes | None = None
        self._knows_comm = False
        self._tells_comm = False  # in some intervals
        self._column_steps = np.zeros(0)  # how many steps that count go together in each column

    def table(self, take_comm_times: Callable[[], CommTimes | None]) -> torch.Tensor | None:
        """Return what this rank has measured since the last call, to be summed over the ranks.

        Args:
            take_comm_times: The strategy's; called when the host has waited for the device.

        Returns:
            Nanoseconds as int64, a row per rank: all but the backward of each step that counts,
            then the means, and last the bytes of memory. None for one rank alone.
        """
        steps = self._clock.take()
        comm = take_comm_times()
        self._mean = None if steps is None else steps.mean
        self._knows_comm = comm is not None
        self._tells_comm |= self._knows_comm
        peak = peak_bytes(self._device)
        if distributed.world_size() == 1:
            self.memory_mb = [peak / 1e6]
            return None
        columns = 0 if steps is None else min(len(steps.counts), _MOST_COLUMNS)
        table = torch.zeros(distributed.world_size(), columns + _NUM_LAST, dtype=torch.int64)
        own = table[distributed.rank()]
        own[-1] = peak
        if steps is not None:
            starts = np.arange(columns) * len(steps.counts) // columns
            self._column_steps = np.add.reduceat(steps.counts, starts)
            before = np.add.reduceat(steps.counts * steps.before, starts)
            backward = (0.0, 0.0) if comm is None else (_computing(steps, comm), comm.hidden)
            row = np.array([*before, *steps.mean, *backward])
            own[:-1] = torch.from_numpy(np.rint(row * 1e9).astype(np.int64))
        return table

    def measured(self, table: torch.Tensor | None) -> dict[str, float]:
        """Return the values to log, named ``perf/...``; those that are not known are left out.

        Times are means over the ranks, and all are of the steps that count. A backward's time is a
        rank's own computation, then it waits: for the slowest rank of the step, as the ranks' own
        parts tell, and else for the network. Where communication is not known, all that is not
        waiting for a rank is the backward's; where it is known in other intervals, but not in this
        one, what is reckoned with it is left out.

        Args:
            table: What `table` returned, summed over the ranks.
        """
        if self._mean is None:
            return {}
        if table is None:
            means_alone = {n: 1000 * s for n, s in zip(_NAMES, self._mean, strict=True)}
            return {**means_alone, _MEMORY: self.memory_mb[0]}
        # Nanoseconds become milliseconds, and bytes 10^6 of them.
        before, means, (computing, hidden), (memory,) = np.split(
            table.numpy().T / 1e6, [-_NUM_LAST, -3, -1]
        )
        self.memory_mb = memory.tolist()
        values = dict(zip(_NAMES, means.mean(axis=1).tolist(), strict=True))
        values[_MEMORY] = max(self.memory_mb)
        if self._tells_comm and not self._knows_comm:
            del values["perf/backward_ms"]  # has all waiting in it
            return values
        backward = values["perf/backward_ms"]
        arrivals = before + np.outer(self._column_steps, computing)
        num_steps = self._column_steps.sum()
        waiting = backward - float(computing.mean())
        wait = float((arrivals.max(axis=1) - arrivals.mean(axis=1)).sum() / num_steps)
        wait = min(wait, waiting)  # some of it passes while a rank still computes
        totals = arrivals.sum(axis=0) / num_steps
        slowest = int(totals.argmax())
        values["perf/backward_ms"] = backward - (waiting if self._knows_comm else wait)
        values["perf/wait_ms"] = wait
        values["perf/slowest_rank"] = slowest
        values["perf/slowest_by_ms"] = float(totals[slowest] - np.delete(totals, slowest).mean())
        if self._knows_comm:
            values["perf/comm_ms"] = float(hidden.mean()) + waiting - wait
            values["perf/comm_hidden_ms"] = float(hidden.mean())
        return values


def _computing(steps: Steps, comm: CommTimes) -> float:
    """Return the seconds of a backward in which the rank itself computes.

    It varies less than the waiting, so it is taken from the steps whose communication is known, and
    what else backwards take is waiting.
    """
    known = [-1 - ago for ago in comm.steps_ago if ago < len(steps.backward)]
    backward = float(steps.backward[known].mean()) if known else steps.mean.backward
    return min(max(0.0, backward - (comm.total - comm.hidden)), steps.mean.backward)
