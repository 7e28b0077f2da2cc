"""What is trained, evaluated or predicted, and the stopwatch in its net."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from trainer import TaskModule


@dataclass
class Stopwatch:
    """Takes the time when a net's ``forward`` is called for the n-th time.

    So nothing is hooked into anybody's loop, and what is before and after is left out: start,
    the last checkpoint and the like.

    Attributes:
        clock: What counts the seconds.
        calls: The calls of ``forward`` at which the clock is read.
        times: What it read.
        number: Of calls so far.
    """

    clock: Callable[[], float] = time.perf_counter
    calls: Sequence[int] = ()
    times: list[float] = field(default_factory=list)
    number: int = 0

    def count(self) -> None:
        """Note that ``forward`` is called."""
        self.number += 1
        if self.number in self.calls:
            self.times.append(self.clock())


@dataclass(frozen=True)
class Work:
    """What every contestant does.

    Attributes:
        name: For the table.
        kind: The net, with its loss and optimizer.
        loss: Of (outputs, batch); what a hand-written loop calls for a mean over the batch.
        data: The samples; all that is done lies within one epoch.
        batch_size: Samples of one forward, over all ranks.
        steps: The clock runs from the end of the first of these steps to the end of the second. A
            whole number of log intervals (50 steps) lies between them, and before them the first
            log event, which builds what later ones reuse.
        accumulation: Forwards on each rank per step.
        threads: CPU threads per rank.
        collate: Of the loader; None for torch's own.
        stopwatch: In the nets.
    """

    name: str
    kind: type[TaskModule]
    loss: Callable[[Any, Any], Tensor]
    data: Dataset[Any]
    batch_size: int
    steps: tuple[int, int]
    accumulation: int = 1
    threads: int = 1
    collate: Callable[[Any], Any] | None = None
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    @property
    def total_steps(self) -> int:
        """How many steps are made: one more than are timed, in which the clock is read."""
        return self.steps[1] + 1

    def net(self) -> TaskModule:
        """Return a fresh net, with the stopwatch in it."""
        stopwatch = self.stopwatch

        class Timed(self.kind):  # type: ignore[misc,name-defined]
            def forward(self, batch: Any) -> Any:
                stopwatch.count()
                return super().forward(batch)

        net: TaskModule = Timed()
        return net

    def start(self) -> tuple[TaskModule, torch.optim.Optimizer]:
        """Return a fresh net and its optimizer."""
        net = self.net()
        optimizer = net.configure_optimizers()
        assert isinstance(optimizer, torch.optim.Optimizer)
        return net, optimizer

    def loader(self, *, shuffle: bool = True, shared: bool = False) -> DataLoader[Any]:
        """Return the loader of a hand-written loop, for this rank's share of each batch.

        Args:
            shuffle: Whether in a random order.
            shared: Whether somebody else cuts it into the shares of the ranks.
        """
        sampler: DistributedSampler[Any] | None = None
        if world_size() > 1 and not shared:
            sampler = DistributedSampler(self.data, shuffle=shuffle)
        return DataLoader(
            self.data,
            self.batch_size // world_size(),
            shuffle=shuffle if sampler is None else None,
            sampler=sampler,
            collate_fn=self.collate,
        )


def world_size() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1
