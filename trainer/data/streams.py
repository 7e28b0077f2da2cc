"""Iterable datasets: global batches by stream position.

Every rank reads the whole stream and keeps its own part of each global batch, which is exact and
needs no agreement on where the stream ends.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from trainer import distributed
from trainer.data.loading import (
    Batches,
    LoaderOptions,
    MicroBatch,
    Source,
    data_loader,
    length,
    set_epoch,
)
from trainer.data.plan import GlobalBatchPlan
from trainer.seeding import stream_key
from trainer.trees import rows


def stream_batches(
    source: Source,
    plan: GlobalBatchPlan,
    options: LoaderOptions,
    *,
    drop_last: bool,
    limit: int | None,
    in_order: bool = False,
) -> Batches:
    """Return a rank's micro-batches of a stream.

    Args:
        source: The stream.
        plan: How a global batch is cut.
        options: How to load.
        drop_last: Whether a last, smaller global batch is left out.
        limit: The most global batches.
        in_order: Whether to cut by position even a stream that could shard itself.
    """
    num_samples = length(source.dataset)
    steps = None
    if num_samples is not None and plan.global_batch_size and not source.yields_batches:
        steps = plan.steps_per_epoch(num_samples, drop_last)
    if limit is not None:
        steps = limit if steps is None else min(steps, limit)
    if not in_order and not source.yields_batches and _shards_itself(source.dataset):
        if distributed.rank() == 0:
            print(
                f"{type(source.dataset).__name__} is asked for its shards (it has a shard method), "
                "so the order of its samples depends on the world size"
            )
        sharded = _ShardedStream(source, plan, options, drop_last, limit)
        return ShardedStreamBatches(sharded, limit, options, source.loader)
    stream = _Stream(source, plan, options, drop_last, limit)
    return StreamBatches(stream, steps, options, source.loader)


class StreamBatches(Batches):
    """Micro-batches of an iterable dataset, cut by stream position: every rank reads it all."""

    def __init__(
        self,
        stream: _Stream,
        steps_per_epoch: int | None,
        options: LoaderOptions,
        loader: DataLoader[Any] | None,
    ) -> None:
        self.steps_per_epoch = steps_per_epoch
        self._stream = stream
        self._loader = data_loader(stream, options, loader)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of one epoch, from global batch ``start_step`` on."""
        self._stream.start(epoch)
        for step, parts in enumerate(self._loader):
            if step == self.steps_per_epoch:
                dataset = self._stream.source.dataset
                raise ValueError(
                    f"{type(dataset).__name__} yields more samples than the {len(dataset)} that "
                    "its len() says; correct its __len__ or leave it out"
                )
            if step >= start_step:
                yield from parts


class ShardedStreamBatches(StreamBatches):
    """Micro-batches of a stream that shards itself, so that only the ranks together know its end.

    Before each step the ranks add up what they have: one small collective per step.
    """

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches until every rank's part has ended."""
        stream = self._stream
        stream.start(epoch)
        parts = itertools.islice(self._loader, start_step, None)
        empty = MicroBatch(None, 0, 0, 0, 0, True)
        for step in itertools.count(start_step):
            if step == stream.limit:
                return
            mine: list[MicroBatch] = next(parts, [])
            count = torch.tensor([sum(micro.num_samples for micro in mine)])
            global_size = int(distributed.all_reduce_sum(count))
            if global_size == 0 or (stream.drop_last and global_size < stream.global_batch_size):
                return
            for micro in mine or [empty]:
                yield micro._replace(global_size=global_size)


class _Stream(IterableDataset[list[MicroBatch]]):
    """Reads a stream in global batches and yields this rank's micro-batches of each.

    With several loader workers, worker k of n handles the global batches k, k + n, ...: torch's
    DataLoader takes from its workers in turn, which restores the order.
    """

    def __init__(
        self,
        source: Source,
        plan: GlobalBatchPlan,
        options: LoaderOptions,
        drop_last: bool,
        limit: int | None,
    ) -> None:
        self.source = source._replace(loader=None)  # workers need no copy of it
        self._yields_batches = source.yields_batches
        self.drop_last = drop_last
        self.limit = limit
        self.place = (0, 1)  # this loader worker's number, and how many there are
        self._plan = plan
        self._seed = options.seed
        # Workers get a copy of what is kept here: of the task, for ready batches only.
        self._count = options.count if self._yields_batches else len
        self._pass = -1
        # Told now: a worker process has no process group to ask.
        self._rank = distributed.rank()
        self._world_size = distributed.world_size()

    @property
    def global_batch_size(self) -> int:
        """Samples per step, where the stream is one of samples."""
        return cast(int, self._plan.global_batch_size)

    def start(self, epoch: int) -> None:
        """Get ready for one pass over the stream, before workers copy it."""
        set_epoch(self.source.dataset, epoch)
        # Evaluation calls every pass epoch 0.
        self._pass = max(epoch, self._pass + 1)

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        worker, num_workers = self.place
        batches = self._global_batches()
        position = 0
        for number in itertools.count():
            if number == self.limit:
                return
            # Everyone who reads the stream has to draw the same: it may shuffle by chance.
            _seed_generators(stream_key(self._seed, self._pass, number))
            found = next(batches, None)
            if found is None:
                return
            batch, size = found
            if number % num_workers == worker:
                yield self._cut(batch, size, position)
            position += size

    def _global_batches(self) -> Iterator[tuple[Any, int]]:
        items = iter(self.source.dataset)
        if self._yields_batches:
            for batch in map(self.source.collate, items):
                if size := self._count(batch):
                    yield batch, size
            return
        while samples := list(itertools.islice(items, self.global_batch_size)):
            if len(samples) == self.global_batch_size or not self.drop_last:
                yield samples, len(samples)

    def _cut(self, batch: Any, size: int, position: int) -> list[MicroBatch]:
        cuts = self._plan.cut(size, self._rank, self._world_size)
        if not cuts:
            return [MicroBatch(None, 0, position, 0, size, True)]
        return [
            MicroBatch(
                self._part(batch, size, cut.start, cut.stop),
                cut.stop - cut.start,
                position + cut.start,
                cut.number,
                size,
                cut is cuts[-1],
            )
            for cut in cuts
        ]

    def _part(self, batch: Any, size: int, start: int, stop: int) -> Any:
        if self._yields_batches:
            return rows(batch, size, start, stop)
        return self.source.collate(batch[start:stop])


class _ShardedStream(_Stream):
    """Reads this rank's own shard of a stream, an even share of the global batch at a time."""

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        worker, num_workers = self.place
        shard = self.source.dataset.shard(
            rank=self._rank * num_workers + worker, world_size=self._world_size * num_workers
        )
        size = self.global_batch_size
        begin, end = (size * r // self._world_size for r in (self._rank, self._rank + 1))
        micro = self._plan.micro(size, self._world_size)
        first_number = self._rank * self._plan.accumulation_steps(size, self._world_size)
        items = iter(shard)
        position = 0
        while chunk := list(itertools.islice(items, end - begin)):
            starts = range(0, len(chunk), micro)
            parts = [chunk[start : start + micro] for start in starts]
            yield [
                MicroBatch(
                    self.source.collate(part),
                    len(part),
                    position + start,
                    first_number + i,
                    0,
                    start == starts[-1],
                )
                for i, (start, part) in enumerate(zip(starts, parts, strict=True))
            ]
            position += len(chunk)


def _seed_generators(key: int) -> None:
    random.seed(key)
    np.random.seed(key % 2**32)
    torch.default_generator.manual_seed(key)


def _shards_itself(dataset: Any) -> bool:
    shard = getattr(dataset, "shard", None)
    return callable(shard) and {"rank", "world_size"} <= set(inspect.signature(shard).parameters)
