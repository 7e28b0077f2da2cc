"""What this rank is doing at the moment, noted where another process can read it.

The loop says which phase it enters. A note is a few numbers in a file that the ranks of a machine
map into their memory: so the process that started them can tell what a rank was doing that hangs,
that holds the GIL or that is stopped, without that rank's help.
"""

from __future__ import annotations

import math
import mmap
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

_SLOT = 8  # floats for one rank: a cache line of its own
_PHASE, _SINCE, _STEP, _LIMIT, _ASKED, _TELLS = range(6)
_MOST_ENDS = 10_000  # of backwards, that are kept


class Phase(IntEnum):
    """What a rank can be doing."""

    STARTING = 0
    PREPARING = 1
    EPOCH_START = 2
    LOADING = 3
    FORWARD = 4
    BACKWARD = 5
    OPTIMIZER = 6
    LOGGING = 7
    CALLBACKS = 8
    EVALUATION_LOADING = 9
    VALIDATION = 10
    SAVING = 11
    WAITING = 12
    FINISHING = 13
    DONE = 14

    def __str__(self) -> str:
        """Say it as in "rank 1: loading data for 300 s"."""
        return _WORDS.get(self, f"in {self.name.lower()}")


_WORDS = {
    Phase.STARTING: "starting",
    Phase.PREPARING: "preparing data",
    Phase.EPOCH_START: "starting an epoch",
    Phase.LOADING: "loading data",
    Phase.OPTIMIZER: "in the optimizer's step",
    Phase.LOGGING: "logging",
    Phase.EVALUATION_LOADING: "loading data for an evaluation",
    Phase.VALIDATION: "evaluating",
    Phase.SAVING: "saving",
    Phase.WAITING: "agreeing with the other ranks",
    Phase.FINISHING: "finishing",
    Phase.DONE: "done with its work",
}


STEP_PHASES = slice(Phase.LOADING, Phase.OPTIMIZER + 1)


class Note(NamedTuple):
    """What a rank was doing.

    Attributes:
        phase: The phase.
        since: When it began, by `time.monotonic`, which the processes of a machine share.
        step: The optimizer steps done.
        limit_s: The longest that the rank may stay in one phase.
    """

    phase: Phase
    since: float
    step: int
    limit_s: float


class Watch:
    """Notes what this process does.

    Attributes:
        phase: The current phase.
        since: When it began, by `time.monotonic`.
        seconds: Spent in each phase so far, the current one not included.
        num_buckets: How many buckets of gradients a backward reduces; 0 where that is not known.
        listeners: Called with every phase that begins.
    """

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.since = time.monotonic()
        self.seconds = [0.0] * len(Phase)
        self.num_buckets = 0
        self.listeners: tuple[Callable[[Phase], None], ...] = ()
        self._ends: list[tuple[float, ...]] = []
        self._step = 0
        self._limit_s = math.inf
        self._slot = memoryview(bytearray(8 * _SLOT)).cast("d")

    def enter(self, phase: Phase) -> None:
        """Note that ``phase`` begins; also where it is the current one, which then begins anew."""
        now = time.monotonic()
        self.seconds[self.phase] += now - self.since
        self.phase = phase
        self.since = now
        slot = self._slot
        slot[_PHASE] = phase
        slot[_SINCE] = now
        for listener in self.listeners:
            listener(phase)

    def listen(self, listener: Callable[[Phase], None]) -> None:
        """Call ``listener`` with every phase that begins from now on."""
        self.unlisten(listener)
        self.listeners += (listener,)

    def unlisten(self, listener: Callable[[Phase], None]) -> None:
        """Call it no more; a listener may ask for that itself."""
        self.listeners = tuple(each for each in self.listeners if each != listener)

    def loading(self, batches: Iterable[T], then: Phase) -> Iterator[T]:
        """Yield ``batches``; getting the next one is loading, what is done with it is ``then``."""
        loading = Phase.LOADING if then is Phase.FORWARD else Phase.EVALUATION_LOADING
        self.enter(loading)
        for batch in batches:
            self.enter(then)
            yield batch
            self.enter(loading)

    @contextmanager
    def excused(self, phase: Phase) -> Iterator[None]:
        """Stay in ``phase`` for as long as it takes; then the one before begins anew."""
        before, limit_s = self.phase, self.limit_s
        self.limit_s = math.inf
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)
            self.limit_s = limit_s

    @property
    def step(self) -> int:
        """The optimizer steps done."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        if step != self._step + 1:
            self._ends.clear()
        elif len(self._ends) == _MOST_ENDS:
            del self._ends[:-1]
        self._ends.append((self.since, *self.seconds[STEP_PHASES]))
        self._step = step
        self._slot[_STEP] = step

    def take_ends(self) -> list[tuple[float, ...]]:
        """Return the ends of the backwards since the last call, after the last one before these.

        Each is the time, then the `seconds` spent until then in each of the phases of a step.
        """
        ends = self._ends
        self._ends = ends[-1:]
        return ends

    @property
    def limit_s(self) -> float:
        """The longest that this rank may stay in one phase."""
        return self._limit_s

    @limit_s.setter
    def limit_s(self, seconds: float) -> None:
        self._limit_s = seconds
        self._slot[_LIMIT] = seconds

    @property
    def is_asked(self) -> bool:
        """Whether the reader of the `Board` wants this rank to report."""
        return self._slot[_ASKED] > 0

    def tells(self, has_more: bool) -> None:
        """Note whether somebody elsewhere is still to be told how this rank's work ends."""
        self._slot[_TELLS] = has_more

    @property
    def note(self) -> Note:
        """The same as another process reads it."""
        return Note(self.phase, self.since, self._step, self._limit_s)

    def share(self, path: Path, number: int) -> None:
        """Note it in the file of a `Board` from now on, as rank ``number``, and begin."""
        self._slot = _map(path)[number * _SLOT :][:_SLOT]
        self.limit_s = self._slot[_LIMIT]
        self.begin()

    def begin(self) -> None:
        """Forget what this process did before."""
        self.step = 0
        self.num_buckets = 0
        self.tells(False)
        self.enter(Phase.STARTING)


class Board:
    """The notes of all ranks of a machine, as the process that starts them reads them."""

    def __init__(self, path: Path, world_size: int, limit_s: float) -> None:
        """Make the file, where every rank is starting.

        Args:
            path: Where; it must not be there yet.
            world_size: The number of ranks.
            limit_s: The longest that they may stay in one phase, until they say otherwise.
        """
        start = [0.0] * _SLOT
        start[_SINCE], start[_LIMIT] = time.monotonic(), limit_s
        path.write_bytes(array("d", start * world_size).tobytes())
        self._floats = _map(path)

    def read(self) -> list[Note]:
        """Return the notes, in rank order."""
        values = self._floats.tolist()
        return [
            Note(Phase(int(phase)), since, int(step), limit_s)
            for phase, since, step, limit_s, *_ in (
                values[start : start + _SLOT] for start in range(0, len(values), _SLOT)
            )
        ]

    def tells(self, number: int) -> bool:
        """Whether a rank has still somebody to tell how its work ends."""
        return self._floats[number * _SLOT + _TELLS] > 0

    def ask(self) -> None:
        """Ask all ranks to report."""
        for slot in range(0, len(self._floats), _SLOT):
            self._floats[slot + _ASKED] = 1.0


def _map(path: Path) -> memoryview[float]:
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("d")


watch = Watch()
"""This process's own."""
