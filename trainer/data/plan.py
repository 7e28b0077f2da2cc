"""The global-batch plan: which samples make up a step, and which rank computes them.

Everything here is arithmetic on positions (0 is the first sample of the epoch), the same on every
rank and at every world size. A global batch is cut into *micro-batches* in order; every rank owns
a contiguous block of them. Nothing has to divide evenly: the loss is weighted by what is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from trainer.seeding import Stream, stream_key


class Slice(NamedTuple):
    """One micro-batch of a global batch.

    Attributes:
        number: Its number within the global batch, over all ranks.
        start: Its first sample, counted from the start of the global batch.
        stop: One past its last sample.
    """

    number: int
    start: int
    stop: int


@dataclass(frozen=True)
class GlobalBatchPlan:
    """How global batches are cut.

    Attributes:
        global_batch_size: Samples per step over all ranks; None if every batch has its own size,
            as with a user's batch sampler.
        micro_batch_size: The most samples per forward on one rank; None for an even share of the
            global batch.
        halving: Whether the ranks' blocks are got by halving the list of micro-batches again and
            again, so that each is a subtree of one binary tree (see ``tree_sum.py``); then the
            world size must be a power of two.
    """

    global_batch_size: int | None
    micro_batch_size: int | None = None
    halving: bool = False

    def micro(self, size: int, world_size: int) -> int:
        """The most samples in a micro-batch of a global batch of ``size`` samples."""
        full = self.global_batch_size or size
        return self.micro_batch_size or ceil_div(full, world_size)

    def accumulation_steps(self, size: int, world_size: int) -> int:
        """The most micro-batches that one rank computes for a global batch of ``size`` samples."""
        return len(self.cut(size, 0, world_size))  # no other rank has more, or is filled before

    def cut(self, size: int, rank: int, world_size: int) -> list[Slice]:
        """Return the micro-batches of ``rank``; none where no sample is left for it.

        A shorter global batch is cut like a full one of which the end is missing, so a micro-batch
        has the same rank at the end of an epoch as anywhere else.
        """
        micro, mine = self.micro(size, world_size), self.block(size, rank, world_size)
        return [Slice(i, i * micro, min((i + 1) * micro, size)) for i in mine if i * micro < size]

    def block(self, size: int, rank: int, world_size: int) -> range:
        """Return the numbers of the micro-batches that are ``rank``'s, where they have samples."""
        full = max(size, self.global_batch_size or size)
        count = ceil_div(full, self.micro(size, world_size))
        if not self.halving:
            per_rank = ceil_div(count, world_size)
            return range(rank * per_rank, (rank + 1) * per_rank)
        block = range(count)
        while world_size > 1:
            world_size //= 2
            left, right = halves(block)
            block = right if rank & world_size else left
        return block

    def steps_per_epoch(self, num_samples: int, drop_last: bool) -> int:
        """The number of global batches in ``num_samples`` samples."""
        assert self.global_batch_size is not None
        if drop_last:
            return num_samples // self.global_batch_size
        return ceil_div(num_samples, self.global_batch_size)


def epoch_order(num_samples: int, seed: int, epoch: int, shuffle: bool) -> torch.Tensor:
    """Return the dataset index at every position of an epoch: a pure function of its arguments.

    Returns:
        An int64 tensor of shape ``(num_samples,)``: a permutation, or ``arange`` unshuffled.
    """
    if not shuffle:
        return torch.arange(num_samples)
    generator = torch.Generator().manual_seed(stream_key(seed, Stream.EPOCH_ORDER, epoch))
    return torch.randperm(num_samples, generator=generator)


def halves(block: range) -> tuple[range, range]:
    """Divide a contiguous block in two; the left one has the odd element."""
    middle = ceil_div(block.start + block.stop, 2)
    return range(block.start, middle), range(middle, block.stop)


def ceil_div(a: int, b: int) -> int:
    """Return ``a / b`` rounded up, for non-negative integers."""
    return -(-a // b)
