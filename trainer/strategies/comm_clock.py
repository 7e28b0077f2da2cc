"""How long gradients are on their way, as DDP itself measures it in some of the steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from trainer.watch import watch

_SAMPLES = 8  # steps to look at, of those between two log events,
_LEAST_GAP = 5  # but not more than one in so many: a look takes some 10 µs
_BUCKETS_ARE_SETTLED = 3  # DDP rebuilds them after the first step, and tells so after this one


class CommTimes(NamedTuple):
    """Seconds of communication in a step, the mean of several.

    Attributes:
        total: From the first bucket that is sent to the last one that is back, on this rank: waits
            for slower ranks are in it.
        hidden: The part of it in which backward still computes.
        steps_ago: Which steps these were, 0 for the last one; empty for all since the last time.
    """

    total: float
    hidden: float
    steps_ago: tuple[int, ...] = ()


class CommClock:
    """Reads the timers of one wrapped module.

    They see a step's first bucket leave and the last one arrive, whatever a communication hook does
    in between. DDP reads them before the next step. On an accelerator they are events in its
    stream, which hold the host up when they are read: so there only one step is looked at, the one
    that is logged next if log events are as far apart as they can be, when the host has waited in
    any case.
    """

    def __init__(self, ddp: DistributedDataParallel, device: torch.device) -> None:
        """Begin with the next step of ``ddp``, on ``device``."""
        self._ddp = ddp
        self._reads_at_once = device.type == "cpu"
        self._step = 0
        self._read_step = 0
        self._taken_step = 0
        self._longest = 0  # of the intervals between log events, in steps
        self._times: list[tuple[int, int, int]] = []
        if self._reads_at_once:  # else torch's own 100, until the first log event
            self._look_every(_BUCKETS_ARE_SETTLED)

    def after_step(self) -> None:
        """Note that a step's last backward is done."""
        self._step += 1
        if self._step == _BUCKETS_ARE_SETTLED:
            # Not while a backward runs, in which this would wait for a lock, holding the GIL.
            found = self._ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
            sizes: str = found.get("rebuilt_bucket_sizes", found["bucket_sizes"])
            watch.num_buckets = sizes.count(",") + 1
        if self._reads_at_once and not self._step % self._every:
            self._read()

    def take(self) -> CommTimes | None:
        """Return the mean of the steps looked at since the last call; None without any."""
        steps, self._taken_step = self._step - self._taken_step, self._step
        if not steps:
            return None
        if not self._times:
            self._read()
        times, self._times = self._times, []
        self._longest = max(self._longest, steps)
        if self._reads_at_once:
            self._look_every(min(steps, max(_LEAST_GAP, steps // _SAMPLES)))
        else:
            self._look_every(self._step + self._longest)  # DDP looks at the multiples
        if not times:
            return None
        steps_done, *nanos = zip(*times, strict=True)
        total, hidden = (sum(each) / len(times) / 1e9 for each in nanos)
        return CommTimes(total, hidden, tuple(self._step - step for step in steps_done))

    def _look_every(self, steps: int) -> None:
        self._every = steps
        self._ddp._set_ddp_runtime_logging_sample_rate(steps)  # type: ignore[no-untyped-call]

    def _read(self) -> None:
        assert self._ddp.logger is not None
        self._ddp.logger.set_runtime_stats_and_log()  # DDP does so before the next step
        found = self._ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        total: int = found.get("backward_comm_time", 0)
        if total and found["iteration"] > self._read_step:
            self._read_step = found["iteration"]
            hidden: int = found["backward_compute_comm_overlap_time"]
            self._times.append((self._read_step, total, hidden))
