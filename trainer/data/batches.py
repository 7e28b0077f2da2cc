"""Datasets with indices: which samples a rank loads for each micro-batch.

Torch's ``DataLoader`` does the loading; what is ours is the *request*: the indices that go into
this rank's next micro-batch.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

from torch.utils.data import DataLoader, Sampler

from trainer import distributed
from trainer.data.fetching import Fetch, Request
from trainer.data.loading import (
    Batches,
    LoaderOptions,
    MicroBatch,
    Source,
    data_loader,
    length,
    set_epoch,
)
from trainer.data.plan import GlobalBatchPlan, Slice, ceil_div, epoch_order
from trainer.data.streams import stream_batches
from trainer.seeding import seed_everything, stream_key

# How many global batches of a user's sampler travel from rank 0 to the others at once.
SHARED_BATCHES = 256


def train_batches(
    source: Source,
    plan: GlobalBatchPlan,
    options: LoaderOptions,
    *,
    shuffle: bool,
    drop_last: bool,
    limit: int | None,
    overfit: int,
    indices: Callable[[int, int], Sequence[int]] | None,
) -> Batches:
    """Return a rank's training micro-batches.

    Args:
        source: The training data.
        plan: How a global batch is cut.
        options: How to load.
        shuffle: Whether every epoch has a new order.
        drop_last: Whether an epoch's last, smaller global batch is left out.
        limit: The most global batches in an epoch.
        overfit: If not 0, train on the first so many global batches only, in the same order.
        indices: Of (seed, epoch), the order of one epoch, instead of the shuffle; asked on rank 0.

    Raises:
        ValueError: If there is no training sample, or not one whole global batch to keep.
    """
    global_batches: _GlobalBatches
    limit = min(limit or overfit, overfit) if overfit else limit
    if source.is_stream:
        if source.loader is not None:
            drop_last = source.loader.drop_last
        return stream_batches(source, plan, options, drop_last=drop_last, limit=limit)
    num_samples = length(source.dataset)
    if num_samples == 0:
        raise ValueError(
            "the training set is empty: its length is 0; check the path or split it is built from"
        )
    if source.loader is not None:
        global_batches = _SampledBatches(source.loader, limit, repeats=overfit > 0)
        return IndexedBatches(source, plan, global_batches, options)

    size = cast(int, plan.global_batch_size)
    first: Sequence[int] = range(cast(int, num_samples))

    def order(epoch: int) -> Sequence[int]:
        if overfit:
            return first
        if indices is not None:
            own = [int(i) for i in indices(options.seed, epoch)] if _is_first() else []
            return distributed.broadcast_object(own)
        found: list[int] = epoch_order(len(first), options.seed, epoch, shuffle).tolist()
        return found

    if indices is not None and not overfit:
        first = order(0)
    steps = plan.steps_per_epoch(len(first), drop_last)
    steps = steps if limit is None else min(steps, limit)
    if steps == 0:
        what = "train_indices(seed, epoch=0) returned" if indices else "the training set has"
        raise ValueError(
            f"an epoch has no global batch: {what} {len(first)} samples, with global_batch_size="
            f"{size} and drop_last={drop_last}; lower global_batch_size to at most {len(first)}, "
            "set drop_last=false, or give more samples"
        )
    global_batches = _PlannedBatches(order, len(first), size, steps)
    return IndexedBatches(source, plan, global_batches, options)


def evaluation_batches(
    source: Source, plan: GlobalBatchPlan, options: LoaderOptions, *, limit: int | None
) -> Batches:
    """Return a rank's micro-batches of an evaluation set: over all ranks, each sample once.

    Each rank gets a contiguous block, so that the blocks in rank order are the dataset's order. A
    stream is cut by position, in its own order, also if it could shard itself.

    Args:
        source: The data.
        plan: How large micro-batches are.
        options: How to load.
        limit: The most global batches to evaluate.
    """
    size = cast(int, plan.global_batch_size)
    micro = plan.micro(size, distributed.world_size())
    if source.is_stream:
        # Larger micro-batches than an even share would leave ranks without work.
        plan = GlobalBatchPlan(size, min(micro, ceil_div(size, distributed.world_size())))
        return stream_batches(source, plan, options, drop_last=False, limit=limit, in_order=True)
    if source.loader is None:
        samples = len(source.dataset)
        if limit is not None:
            samples = min(samples, limit * size)
        whole: list[Sequence[int]] = [range(samples)]
    else:
        # One pass of the user's sampler on rank 0: it may be unseeded.
        batches = itertools.islice(_sampler_batches(source.loader), limit) if _is_first() else ()
        whole = distributed.broadcast_object(list(batches))
    chunks: list[tuple[int, Sequence[int]]] = []
    position = 0
    for indices in whole:
        for start in range(0, len(indices), micro):
            part = indices[start : start + micro]
            chunks.append((position + start, part))
        position += len(indices)
    per_rank = ceil_div(len(chunks), distributed.world_size())
    mine = chunks[distributed.rank() * per_rank :][:per_rank]
    return _EvaluationBatches(source, mine, position, options)


class IndexedBatches(Batches):
    """Micro-batches of a dataset with indices, cut by the plan out of lists of indices."""

    def __init__(
        self,
        source: Source,
        plan: GlobalBatchPlan,
        global_batches: _GlobalBatches,
        options: LoaderOptions,
    ) -> None:
        """Set up the loader.

        Args:
            source: Where the samples are.
            plan: How a global batch is cut.
            global_batches: The indices of each global batch.
            options: How to load.
        """
        self.steps_per_epoch = global_batches.steps_per_epoch
        self._plan = plan
        self._global_batches = global_batches
        self._source = source
        self._seed = options.seed
        self._requests = _Requests()
        self._loader = data_loader(Fetch(source), options, source.loader, sampler=self._requests)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of one epoch, from global batch ``start_step`` on."""
        set_epoch(self._source.dataset, epoch)
        # A user's sampler may draw from the global generators: the same at any world size, and
        # after a resume. What a dataset draws then is not the same on every rank.
        seed_everything(stream_key(self._seed, epoch))
        batches = self._global_batches.start(epoch, start_step)
        seed_everything(stream_key(self._seed, epoch, distributed.rank()))
        position = start_step * (self._plan.global_batch_size or 0)
        self._requests.next_epoch = self._cut(batches, position, epoch)
        for micro in self._loader:
            yield micro
            if micro.is_last:
                self._global_batches.after_step()

    def _cut(
        self, batches: Iterator[Sequence[int]], position: int, epoch: int
    ) -> Iterator[Request]:
        rank, world_size = distributed.rank(), distributed.world_size()
        cuts: dict[int, list[Slice]] = {}  # of global batches by size: nearly all have the same
        for indices in batches:
            size = len(indices)
            mine = cuts.get(size)
            if mine is None:
                mine = cuts[size] = self._plan.cut(size, rank, world_size)
            if not mine:
                yield Request((), position, 0, size, True, epoch)
            for cut in mine:
                is_last = cut is mine[-1]
                part = indices[cut.start : cut.stop]
                start = position + cut.start
                yield Request(part, start, cut.number, size, is_last, epoch)
            position += size


class _GlobalBatches:
    """Which indices make up each global batch of an epoch; the same on every rank.

    Only `start` and `after_step` may use collectives: every rank calls them at the same step. The
    iterator runs ahead where there are loader workers, on each rank by as much as suits it.

    Attributes:
        steps_per_epoch: Global batches in an epoch; None if only the data's end tells.
    """

    steps_per_epoch: int | None

    def start(self, epoch: int, start_step: int) -> Iterator[Sequence[int]]:
        """Yield the indices of each global batch from ``start_step`` on."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Get ready for the next step."""


class _PlannedBatches(_GlobalBatches):
    """Equal parts of an epoch's order."""

    def __init__(
        self, order: Callable[[int], Sequence[int]], num_samples: int, size: int, steps: int
    ) -> None:
        self.steps_per_epoch = steps
        self._order = order
        self._num_samples = num_samples
        self._size = size
        self._steps = steps

    def start(self, epoch: int, start_step: int) -> Iterator[Sequence[int]]:
        indices = self._order(epoch)
        if len(indices) != self._num_samples:
            raise ValueError(
                f"train_indices(seed, epoch={epoch}) returned {len(indices)} indices, but "
                f"{self._num_samples} for epoch 0; every epoch must have the same length"
            )
        size = self._size
        return (indices[i * size : (i + 1) * size] for i in range(start_step, self._steps))


class _SampledBatches(_GlobalBatches):
    """A user's DataLoader's index batches: drawn on rank 0, and shared a chunk at a time.

    Two chunks are there at the start of an epoch and one is added whenever one has been used up,
    so the loader never runs into the end of what is there.
    """

    def __init__(self, loader: DataLoader[Any], limit: int | None, repeats: bool) -> None:
        """Look at the sampler's length.

        Args:
            loader: The user's.
            limit: The most global batches in an epoch.
            repeats: Whether every epoch has the batches of the first one.
        """
        self._loader = loader
        self._limit = limit
        self._repeats = repeats
        self._kept: list[list[int]] | None = None
        self._announced = length(loader.batch_sampler)
        if self._announced == 0:
            raise ValueError(
                f"the training DataLoader yields no batch: {length(loader.dataset)} samples, "
                f"batch_size={loader.batch_size}, drop_last={loader.drop_last}; lower batch_size "
                "or keep the last batch"
            )
        known = [steps for steps in (self._announced, limit) if steps is not None]
        self.steps_per_epoch = min(known, default=None)
        self._chunk = max(SHARED_BATCHES, (loader.prefetch_factor or 0) * loader.num_workers)

    def start(self, epoch: int, start_step: int) -> Iterator[Sequence[int]]:
        drawn = self._draw(epoch) if _is_first() else iter(())
        self._drawn = itertools.islice(drawn, start_step, self._limit)
        self._ready: deque[list[int]] = deque()
        self._ended = False
        self._steps = 0
        self._share()
        self._share()
        return self._take()

    def after_step(self) -> None:
        self._steps += 1
        if self._steps % self._chunk == 0:
            self._share()

    def _share(self) -> None:
        if self._ended:
            return
        chunk = distributed.broadcast_object(list(itertools.islice(self._drawn, self._chunk)))
        self._ended = len(chunk) < self._chunk
        self._ready.extend(chunk)

    def _take(self) -> Iterator[Sequence[int]]:
        while self._ready:
            yield self._ready.popleft()
        assert self._ended

    def _draw(self, epoch: int) -> Iterator[list[int]]:
        if not self._repeats:
            yield from self._sampled(epoch)
            return
        if self._kept is None:
            self._kept = list(itertools.islice(self._sampled(0), self._limit))
        yield from self._kept

    def _sampled(self, epoch: int) -> Iterator[list[int]]:
        set_epoch(self._loader.batch_sampler, epoch)
        for number, indices in enumerate(_sampler_batches(self._loader)):
            if number == self._announced:
                raise ValueError(
                    f"the batch sampler of the training DataLoader yields more batches than the "
                    f"{number} that its len() says; correct its __len__ or leave it out"
                )
            yield indices


class _EvaluationBatches(Batches):
    def __init__(
        self,
        source: Source,
        chunks: Sequence[tuple[int, Sequence[int]]],
        num_samples: int,
        options: LoaderOptions,
    ) -> None:
        self.steps_per_epoch = None
        self._chunks = chunks
        self._num_samples = num_samples
        self._requests = _Requests()
        self._loader = data_loader(Fetch(source), options, source.loader, sampler=self._requests)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[MicroBatch]:
        self._requests.next_epoch = (
            Request(indices, position, number, self._num_samples, False, epoch)
            for number, (position, indices) in enumerate(self._chunks)
        )
        return iter(self._loader)


class _Requests(Sampler[Request]):
    """The sampler of a rank's DataLoader: yields requests instead of indices.

    Attributes:
        next_epoch: What the loader gets when it asks next.
    """

    next_epoch: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.next_epoch


def _sampler_batches(loader: DataLoader[Any]) -> Iterator[list[int]]:
    batch_sampler = cast(Iterable[Sequence[int]], loader.batch_sampler)
    # Plain numbers travel and print best; an index may also be a key of another kind.
    batches = ([int(i) if hasattr(i, "__index__") else i for i in b] for b in batch_sampler)
    return (batch for batch in batches if batch)


def _is_first() -> bool:
    return distributed.rank() == 0
