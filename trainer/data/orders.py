"""Which samples make up each global batch of an epoch, where samples have indices."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

from torch.utils.data import DataLoader

from trainer import distributed
from trainer.data.held import (
    generator_state,
    kind_of_state,
    sampler_generators,
    set_epoch,
    set_generator_state,
)
from trainer.data.loading import Indices, length
from trainer.guard import no_collectives
from trainer.options import show
from trainer.seeding import OwnStream, Stream, stream_key

# How many global batches of a user's sampler travel from rank 0 to the others at once.
SHARED_BATCHES = 256


class GlobalBatches:
    """Which indices make up each global batch of an epoch; the same on every rank.

    Only `start` and `after_step` may use collectives: every rank calls them at the same step. The
    iterator runs ahead where there are loader workers, on each rank by as much as suits it.

    Attributes:
        steps_per_epoch: Global batches in an epoch; None if only the data's end tells.
    """

    steps_per_epoch: int | None

    def start(self, epoch: int, start_step: int) -> tuple[int, Iterator[Indices]]:
        """Return the position where ``start_step`` starts, and the global batches from there on."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Get ready for the next step."""

    def state_dict(self) -> dict[str, Any]:
        """Return what `start` needs to start in a later run as it would in this one."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned on rank 0."""

    def close(self) -> None:
        """Leave what was given as it was."""


class PlannedBatches(GlobalBatches):
    """Equal parts of an epoch's order."""

    def __init__(
        self, order: Callable[[int], Indices], num_samples: int, size: int, steps: int
    ) -> None:
        self.steps_per_epoch = steps
        self._order = order
        self._num_samples = num_samples
        self._size = size
        self._steps = steps

    def start(self, epoch: int, start_step: int) -> tuple[int, Iterator[Indices]]:
        """Return the first position, and the parts of the epoch's order from there on."""
        indices = self._order(epoch)
        if len(indices) != self._num_samples:
            raise ValueError(
                f"train_indices(seed, epoch={epoch}) returned {len(indices)} indices, but "
                f"{self._num_samples} for epoch 0; every epoch must have the same length"
            )
        size = self._size
        steps = range(start_step, self._steps)
        return start_step * size, (indices[i * size : (i + 1) * size] for i in steps)


class GivenBatches(GlobalBatches):
    """The same lists of indices in every epoch."""

    def __init__(self, batches: Sequence[Indices]) -> None:
        self.steps_per_epoch = len(batches)
        self._batches = batches

    def start(self, epoch: int, start_step: int) -> tuple[int, Iterator[Indices]]:
        """Return the first position, and the batches from there on."""
        position = sum(map(len, self._batches[:start_step]))
        return position, iter(self._batches[start_step:])


class SampledBatches(GlobalBatches):
    """A user's DataLoader's index batches: drawn on rank 0, and shared a chunk at a time.

    Two chunks are there at the start of an epoch and one is added whenever one has been used up,
    so the loader never runs into the end of what is there.
    """

    def __init__(
        self, loader: DataLoader[Any], limit: int | None, seed: int, repeats: bool
    ) -> None:
        """Look at the sampler's length.

        Args:
            loader: The user's.
            limit: The most global batches in an epoch.
            seed: Seed of the run.
            repeats: Whether every epoch has the batches of the first one.
        """
        self._loader = loader
        self._limit = limit
        self._seed = seed
        self._repeats = repeats
        self._kept: list[list[int]] | None = None
        # A sampler's own generators go on from epoch to epoch: their states at the start of them.
        self._given = generator_states(loader)
        self._generators = [] if repeats else [generator for generator, _ in self._given]
        self._starts: dict[int, list[Any]] = {}
        self._epoch: int | None = None
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

    def start(self, epoch: int, start_step: int) -> tuple[int, Iterator[Indices]]:
        """Return the first position, and what the sampler draws from there on, on every rank.

        What is before `start_step` is drawn again, on rank 0: indices, not samples.
        """
        if epoch in self._starts:
            put_back(list(zip(self._generators, self._starts[epoch], strict=True)))
        elif self._generators and self._epoch is None and (epoch or start_step):
            self._say_lost()
        self._starts = {epoch: self._generator_states()}
        self._epoch = epoch
        # What the sampler draws from the global generators is the same at any world size, and in
        # a run that resumed: nobody else draws in between.
        own = 0 if self._repeats else epoch
        self._stream = OwnStream(stream_key(self._seed, Stream.SAMPLER, own))
        drawn = self._draw(epoch) if distributed.rank() == 0 else iter(())
        drawn = itertools.islice(drawn, self._limit)
        with self._stream:
            # A sampler that talks to the other ranks does so at its start.
            with no_collectives("the loader's sampler"):
                first = list(itertools.islice(drawn, 1))
            self._drawn = itertools.chain(first, drawn)
            skipped = sum(map(len, itertools.islice(self._drawn, start_step)))
        self._ready: deque[list[int]] = deque()
        self._ended = False
        self._steps = 0
        self._share()
        self._share()
        return distributed.broadcast_object(skipped), self._take()

    def after_step(self) -> None:
        """Share another chunk if one has been used up."""
        self._steps += 1
        if self._steps % self._chunk == 0:
            self._share()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the sampler's own generators; nothing where it has none."""
        if not self._generators:
            return {}
        starts = dict(self._starts)
        if self._epoch is not None:  # if it is over, all of it has been drawn: the next one's start
            starts[self._epoch + 1] = self._generator_states()
        return {"sampler": starts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned on rank 0.

        Raises:
            ValueError: If the sampler has other generators.
        """
        starts: dict[int, list[Any]] = state.get("sampler", {})
        here = [kind_of_state(own) for own in self._generator_states()]
        for states in starts.values():
            saved = [kind_of_state(own) for own in states]
            if saved != here:
                raise ValueError(
                    f"the training DataLoader's sampler holds the random generators {show(here)}, "
                    f"and the checkpoint has the state of {show(saved)}; resume with the same "
                    "sampler, or, if it is the same, with the trainer's version that wrote it"
                )
        self._starts = starts

    def close(self) -> None:
        """Put the sampler's generators back, so that the loader's next fit is the same.

        They have moved in rank 0's process only, which the user's may be or not.
        """
        put_back(self._given)

    def _generator_states(self) -> list[Any]:
        return [generator_state(generator) for generator in self._generators]

    def _say_lost(self) -> None:
        """Say that a run resumes from a checkpoint that lacks what the sampler needs."""
        if distributed.rank() == 0:
            print(
                "resume: the checkpoint does not say where the random generators of the training "
                "DataLoader's sampler were, so they start anew, and samples may come twice or "
                "never in this epoch",
                flush=True,
            )

    def _share(self) -> None:
        if self._ended:
            return
        with self._stream:
            chunk = list(itertools.islice(self._drawn, self._chunk))
        chunk = distributed.broadcast_object(chunk)
        self._ended = len(chunk) < self._chunk
        self._ready.extend(chunk)

    def _take(self) -> Iterator[Indices]:
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
        set_epoch(self._loader, epoch)
        for number, indices in enumerate(sampler_batches(self._loader)):
            if number == self._announced:
                raise ValueError(
                    f"the batch sampler of the training DataLoader yields more batches than the "
                    f"{number} that its len() says; correct its __len__ or leave it out"
                )
            yield indices


def generator_states(loader: DataLoader[Any]) -> list[tuple[Any, Any]]:
    """Return the random generators that a user's sampler holds, and where they are."""
    return [(generator, generator_state(generator)) for generator in sampler_generators(loader)]


def put_back(states: list[tuple[Any, Any]]) -> None:
    """Undo what has been drawn since `generator_states`."""
    for generator, state in states:
        set_generator_state(generator, state)


def sampler_batches(loader: DataLoader[Any]) -> Iterator[list[int]]:
    """Yield the indices of each batch of a user's DataLoader, except for empty ones."""
    batch_sampler = cast(Iterable[Sequence[int]], loader.batch_sampler)
    # Plain numbers travel and print best; an index may also be a key of another kind.
    batches = ([int(i) if hasattr(i, "__index__") else i for i in b] for b in batch_sampler)
    return (batch for batch in batches if batch)
