"""Who notices that a rank hangs, and asks all ranks what they are doing.

Where this process has started the ranks, it reads their notes and asks. Ranks that somebody else
has started have a thread each, which looks at its own rank's notes, and they ask each other.
"""

from __future__ import annotations

import faulthandler
import itertools
import math
import os
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from trainer import distributed
from trainer.diagnosis import stacks
from trainer.diagnosis.failures import RankError, RemoteTraceback
from trainer.diagnosis.hang_report import told
from trainer.diagnosis.rank_report import RankReport
from trainer.launching import children
from trainer.watch import Board, Note, watch

_ANSWER_S = 2.0  # for a rank to report, with the stacks of its loader workers
_PAUSE_S = 5.0  # between two looks: this process was stopped, and the ranks with it
_LOOK_S = 1.0
_LAST_WORDS_S = 12.0  # for rank 0, which has to find out first that another rank has failed
_LISTEN_S = 0.1
_WITHOUT_GIL_S = 5.0  # after the limit: the others have asked by then
_ASKED, _REPORT, _TOLD = "asked", "report", "told"

_calls = itertools.count()  # of `watching_each_other`: the same number on every rank


class _Patience:
    """Tells whether a rank is late. Time in which this process was stopped does not count."""

    def __init__(self) -> None:
        self._last_look = self._counts_from = time.monotonic()

    def is_over(self, notes: Sequence[Note]) -> bool:
        now = time.monotonic()
        if now - self._last_look > _PAUSE_S:
            self._counts_from = now
        self._last_look = now
        return any(now - max(note.since, self._counts_from) > note.limit_s for note in notes)


class Watcher:
    """The eyes of the process that starts the ranks of a machine."""

    def __init__(
        self,
        folder: Path,
        count: int,
        timeouts_s: tuple[float, float],
        first_rank: int,
        world_size: int,
    ) -> None:
        """Make what the ranks share, before they start.

        Args:
            folder: Where.
            count: The number of ranks here.
            timeouts_s: The limits once a step is done, and before.
            first_rank: The number of the first of them, among those of all machines.
            world_size: How many all machines have.
        """
        self._folder = folder
        self._timeout_s, start_timeout_s = timeouts_s
        self._first_rank = first_rank
        here = range(first_rank, first_rank + count)
        self._elsewhere = [rank for rank in range(world_size) if rank not in here]
        self._board = Board(_board(folder), count, start_timeout_s)
        self._patience = _Patience()

    def check(self, pids: Mapping[int, int], store: Store) -> None:
        """Look whether a rank hangs.

        Args:
            pids: The ranks' processes, by their number on this machine.
            store: Through which they answer.

        Raises:
            RankError: If one does; it says which, where, and what the others wait for.
        """
        notes = self._board.read()
        if not self._patience.is_over(notes):
            return
        self._board.ask()
        reports = _answers(store, sorted(pids), _ANSWER_S)
        for number in pids.keys() - reports.keys():
            rank, dumps = self._first_rank + number, _dumps(self._folder, number)
            reports[number] = RankReport.of_silent(rank, pids[number], notes[number], dumps)
        found = [reports[number] for number in sorted(reports)]
        text = told(found, self._timeout_s, elsewhere=self._elsewhere)
        raise RankError(text.splitlines()[0]) from RemoteTraceback(f"{text}\n")

    def let_tell(self, first: int, is_over: Callable[[], bool]) -> None:
        """Give rank 0 some time to tell loggers elsewhere that the run has failed.

        Args:
            first: The process of rank 0.
            is_over: Whether there is no time any more.
        """
        deadline = time.monotonic() + _LAST_WORDS_S
        while self._board.tells(0) and not is_over() and time.monotonic() < deadline:
            if children.exit_code(first) is not None:
                return
            children.wait_for_one([first], _LISTEN_S)


def report_when_asked(number: int, first_rank: int, folder: Path, store: Store) -> None:
    """Be a rank that a `Watcher` sees.

    Args:
        number: Which of this machine.
        first_rank: The number of the machine's first one, among those of all machines.
        folder: The watcher's.
        store: Through which it answers.
    """
    watch.share(_board(folder), number)
    dumps = _dumps(folder, number)
    stacks.dump_on_signal(dumps.open("a"))

    def answer() -> None:
        # Not by waiting in the store: if the watcher is killed, torch would warn of it.
        while not watch.is_asked:
            time.sleep(_LISTEN_S)
        report = RankReport.of_this(first_rank + number, dumps)
        store.set(f"{_REPORT}/{number}", pickle.dumps(report))  # type: ignore[arg-type]

    threading.Thread(target=answer, name="report when asked", daemon=True).start()


@contextmanager
def watching_each_other(timeout_s: float) -> Iterator[None]:
    """Let the ranks that a launcher started end with a report if one of them hangs meanwhile.

    Must be called on every rank.

    Args:
        timeout_s: The limit once a step is done.
    """
    connection = _get_default_store().clone()  # type: ignore[attr-defined]
    store = PrefixStore(f"watching/{next(_calls)}", connection)
    with ExitStack() as stack:
        dumps = None
        if sys.platform == "linux":
            file = stack.enter_context(tempfile.TemporaryFile("w"))
            stacks.dump_on_signal(file)
            stack.callback(faulthandler.unregister, stacks.DUMP_SIGNAL)
            dumps = Path(f"/proc/self/fd/{file.fileno()}")
        look = _OwnLook(store, timeout_s, dumps)
        stack.callback(look.end)
        watch.begin()
        look.start()
        yield


class _OwnLook(threading.Thread):
    """A rank's look at itself, every second."""

    def __init__(self, store: Store, timeout_s: float, dumps: Path | None) -> None:
        super().__init__(name="watching each other", daemon=True)
        self._store = store
        self._timeout_s = timeout_s
        self._dumps = dumps
        self._ended = threading.Event()

    def run(self) -> None:
        patience = _Patience()
        while not self._ended.wait(min(_LOOK_S, watch.limit_s / 5)):
            if watch.limit_s < math.inf:  # a watchdog in C, for a rank that never gets here again
                seconds = watch.limit_s + _WITHOUT_GIL_S
                faulthandler.dump_traceback_later(seconds, exit=True, file=2)
            else:
                faulthandler.cancel_dump_traceback_later()
            try:
                is_asked = self._store.check([_ASKED])
            except DistError:  # its rank has left; what is left to do here has the watchdog's limit
                return
            if is_asked or patience.is_over([watch.note]):
                self._report()

    def end(self) -> None:
        self._ended.set()
        self.join(timeout=_LOOK_S)
        faulthandler.cancel_dump_traceback_later()

    def _report(self) -> None:
        """Tell the others, or all that they told where this rank is the first; and end."""
        rank, ranks = distributed.rank(), range(distributed.world_size())
        report = RankReport.of_this(rank, self._dumps)
        try:
            is_first = self._store.add("first to ask", 1) == 1
            self._store.set(f"{_REPORT}/{rank}", pickle.dumps(report))  # type: ignore[arg-type]
            self._store.set(_ASKED, "")
            reports = _answers(self._store, ranks, _LOOK_S + _ANSWER_S) if is_first else {}
        except DistError:  # the store went with its rank
            is_first, reports = True, {rank: report}
        if is_first:
            absent = [number for number in ranks if number not in reports]
            text = told(list(reports.values()), self._timeout_s, absent)
            print(text, file=sys.stderr, flush=True)
        with suppress(DistError):
            if is_first:
                self._store.set(_TOLD, "")
            self._store.wait([_TOLD], timedelta(seconds=_LOOK_S + 2 * _ANSWER_S))
        os._exit(1)


def _answers(store: Store, ranks: Sequence[int], within_s: float) -> dict[int, RankReport]:
    """Return the reports of the ranks that answer in time, in rank order."""
    deadline = time.monotonic() + within_s
    keys = {rank: f"{_REPORT}/{rank}" for rank in ranks}
    while not store.check(list(keys.values())) and time.monotonic() < deadline:
        time.sleep(0.02)
    return {rank: pickle.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}


def _board(folder: Path) -> Path:
    return folder / "notes"


def _dumps(folder: Path, rank: int) -> Path:
    return folder / f"stacks-{rank}"
