"""Iterable datasets: global batches by stream position.

Every rank reads the whole stream and keeps its own part of each global batch, which is exact and
needs no agreement on where the stream ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from trainer import distributed
from trainer.loading import Batches, LoaderOptions, MicroBatch, Source, data_loader, set_epoch
from trainer.plan import GlobalBatchPlan
from trainer.trees import rows


def stream_batches(
    source: Source,
    plan: GlobalBatchPlan,
    options: LoaderOptions,
    *,
    drop_last: bool,
    limit: int | None,
) -> Batches:
    """Return a rank's micro-batches of a stream; steps per epoch where it has a length."""
    steps = None
    if hasattr(source.dataset, "__len__") and plan.global_batch_size and source.collate is not None:
        steps = plan.steps_per_epoch(len(source.dataset), drop_last)
    if limit is not None:
        steps = limit if steps is None else min(steps, limit)
    if _shards_itself(source.dataset) and source.collate is not None:
        if distributed.rank() == 0:
            print(
                f"{type(source.dataset).__name__} is asked for its shards (it has a shard method), "
                "so the order of its samples depends on the world size"
            )
        sharded = _ShardedStream(source, plan, options.count, drop_last, limit)
        return ShardedStreamBatches(sharded, None, options, source.loader)
    stream = _Stream(source, plan, options.count, drop_last, limit)
    return StreamBatches(stream, steps, options, source.loader)


class StreamBatches(Batches):
    """Micro-batches of an iterable dataset, cut by stream position: every rank reads it all."""

    def __init__(
        self,
        dataset: _Stream,
        steps_per_epoch: int | None,
        options: LoaderOptions,
        loader: DataLoader[Any] | None,
    ) -> None:
        self.steps_per_epoch = steps_per_epoch
        self._dataset = dataset
        self._loader = data_loader(dataset, options, loader)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of one epoch, from global batch ``start_step`` on."""
        set_epoch(self._dataset.source.dataset, epoch)
        return itertools.chain.from_iterable(itertools.islice(self._loader, start_step, None))


class ShardedStreamBatches(StreamBatches):
    """Micro-batches of a stream that shards itself, so that only the ranks together know its end.

    Before each step the ranks add up what they have: one small collective per step.
    """

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches until every rank's part has ended."""
        set_epoch(self._dataset.source.dataset, epoch)
        parts = itertools.islice(self._loader, start_step, None)
        empty = MicroBatch(None, 0, 0, 0, 0, True)
        while True:
            mine: list[MicroBatch] = next(parts, [])
            count = torch.tensor([sum(micro.num_samples for micro in mine)])
            global_size = int(distributed.all_reduce_sum(count))
            if global_size == 0:
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
        count: Callable[[Any], int],
        drop_last: bool,
        limit: int | None,
    ) -> None:
        self.source = source
        self._plan = plan
        self._count = count
        self._drop_last = drop_last
        self._limit = limit
        # Told now: a worker process has no process group to ask.
        self._rank = distributed.rank()
        self._world_size = distributed.world_size()

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        worker, num_workers = _worker_place()
        position = 0
        for number, (batch, size) in enumerate(self._global_batches(self.source.dataset)):
            if number % num_workers == worker:
                yield self._cut(batch, size, position)
            position += size

    def _global_batches(self, stream: Iterable[Any]) -> Iterator[tuple[Any, int]]:
        items = iter(stream)
        size = self._plan.global_batch_size
        if self.source.collate is None:
            batches = ((batch, self._count(batch)) for batch in items)
        else:
            assert size is not None
            chunks = iter(lambda: list(itertools.islice(items, size)), [])
            batches = (
                (chunk, len(chunk)) for chunk in chunks if len(chunk) == size or not self._drop_last
            )
        return itertools.islice(batches, self._limit)

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
        if self.source.collate is None:
            return rows(batch, size, start, stop)
        return self.source.collate(batch[start:stop])


class _ShardedStream(_Stream):
    """Reads this rank's own shard of a stream, an even share of the global batch at a time."""

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        worker, num_workers = _worker_place()
        shard = self.source.dataset.shard(
            rank=self._rank * num_workers + worker, world_size=self._world_size * num_workers
        )
        size = cast(int, self._plan.global_batch_size)
        begin, end = (size * r // self._world_size for r in (self._rank, self._rank + 1))
        micro = self._plan.micro(size, self._world_size)
        first_index = self._rank * self._plan.accumulation_steps(size, self._world_size)
        items = iter(shard)
        position = 0
        while chunk := list(itertools.islice(items, end - begin)):
            starts = range(0, len(chunk), micro)
            parts = [chunk[start : start + micro] for start in starts]
            collate = cast(Callable[[list[Any]], Any], self.source.collate)
            yield [
                MicroBatch(
                    collate(part),
                    len(part),
                    position + start,
                    first_index + i,
                    0,
                    start == starts[-1],
                )
                for i, (start, part) in enumerate(zip(starts, parts, strict=True))
            ]
            position += len(chunk)


def _worker_place() -> tuple[int, int]:
    """This loader worker's number and how many there are; the user's dataset is then told nothing.

    A dataset that splits itself by ``get_worker_info()`` would yield a part of the stream, and the
    positions counted here would mean other samples in every worker.
    """
    info = get_worker_info()
    if info is None:
        return 0, 1
    torch_worker._worker_info = None
    return info.id, info.num_workers


def _shards_itself(dataset: Any) -> bool:
    code = getattr(getattr(dataset, "shard", None), "__code__", None)
    return code is not None and {"rank", "world_size"} <= set(code.co_varnames[: code.co_argcount])
