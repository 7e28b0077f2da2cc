"""Datasets with indices: which samples a rank loads for each micro-batch.

Torch's ``DataLoader`` does the loading; what is ours is the *request*: the indices that go into
this rank's next micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from trainer import distributed
from trainer.loading import Batches, LoaderOptions, MicroBatch, Source, data_loader, set_epoch
from trainer.plan import GlobalBatchPlan, ceil_div, epoch_order
from trainer.streams import stream_batches

# How many global batches of a user's sampler travel from rank 0 to the others at once.
SHARED_BATCHES = 1024


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
    limit = min(limit or overfit, overfit) if overfit else limit
    if source.is_stream:
        if source.loader is not None:
            drop_last = source.loader.drop_last
        return stream_batches(source, plan, options, drop_last=drop_last, limit=limit)
    num_samples = len(source.dataset)
    if num_samples == 0:
        raise ValueError(
            "the training set is empty: its length is 0; check the path or split it is built from"
        )
    if source.loader is not None:
        batches, total = _user_batches(source, limit)
        return IndexedBatches(source, plan, batches, total, options)

    ordered_by_user = indices is not None and not overfit
    first: Sequence[int] | None = None
    if indices is not None and ordered_by_user:
        first = distributed.broadcast_object(indices(options.seed, 0) if _is_first() else [])
        num_samples = len(first)
    steps = plan.steps_per_epoch(num_samples, drop_last)
    steps = steps if limit is None else min(steps, limit)
    if steps == 0:
        raise ValueError(
            f"an epoch has no whole global batch: {num_samples} samples, global_batch_size="
            f"{plan.global_batch_size} and drop_last=true; lower global_batch_size to at most "
            f"{num_samples} or set drop_last=false"
        )
    size = cast(int, plan.global_batch_size)

    def order(epoch: int) -> Sequence[int]:
        if indices is None or overfit:
            return cast(
                Sequence[int],
                epoch_order(num_samples, options.seed, epoch, shuffle and not overfit).tolist(),
            )
        own = indices(options.seed, epoch) if _is_first() else []
        shared = distributed.broadcast_object([int(i) for i in own])
        if len(shared) != num_samples:
            raise ValueError(
                f"train_indices(seed, epoch={epoch}) returned {len(shared)} indices, but "
                f"{num_samples} for epoch 0; every epoch must have the same length"
            )
        return shared

    def planned(epoch: int, start_step: int) -> Iterator[Sequence[int]]:
        indices_of_epoch = order(epoch)
        for step in range(start_step, steps):
            yield indices_of_epoch[step * size : (step + 1) * size]

    return IndexedBatches(source, plan, planned, steps, options)


def evaluation_batches(
    source: Source, plan: GlobalBatchPlan, options: LoaderOptions, *, limit: int | None
) -> Batches:
    """Return a rank's micro-batches of an evaluation set: over all ranks, each sample once.

    Each rank gets a contiguous block, so that the blocks in rank order are the dataset's order.

    Args:
        source: The data.
        plan: How large micro-batches are.
        options: How to load.
        limit: The most global batches to evaluate.
    """
    if source.is_stream:
        return stream_batches(source, plan, options, drop_last=False, limit=limit)
    micro = plan.micro(plan.global_batch_size or 1, distributed.world_size())
    if source.loader is None:
        samples = len(source.dataset)
        if limit is not None:
            samples = min(samples, limit * (plan.global_batch_size or 1))
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


class Request(NamedTuple):
    """A micro-batch that is still to be loaded: its ``indices`` instead of its batch."""

    indices: Sequence[int]
    position: int
    number: int
    global_size: int
    is_last: bool
    epoch: int


class IndexedBatches(Batches):
    """Micro-batches of a dataset with indices, cut by the plan out of lists of indices."""

    def __init__(
        self,
        source: Source,
        plan: GlobalBatchPlan,
        global_batches: Callable[[int, int], Iterable[Sequence[int]]],
        steps_per_epoch: int | None,
        options: LoaderOptions,
    ) -> None:
        """Set up the loader.

        Args:
            source: Where the samples are.
            plan: How a global batch is cut.
            global_batches: Of an epoch and a first step, the indices of each global batch.
            steps_per_epoch: How many global batches an epoch has, if known.
            options: How to load.
        """
        self.steps_per_epoch = steps_per_epoch
        self._plan = plan
        self._global_batches = global_batches
        self._source = source
        self._requests = _Requests(self._requests_of)
        self._loader = data_loader(_Fetch(source), options, source.loader, sampler=self._requests)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of one epoch, from global batch ``start_step`` on."""
        set_epoch(self._source.dataset, epoch)
        self._requests.start(epoch, start_step)
        return iter(self._loader)

    def _requests_of(self, epoch: int, start_step: int) -> Iterator[Request]:
        rank, world_size = distributed.rank(), distributed.world_size()
        position = start_step * (self._plan.global_batch_size or 0)
        for indices in self._global_batches(epoch, start_step):
            mine = self._plan.cut(len(indices), rank, world_size)
            if not mine:
                yield Request((), position, 0, len(indices), True, epoch)
            for cut in mine:
                is_last = cut is mine[-1]
                part = indices[cut.start : cut.stop]
                start = position + cut.start
                yield Request(part, start, cut.number, len(indices), is_last, epoch)
            position += len(indices)


class _EvaluationBatches(Batches):
    def __init__(
        self,
        source: Source,
        chunks: Sequence[tuple[int, Sequence[int]]],
        num_samples: int,
        options: LoaderOptions,
    ) -> None:
        self.steps_per_epoch = None
        self._requests = _Requests(
            lambda epoch, _: (
                Request(indices, position, number, num_samples, False, epoch)
                for number, (position, indices) in enumerate(chunks)
            )
        )
        self._loader = data_loader(_Fetch(source), options, source.loader, sampler=self._requests)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[MicroBatch]:
        self._requests.start(epoch, start_step)
        return iter(self._loader)


class _Requests(Sampler[Request]):
    """The sampler of a rank's DataLoader: yields requests instead of indices."""

    def __init__(self, requests: Callable[[int, int], Iterator[Request]]) -> None:
        self._make = requests
        self._epoch = 0
        self._start_step = 0

    def start(self, epoch: int, start_step: int) -> None:
        self._epoch, self._start_step = epoch, start_step

    def __iter__(self) -> Iterator[Request]:
        return self._make(self._epoch, self._start_step)


class _Fetch(Dataset[MicroBatch]):
    """Loads what a request asks for; runs in the rank's process or in a loader worker."""

    def __init__(self, source: Source) -> None:
        self._dataset = source.dataset
        self._collate = source.collate or default_collate
        self._epoch = 0

    def __getitem__(self, request: Request) -> MicroBatch:
        if request.epoch != self._epoch:
            # A worker that lives through several epochs has its own copy of the dataset.
            set_epoch(self._dataset, request.epoch)
            self._epoch = request.epoch
        indices = request.indices
        batch = self._load(indices) if len(indices) else None
        return MicroBatch(batch, len(indices), *request[1:5])

    def _load(self, indices: Sequence[int]) -> Any:
        if hasattr(self._dataset, "__getitems__"):
            samples = self._get_items(indices)
            # Anything but a list is a batch that is collated already.
            return self._collate(samples) if isinstance(samples, list) else samples
        return self._collate([self._get_item(index) for index in indices])

    def _get_item(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except Exception as error:
            raise _item_error(self._dataset, index, error) from error

    def _get_items(self, indices: Sequence[int]) -> Any:
        try:
            return self._dataset.__getitems__(indices)
        except Exception as error:
            for index in indices:
                try:
                    self._dataset.__getitems__([index])
                except Exception as alone:
                    raise _item_error(self._dataset, index, alone) from alone
            name = type(self._dataset).__name__
            raise ValueError(
                f"{name}.__getitems__ raised {type(error).__name__}: {error} for the indices "
                f"{list(indices)}, though for none of them alone"
            ) from error


def _user_batches(
    source: Source, limit: int | None
) -> tuple[Callable[[int, int], Iterator[Sequence[int]]], int | None]:
    """Return a user's DataLoader's index batches as rank 0 draws them, and how many there are."""
    loader = cast(DataLoader[Any], source.loader)

    def shared(epoch: int, start_step: int) -> Iterator[Sequence[int]]:
        set_epoch(loader.batch_sampler, epoch)
        batches = _sampler_batches(loader) if _is_first() else iter(())
        batches = itertools.islice(batches, start_step, limit)
        while True:
            chunk = distributed.broadcast_object(list(itertools.islice(batches, SHARED_BATCHES)))
            yield from chunk
            if len(chunk) < SHARED_BATCHES:
                return

    batch_sampler: Any = loader.batch_sampler
    try:
        total = len(batch_sampler)
    except TypeError:  # Sampler defines no length of its own.
        return shared, limit
    if total == 0:
        raise ValueError(
            f"the training DataLoader yields no batch: {len(source.dataset)} samples, batch_size="
            f"{loader.batch_size}, drop_last={loader.drop_last}; lower batch_size or keep the last"
        )
    return shared, total if limit is None else min(total, limit)


def _sampler_batches(loader: DataLoader[Any]) -> Iterator[list[int]]:
    batch_sampler = cast(Iterable[Sequence[int]], loader.batch_sampler)
    return ([int(i) for i in batch] for batch in batch_sampler)


def _is_first() -> bool:
    return distributed.rank() == 0


def _item_error(dataset: Any, index: int, error: Exception) -> ValueError:
    return ValueError(
        f"{type(dataset).__name__}[{index}] raised {type(error).__name__}: {error}; repair or "
        f"leave out the sample with index {index} (the dataset has {_length(dataset)} samples)"
    )


def _length(dataset: Any) -> str:
    return str(len(dataset)) if hasattr(dataset, "__len__") else "an unknown number of"
