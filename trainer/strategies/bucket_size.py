"""Finding the best size of DDP's buckets: a few are tried in the first steps of a run.

Small buckets leave early, and the last of them, for which nothing is left to hide behind, is soon
there; large ones cost fewer messages. What is best follows from the network, the model and the
machine, so it is measured, anew in every start of the ranks: they may have other machines then. A
search that other trained parameters break off goes on when the same ones are trained again.

First comes torch's own layout, then sizes far apart, then those beside the best of them. Each gets
a few whole steps, and of each step counts the time of the slowest rank. The ranks take the same
steps with the same sizes, and share their times when a round is over: so all of them find the same.
"""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median

import torch
from torch import nn
from torch._C._distributed_c10d import _DEFAULT_FIRST_BUCKET_BYTES

from trainer import distributed

_MIB = 2**20

TORCHS_OWN_MB = 25.0  # MiB of a bucket, if DDP is left alone,
TORCHS_FIRST_MB = _DEFAULT_FIRST_BUCKET_BYTES / _MIB  # and of the one that it sends first

_SMALLEST, _LARGEST, _FACTOR = 1.0, 256.0, 4.0  # MiB, of the sizes far apart

_AT_FIRST = 4  # steps that do not count, with anything
_UNSETTLED = 2  # with each size: DDP builds its buckets anew after the first
_COUNTED = 4  # then: the median of so many bears one that takes longer, for a log event say
_WORTHWHILE = 0.02  # a smaller gain than this share of a step is no reason to leave torch's own


class BucketSizeSearch:
    """The search for one module, a step at a time.

    Attributes:
        cap_mb: The size to wrap the module with; None for torch's own.
        is_over: Whether that is the best one, or all there is.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        """Begin with torch's own.

        Args:
            module: What is to be wrapped.
            device: Where it is.
        """
        trained = [p for p in module.parameters() if p.requires_grad]
        self._total = sum(p.numel() * p.element_size() for p in trained) / _MIB
        self._device = device
        self._ends: list[float] = []  # of the steps with this size
        self._wait = _AT_FIRST
        self._tried: dict[float | None, list[float]] = {}  # size -> seconds of steps
        self._shared: dict[float | None, float] = {}  # size -> seconds of a step, on all ranks
        self._left: list[float | None] = []
        self.cap_mb: float | None = None
        self.is_over = self._total <= TORCHS_FIRST_MB
        if self.is_over:
            self._say(f"{self._total:.2g} MiB of gradients are one bucket of torch's own size")
            return
        size = _SMALLEST
        while size <= _LARGEST and (not self._left or size / _FACTOR < self._total):
            self._left.append(size)
            size *= _FACTOR

    def go_on(self) -> None:
        """Go on with a module that is wrapped anew, after steps that were another one's."""
        self._ends = []

    def after_backward(self) -> bool:
        """Note that a step's gradients are there.

        Returns:
            Whether the module must be wrapped anew, with ``cap_mb``, before the next step.
        """
        if self.is_over:
            return False
        if self._wait:
            self._wait -= 1
            return False
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._ends.append(time.perf_counter())
        if len(self._ends) < _UNSETTLED + _COUNTED:
            return False
        taken = [end - start for start, end in pairwise(self._ends)]
        self._tried[self.cap_mb] = taken[_UNSETTLED - 1 :]
        self._ends = []
        before = self.cap_mb
        self._next()
        return self.cap_mb != before

    def _next(self) -> None:
        """Take the next size, or the best one if there is none left to try."""
        if not self._left:
            is_first_round = not self._shared
            self._share()
            if is_first_round:
                self._left = self._beside(self._best())
        if self._left:
            self.cap_mb = self._left.pop(0)
        else:
            self.cap_mb, self.is_over = self._best(), True
            self._tell()

    def _share(self) -> None:
        """Find the median step of each new size, the time of the slowest rank for each step."""
        table = torch.tensor(list(self._tried.values()), dtype=torch.float64)
        slowest = distributed.all_gather_tensor(table).amax(dim=0)
        self._shared |= dict(zip(self._tried, map(median, slowest.tolist()), strict=True))
        self._tried = {}

    def _best(self) -> float | None:
        best = min(self._shared, key=self._shared.__getitem__)
        is_worthwhile = self._shared[best] < (1 - _WORTHWHILE) * self._shared[None]
        return best if is_worthwhile else None

    def _beside(self, size: float | None) -> list[float | None]:
        """Return the sizes half and twice as large, but one bucket for everything only once."""
        middle = TORCHS_OWN_MB if size is None else size
        beside = (middle / _FACTOR**0.5, middle * _FACTOR**0.5)
        return [size for size in beside if size < min(self._total, _LARGEST)]

    def _tell(self) -> None:
        in_order = sorted(self._shared.items(), key=lambda item: item[0] or 0)
        times = ", ".join(f"{_show(size)} {seconds * 1000:,.1f}" for size, seconds in in_order)
        self._say(f"{_show(self.cap_mb)} it is; milliseconds of a step by size: {times}")

    def _say(self, what: str) -> None:
        if distributed.rank() == 0:
            print(f"bucket_cap_mb=auto: {what}", flush=True)


def _show(cap_mb: float | None) -> str:
    return "null" if cap_mb is None else f"{cap_mb:g}"
