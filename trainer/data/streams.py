"""Iterable datasets: global batches by stream position.

Every rank reads the whole stream and keeps its own part of each global batch, which is exact and
needs no agreement on where the stream ends.

A run that resumes goes on in the middle of a stream through the dataset's ``state_dict`` and
``load_state_dict``, by the convention of torchdata: after loading, ``iter`` goes on from there. The
state must be that right after the last global batch that was trained on. Loader workers read ahead,
so from there it comes with every global batch. Other streams are read again up to there.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

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
from trainer.seeding import Stream, stream_key
from trainer.trees import rows


def stream_batches(
    source: Source,
    plan: GlobalBatchPlan,
    options: LoaderOptions,
    *,
    drop_last: bool,
    limit: int | None,
) -> Batches:
    """Return a rank's micro-batches of a stream.

    Args:
        source: The stream.
        plan: How a global batch is cut.
        options: How to load.
        drop_last: Whether a last, smaller global batch is left out.
        limit: The most global batches.
    """
    num_samples = length(source.dataset)
    steps = None
    if num_samples is not None and plan.global_batch_size and not source.yields_batches:
        steps = plan.steps_per_epoch(num_samples, drop_last)
    if limit is not None:
        steps = limit if steps is None else min(steps, limit)
    stream = _Stream(source, plan, options, drop_last, limit)
    return StreamBatches(stream, steps, options, source.loader)


class Read(NamedTuple):
    """What one rank gets of one global batch of a stream.

    Attributes:
        parts: Its micro-batches.
        end: Position of the first sample after the global batch.
        state: The dataset's state right after it, pickled, if a loader worker has read it.
    """

    parts: list[MicroBatch]
    end: int
    state: bytes | None


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
        self._reached: dict[str, Any] = {}  # where the loop is in the stream

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of one epoch, from global batch ``start_step`` on."""
        self._stream.start(epoch, start_step, self._resumed(epoch, start_step))
        for step, read in enumerate(self._loader, start_step):
            if step == self.steps_per_epoch:
                dataset = self._stream.source.dataset
                raise ValueError(
                    f"{type(dataset).__name__} yields more samples than the {len(dataset)} that "
                    "its len() says; correct its __len__ or leave it out"
                )
            self._reached = {
                "epoch": epoch,
                "step": step + 1,
                "position": read.end,
                "dataset": read.state,
            }
            yield from read.parts

    def state_dict(self) -> dict[str, Any]:
        """Return the dataset's state after the last global batch, if it has one, and where that is.

        It is loaded in the middle of an epoch only: a new one starts by ``iter`` alone.
        """
        dataset = self._stream.source.dataset
        if not self._reached or not has_state(dataset):
            return {}
        state = self._reached["dataset"]
        if state is None:  # read in this process, and no further than the loop is
            state = dataset.state_dict()
        elif isinstance(state, bytes):
            state = pickle.loads(state)
        return {**self._reached, "dataset": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state`` when the epoch starts there."""
        self._reached = state

    def order_facts(self) -> dict[str, Any]:
        """Return the number of samples, None where the stream has no length."""
        return {"num_samples": length(self._stream.source.dataset)}

    def close(self) -> None:
        """End the loader workers."""
        self._loader.close()

    def _resumed(self, epoch: int, start_step: int) -> dict[str, Any] | None:
        """Return what an earlier run reached; None to read the stream again up to there."""
        dataset = self._stream.source.dataset
        if start_step == 0:
            return None
        place = (self._reached.get("epoch"), self._reached.get("step"))
        if place == (epoch, start_step) and has_state(dataset):
            return self._reached
        say_skipped(type(dataset).__name__, epoch, start_step)
        return None


def say_skipped(whose: str, epoch: int, steps: int) -> None:
    """Say, once, that a run resumes by reading a stream again, and who could do better."""
    if distributed.rank() == 0:
        print(
            f"resume: reading past the first {steps} global batches of epoch {epoch}, which are "
            f"done; give {whose} state_dict and load_state_dict to go on at once",
            flush=True,
        )


class _Stream(IterableDataset[Read]):
    """Reads a stream in global batches and yields this rank's micro-batches of each.

    With several loader workers, each takes its turn at a global batch: torch's DataLoader takes
    from its workers in turn, which restores the order.
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
        self._generators = Generators(source)
        self._yields_batches = source.yields_batches
        self._worker = (0, 1)  # this loader worker's number, and how many there are
        self._plan = plan
        self._drop_last = drop_last
        self._limit = limit
        self._seed = options.seed
        # Workers get a copy of what is kept here: of the task, for ready batches only.
        self._count = options.count if self._yields_batches else len
        # Told now: a worker process has no process group to ask.
        self._rank = distributed.rank()
        self._world_size = distributed.world_size()

    def start(self, epoch: int, step: int, reached: dict[str, Any] | None) -> None:
        """Get ready for one pass over the stream, before workers copy it.

        Args:
            epoch: The epoch.
            step: The first global batch to yield.
            reached: Where an earlier run was, with the state of the dataset there; None to read the
                stream from its start.
        """
        set_epoch(self.source.dataset, epoch)
        self._epoch = epoch
        self._first = step
        self._reached = reached

    def become(self, worker: int, num_workers: int) -> int:
        """Be the copy in loader worker ``worker``; return the seed that user code gets there."""
        self._worker = (worker, num_workers)
        return stream_key(self._seed, Stream.GLOBAL_BATCH, self._epoch)

    def __iter__(self) -> Iterator[Read]:
        worker, num_workers = self._worker
        start = position = 0
        if self._reached is not None:
            self.source.dataset.load_state_dict(self._reached["dataset"])
            start, position = self._first, self._reached["position"]
        self._generators.look()
        batches = self._global_batches()
        for number in itertools.count(start):
            if number == self._limit:
                return
            # Everyone who reads the stream has to draw the same: it may shuffle by chance.
            self._generators.seed(stream_key(self._seed, Stream.GLOBAL_BATCH, self._epoch, number))
            found = next(batches, None)
            if found is None:
                return
            batch, size = found
            if number >= self._first and (number - self._first) % num_workers == worker:
                yield Read(self._cut(batch, size, position), position + size, self._state())
            position += size

    def _state(self) -> bytes | None:
        """Return the state of the dataset in a worker, which reads ahead."""
        dataset = self.source.dataset
        if get_worker_info() is None or not has_state(dataset):
            return None
        return pickle.dumps(dataset.state_dict())

    def _global_batches(self) -> Iterator[tuple[Any, int]]:
        items = iter(self.source.dataset)
        if self._yields_batches:
            for batch in map(self.source.collate, items):
                if size := self._count(batch):
                    yield batch, size
            return
        full = cast(int, self._plan.global_batch_size)
        while samples := list(itertools.islice(items, full)):
            if len(samples) == full or not self._drop_last:
                yield samples, len(samples)

    def _cut(self, batch: Any, size: int, position: int) -> list[MicroBatch]:
        cuts = self._plan.cut(size, self._rank, self._world_size)
        if not cuts:
            return [MicroBatch(None, 0, position, 0, size, True)]
        return [
            MicroBatch(
                self._part(batch, size, cut.start, cut.stop, position),
                cut.stop - cut.start,
                position + cut.start,
                cut.number,
                size,
                cut is cuts[-1],
            )
            for cut in cuts
        ]

    def _part(self, batch: Any, size: int, start: int, stop: int, position: int) -> Any:
        if self._yields_batches:
            return rows(batch, size, start, stop)
        key = stream_key(self._seed, Stream.MICRO_BATCH, self._epoch, position + start)
        self._generators.seed(key)
        return self.source.collate(batch[start:stop])


def empty_stream(epoch: int) -> ValueError:
    """Return the error of a training stream without a sample in ``epoch``."""
    return ValueError(
        f"the training stream yields no sample in epoch {epoch}; check what it reads, and that it "
        "starts anew each time it is iterated"
    )
