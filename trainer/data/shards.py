"""Iterable datasets that shard themselves, because they are expensive to read.

A dataset with a method ``shard(rank, world_size)`` is asked for an iterable of each rank's own part
(with loader workers: of each worker's). Nothing is read twice, but which samples make up a global
batch depends on the number of shards.
"""

from __future__ import annotations

import inspect
import itertools
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import IterableDataset

from trainer import distributed
from trainer.data.held import Generators, set_epoch
from trainer.data.loading import (
    Batches,
    LoaderOptions,
    MicroBatch,
    Source,
    data_loader,
    has_state,
    length,
)
from trainer.data.plan import GlobalBatchPlan
from trainer.data.streams import say_skipped
from trainer.seeding import Stream, stream_key


def shards_itself(source: Source) -> bool:
    """Whether ``source`` is a stream of samples that is asked for its shards in training."""
    shard = getattr(source.dataset, "shard", None)
    return (
        source.is_stream
        and not source.yields_batches
        and callable(shard)
        and {"rank", "world_size"} <= set(inspect.signature(shard).parameters)
    )


def shard_batches(
    source: Source,
    plan: GlobalBatchPlan,
    options: LoaderOptions,
    *,
    drop_last: bool,
    limit: int | None,
) -> Batches:
    """Return a rank's micro-batches of a stream that shards itself.

    Args:
        source: The stream.
        plan: How a global batch is cut.
        options: How to load.
        drop_last: Whether the epoch ends at the first global batch that is not whole.
        limit: The most global batches.

    Raises:
        ValueError: If nothing may depend on the world size.
    """
    name = type(source.dataset).__name__
    if options.reproducible:
        raise ValueError(
            f"reproducible=true with {name}, which shards itself: the order of its samples depends "
            "on the number of ranks and loader workers; leave out its shard method, so that every "
            "rank reads the whole stream, or set reproducible=false"
        )
    if distributed.rank() == 0:
        print(
            f"{name} is asked for its shards (it has a shard method), so the order of its samples "
            "depends on the world size"
        )
    return ShardedStreamBatches(source, plan, options, drop_last, limit)


class _Read(NamedTuple):
    """One rank's part of one global batch, all of it out of one shard.

    Attributes:
        parts: Its micro-batches.
        shard: Which of this rank's shards it is from.
        number: How many of them that shard has given, with this one.
        state: The shard's state right after it, pickled, if it has one.
    """

    parts: list[MicroBatch]
    shard: int
    number: int
    state: bytes | None


class _Shard(NamedTuple):
    """How far one of this rank's shards has been read, and its state there if it has one."""

    number: int = 0
    state: bytes | None = None


class ShardedStreamBatches(Batches):
    """Micro-batches of a stream that shards itself, so that only the ranks together know its end.

    Before each step the ranks add up what they have: one small collective per step.
    """

    def __init__(
        self,
        source: Source,
        plan: GlobalBatchPlan,
        options: LoaderOptions,
        drop_last: bool,
        limit: int | None,
    ) -> None:
        self.steps_per_epoch = limit
        self._dataset = source.dataset
        self._global_batch_size = cast(int, plan.global_batch_size)
        self._drop_last = drop_last
        self._stream = _ShardedStream(source, plan, options)
        self._loader = data_loader(self._stream, options, source.loader)
        workers = options.num_workers if source.loader is None else source.loader.num_workers
        self._num_shards = max(workers, 1)  # of this rank
        self._place: tuple[int, int] | None = None  # epoch and step
        self._shards: list[_Shard] = []  # how far the loop is in them

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches until every rank's part has ended."""
        skipped = 0
        if start_step == 0 or not self._can_go_on(epoch, start_step):
            skipped = start_step
            self._shards = [_Shard()] * self._num_shards
        set_epoch(self._dataset, epoch)
        self._stream.start(epoch, self._shards)
        reads = iter(self._loader)
        empty = [MicroBatch(None, 0, 0, 0, 0, True)]
        for step in itertools.count(start_step - skipped):
            if step == self.steps_per_epoch:
                return
            read: _Read | None = next(reads, None)
            if read is not None:
                self._shards[read.shard] = _Shard(read.number, read.state)
            if step < start_step:
                continue
            parts = empty if read is None else read.parts
            count = torch.tensor([sum(micro.num_samples for micro in parts)])
            global_size = int(distributed.all_reduce_sum(count))
            if global_size == 0 or (self._drop_last and global_size < self._global_batch_size):
                return
            self._place = (epoch, step + 1)
            for micro in parts:
                yield micro._replace(global_size=global_size)

    def state_dict(self) -> dict[str, Any]:
        """Return how far every rank is in its shards."""
        if self._place is None:
            return {}
        mine = [
            [shard.number, None if shard.state is None else pickle.loads(shard.state)]
            for shard in self._shards
        ]
        return {"place": list(self._place), "shards": distributed.all_gather_object(mine)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``.

        Raises:
            ValueError: If the stream was cut into another number of shards.
        """
        if not state:
            return
        saved = len(state["shards"]), len(state["shards"][0])
        here = distributed.world_size(), self._num_shards
        if saved != here:
            raise ValueError(
                f"{type(self._dataset).__name__} shards itself, so the order of its samples "
                f"follows from the number of ranks and loader workers: the run was on {saved[0]} "
                f"ranks with {saved[1]} shards each, and here are {here[0]} with {here[1]}. Some "
                "samples would come twice and others never; resume with as many, or leave out the "
                "shard method"
            )
        self._place = (state["place"][0], state["place"][1])
        self._shards = [
            _Shard(number, None if own is None else pickle.dumps(own))
            for number, own in state["shards"][distributed.rank()]
        ]

    def order_facts(self) -> dict[str, Any]:
        """Return the number of samples (None where unknown) and of shards."""
        num_shards = distributed.world_size() * self._num_shards
        return {"num_samples": length(self._dataset), "shards": num_shards}

    def close(self) -> None:
        """End the loader workers."""
        self._loader.close()

    def _can_go_on(self, epoch: int, start_step: int) -> bool:
        if self._place == (epoch, start_step) and all(
            shard.state is not None for shard in self._shards if shard.number
        ):
            return True
        say_skipped(f"the shards of {type(self._dataset).__name__}", epoch, start_step)
        return False


class _ShardedStream(IterableDataset[_Read]):
    """Reads one shard, an even share of the global batch at a time."""

    def __init__(self, source: Source, plan: GlobalBatchPlan, options: LoaderOptions) -> None:
        self.source = source._replace(loader=None)  # workers need no copy of it
        self._generators = Generators(source)
        self._worker = (0, 1)  # this loader worker's number, and how many there are
        self._plan = plan
        self._seed = options.seed
        # Told now: a worker process has no process group to ask.
        self._rank = distributed.rank()
        self._world_size = distributed.world_size()

    def start(self, epoch: int, shards: list[_Shard]) -> None:
        """Get ready for one pass, before workers copy this.

        Args:
            epoch: The epoch.
            shards: How far this rank's shards have been read.
        """
        self._epoch = epoch
        # Torch's loader takes from its workers in turn, from the first one on: that one gets the
        # shard whose turn it is.
        self._turns = sorted(enumerate(shards), key=lambda entry: entry[1].number)

    def become(self, worker: int, num_workers: int) -> int:
        """Be the copy in loader worker ``worker``; return the seed that user code gets there."""
        self._worker = (worker, num_workers)
        return stream_key(self._seed, Stream.SHARD, self._epoch, self._shard_number())

    def _shard_number(self) -> int:
        worker, num_workers = self._worker
        return self._rank * num_workers + self._turns[worker][0]

    def __iter__(self) -> Iterator[_Read]:
        own, (number, state) = self._turns[self._worker[0]]
        shard_number, num_workers = self._shard_number(), self._worker[1]
        shard = self.source.dataset.shard(
            rank=shard_number, world_size=self._world_size * num_workers
        )
        if state is not None:
            shard.load_state_dict(pickle.loads(state))
        size = cast(int, self._plan.global_batch_size)
        begin, end = (size * r // self._world_size for r in (self._rank, self._rank + 1))
        self._generators.look(shard)
        items = iter(shard)
        for done in itertools.count(number):
            key = stream_key(self._seed, Stream.SHARD, self._epoch, shard_number, done)
            self._generators.seed(key)
            chunk = list(itertools.islice(items, end - begin))
            if not chunk:
                return
            parts = self._cut(chunk, done * (end - begin))
            after = pickle.dumps(shard.state_dict()) if has_state(shard) else None
            yield _Read(parts, own, done + 1, after)

    def _cut(self, chunk: list[Any], position: int) -> list[MicroBatch]:
        size = cast(int, self._plan.global_batch_size)
        micro = self._plan.micro(size, self._world_size)
        first_number = self._rank * self._plan.accumulation_steps(size, self._world_size)
        starts = range(0, len(chunk), micro)
        return [
            MicroBatch(
                self.source.collate(part := chunk[start : start + micro]),
                len(part),
                position + start,
                first_number + i,
                0,
                start == starts[-1],
            )
            for i, start in enumerate(starts)
        ]
