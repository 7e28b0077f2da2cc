"""Datasets with indices: which samples a rank loads for each micro-batch.

Torch's ``DataLoader`` does the loading; what is ours is the *request*: the indices that go into
this rank's next micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from torch.utils.data import Sampler

from trainer import distributed
from trainer.data.fetching import Fetch, Request
from trainer.data.loading import (
    Batches,
    Indices,
    LoaderOptions,
    MicroBatch,
    Source,
    data_loader,
    length,
)
from trainer.data.orders import (
    GivenBatches,
    GlobalBatches,
    PlannedBatches,
    SampledBatches,
    generator_states,
    put_back,
    sampler_batches,
)
from trainer.data.plan import GlobalBatchPlan, Slice, ceil_div, epoch_order
from trainer.data.shards import shard_batches, shards_itself
from trainer.data.streams import stream_batches
from trainer.guard import no_collectives
from trainer.seeding import OwnStream, Stream, stream_key


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
    global_batches: GlobalBatches
    limit = min(limit or overfit, overfit) if overfit else limit
    if source.is_stream:
        if source.loader is not None:
            drop_last = source.loader.drop_last
        of_stream = shard_batches if shards_itself(source) else stream_batches
        return of_stream(source, plan, options, drop_last=drop_last, limit=limit)
    num_samples = length(source.dataset)
    if num_samples == 0:
        raise ValueError(
            "the training set is empty: its length is 0; check the path or split it is built from"
        )
    if source.loader is not None:
        global_batches = SampledBatches(source.loader, limit, options.seed, repeats=overfit > 0)
        return IndexedBatches(source, plan, global_batches, options)

    size = cast(int, plan.global_batch_size)
    first: Indices = range(cast(int, num_samples))

    def order(epoch: int) -> Indices:
        if overfit:
            return first
        if indices is not None:
            own: list[int] = []
            if _is_first():
                with OwnStream(stream_key(options.seed, Stream.SAMPLER, epoch)):
                    with no_collectives("the order of the samples"):
                        given = indices(options.seed, epoch)
                    own = [int(i) for i in given]
            return distributed.broadcast_object(own)
        # An array: as a list, the numbers would take five times the memory.
        return epoch_order(len(first), options.seed, epoch, shuffle).numpy()

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
    global_batches = PlannedBatches(order, len(first), size, steps)
    return IndexedBatches(source, plan, global_batches, options)


def evaluation_batches(
    source: Source,
    plan: GlobalBatchPlan,
    options: LoaderOptions,
    *,
    limit: int | None,
    together: bool = False,
) -> Batches:
    """Return a rank's micro-batches of an evaluation set: over all ranks, each sample once.

    Each rank gets a contiguous block, so that the blocks in rank order are the dataset's order. A
    stream is cut by position, in its own order, also if it could shard itself.

    Args:
        source: The data.
        plan: How large micro-batches are.
        options: How to load.
        limit: The most global batches to evaluate.
        together: Whether all ranks take part in each global batch, as in training.
    """
    # What is drawn in evaluation is apart from training, and the same every time.
    options = replace(options, seed=stream_key(options.seed, Stream.EVALUATION))
    size = cast(int, plan.global_batch_size)
    micro = plan.micro(size, distributed.world_size())
    if (source.is_stream or together) and not options.reproducible:
        # Larger micro-batches than an even share would leave ranks without work.
        micro = min(micro, ceil_div(size, distributed.world_size()))
    plan = GlobalBatchPlan(size, micro)
    if source.is_stream:
        return stream_batches(source, plan, options, drop_last=False, limit=limit)
    if source.loader is None:
        samples = len(source.dataset)
        if limit is not None:
            samples = min(samples, limit * size)
        everything = np.arange(samples)
        step = size if together else max(1, samples)
        whole: list[Indices] = [everything[i : i + step] for i in range(0, samples, step)]
    else:
        # One pass of the user's sampler on rank 0: it may be unseeded.
        whole = []
        if _is_first():
            given = generator_states(source.loader)
            stream = OwnStream(stream_key(options.seed, Stream.SAMPLER))
            with stream, no_collectives("the loader's sampler"):
                whole = list(itertools.islice(sampler_batches(source.loader), limit))
            put_back(given)
        whole = distributed.broadcast_object(whole)
    if together:
        return IndexedBatches(source, plan, GivenBatches(whole), options)
    chunks: list[tuple[int, Indices]] = []
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
    """Micro-batches of a dataset with indices, cut by the plan out of lists of indices.

    Attributes:
        source: Where the samples are.
    """

    def __init__(
        self,
        source: Source,
        plan: GlobalBatchPlan,
        global_batches: GlobalBatches,
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
        self.source = source
        self._requests = _Requests()
        self._fetch = Fetch(source, options.seed)
        self._loader = data_loader(self._fetch, options, source.loader, sampler=self._requests)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of one epoch, from global batch ``start_step`` on."""
        self._fetch.start(epoch)
        self._requests.next_epoch = self._start(epoch, start_step)
        for micro in self._loader:
            yield micro
            if micro.is_last:
                self._global_batches.after_step()

    def requests(self, epoch: int, start_step: int = 0) -> Iterator[Request]:
        """Yield what ``epoch`` would load on this rank, without loading it.

        A user's sampler is iterated for it, and shared: iterate to the end, on every rank.
        """
        for request in self._start(epoch, start_step):
            yield request
            if request.is_last:
                self._global_batches.after_step()

    def fetch(self, request: Request) -> MicroBatch:
        """Load one micro-batch, in this process."""
        return self._fetch[request]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of what a user's sampler draws from; nothing where there is none."""
        return self._global_batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned on rank 0."""
        self._global_batches.load_state_dict(state)

    def order_facts(self) -> dict[str, Any]:
        """Return the number of samples."""
        return {"num_samples": length(self.source.dataset)}

    def close(self) -> None:
        """End the loader workers, and leave a user's sampler as it was."""
        self._loader.close()
        self._global_batches.close()

    def _start(self, epoch: int, start_step: int) -> Iterator[Request]:
        start, batches = self._global_batches.start(epoch, start_step)
        return self._cut(batches, start, epoch)

    def _cut(self, batches: Iterator[Indices], position: int, epoch: int) -> Iterator[Request]:
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


class _EvaluationBatches(Batches):
    def __init__(
        self,
        source: Source,
        chunks: Sequence[tuple[int, Indices]],
        num_samples: int,
        options: LoaderOptions,
    ) -> None:
        self.steps_per_epoch = None
        self._chunks = chunks
        self._num_samples = num_samples
        self._requests = _Requests()
        self._fetch = Fetch(source, options.seed)
        self._loader = data_loader(self._fetch, options, source.loader, sampler=self._requests)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[MicroBatch]:
        self._requests.next_epoch = (
            Request(indices, position, number, self._num_samples, False, epoch)
            for number, (position, indices) in enumerate(self._chunks)
        )
        return iter(self._loader)

    def close(self) -> None:
        self._loader.close()


class _Requests(Sampler[Request]):
    """The sampler of a rank's DataLoader: yields requests instead of indices.

    Attributes:
        next_epoch: What the loader gets when it asks next.
    """

    next_epoch: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.next_epoch


def _is_first() -> bool:
    return distributed.rank() == 0
