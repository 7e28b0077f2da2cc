"""The ranks that this process starts on its own machine, on torch elastic's process supervision.

The *caller's* thread owns the signals and waits. A *supervisor* thread starts the ranks, watches
them, and outlives them: the kernel kills a rank when the thread that started it ends, so no rank
survives this process. A fresh thread also has no OpenMP pool yet, so ranks that it forks can build
their own, whatever the caller has computed before.

At each attempt, the supervisor holds the store through which the ranks find each other, on a port
that the system chooses, and to which they report their failures; and a folder for rank 0's result.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from trainer import startup, stopping
from trainer.diagnosis.failures import (
    Failure,
    RankError,
    death_of,
    ended_elsewhere,
    is_hopeless,
    shown,
    unanswered,
)
from trainer.launching import children, starting
from trainer.launching.attempt import Attempt
from trainer.launching.janitor import Janitor
from trainer.launching.rank import HOST, Group, Work, flush, result_path
from trainer.launching.watching import Watcher

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext

# A forked child inherits what other threads hold: locks of libraries, pipes of programs that they
# start. So the launches of one process start their ranks one after another, and only one of them
# forks.
_turn = threading.Lock()
_launches: set[_Supervisor] = set()  # that have ranks; changed in turn

_POLL_S = 0.05
_GRACE_S = 2  # for a killed rank to be gone


def run(
    group: Group,
    work: Work,
    max_restarts: int = 0,
    announce: Callable[[str], None] = lambda how: None,
) -> Any:
    """Start the ranks of this machine, wait for them, and return the first one's result.

    Whatever ends the wait (an exception in a rank, Ctrl-C, SIGTERM), no rank is left behind.
    A signal asks the ranks to stop if they can, else it ends them. If one fails, all are ended,
    and started again, up to ``max_restarts`` times.

    Args:
        group: How many ranks, and how they run.
        work: What they run.
        max_restarts: How often the ranks are started again. They are not after a mistake of the
            caller's, or when the same exception came from the same step twice in a row.
        announce: Called before the first start, with how the ranks are started.
    """
    is_main = threading.current_thread() is threading.main_thread()  # who may set handlers
    group = replace(group, caller_listens=is_main and group.can_stop)
    supervisor = _Supervisor(group, work, max_restarts, announce)
    with _signals_handled(supervisor, group.can_stop):
        try:
            supervisor.start()
            # Not one long wait: the kernel may hand a signal to another thread, after a stop
            # for example, and Python would run its handler only when this one wakes.
            while not supervisor.finished.wait(_POLL_S):
                pass
        except BaseException:
            supervisor.stopping = True
            if supervisor.is_alive():
                supervisor.finished.wait()
            raise
    supervisor.join()
    error, supervisor.error = supervisor.error, None
    if error is not None:
        try:
            raise error
        finally:
            del error  # else the traceback would keep itself alive, and files open
    return supervisor.result


@contextmanager
def _signals_handled(supervisor: _Supervisor, can_stop: bool) -> Iterator[None]:
    """Have signals to this process end the ranks, by asking them to stop if they can.

    Only the main thread may set handlers; in another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deadly: list[int] = []

    def ask(number: int, frame: object) -> None:
        stopping.note(number)
        supervisor.asked_to_stop = True

    def end(number: int, frame: object) -> None:
        deadly.append(number)
        supervisor.stopping = True

    def pause(number: int, frame: object) -> None:
        supervisor.send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)  # until a shell's "fg"
        supervisor.send(signal.SIGCONT)

    # Of work that cannot stop Ctrl-C stays as it is, and ends the wait.
    handlers: dict[int, Any] = dict.fromkeys((signal.SIGTERM, signal.SIGHUP), end)
    handlers[signal.SIGTSTP] = pause  # Ctrl-Z: the ranks are in sessions of their own
    if can_stop:
        handlers |= dict.fromkeys(stopping.STOP_SIGNALS, ask)
    ignores_children = signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    if ignores_children:  # nobody would learn the exit codes
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stopping.forget()
    try:
        with stopping.handled(handlers):
            yield
    finally:
        if ignores_children:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if deadly:
        flush()
        signal.raise_signal(deadly[0])
        raise SystemExit(128 + deadly[0])  # the caller's own handler returned


class _Supervisor(threading.Thread):
    """Starts the ranks, watches them, and leaves nothing behind.

    Attributes:
        stopping: Set by the caller to end the ranks.
        asked_to_stop: Set by the caller to have the ranks save and stop.
        finished: Set when no rank is left.
        result: What the first rank returned.
        error: What the caller is to raise instead.
    """

    def __init__(
        self, group: Group, work: Work, max_restarts: int, announce: Callable[[str], None]
    ) -> None:
        super().__init__(name="trainer-ranks")
        self._group = group
        self._work: Work | None = work
        self._max_restarts = max_restarts
        self._announce = announce
        self._method: str | None = None
        self._pids: list[int] = []
        self.stopping = False
        self.asked_to_stop = False
        self.finished = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all ranks that there are."""
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def run(self) -> None:
        try:
            with _elastic_log_muted():
                self._supervise()
        except BaseException as error:
            self.error = error
        finally:
            _launches.discard(self)
            self._work = None
            self.finished.set()

    def _supervise(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        launch = uuid.uuid4().hex
        before: Exception | None = None
        for number in range(self._max_restarts + 1):
            error = self.error = self._attempt(Attempt(launch, number), work)
            if error is None or self.stopping or self.asked_to_stop or is_hopeless(error, before):
                return
            if number < self._max_restarts:
                text = f"{shown(error)}restart {number + 1} of {self._max_restarts}"
                print(text, file=sys.stderr, flush=True)
                startup.begin()  # of the next attempt
            before = error

    def _attempt(self, attempt: Attempt, work: Work) -> Exception | None:
        """Start the ranks once, and note their result; return the error of the one that failed."""
        with ExitStack() as ending:
            with _turn:
                method = self._method = self._method or self._choose_method()
                janitor = Janitor()
                ending.callback(janitor.clean)
                # The ranks may connect as soon as the socket listens. The store itself starts
                # after the fork, because its thread would not survive that.
                with socket.create_server((HOST, 0), backlog=3 * self._group.count) as sock:
                    group = replace(
                        self._group,
                        port=sock.getsockname()[1],
                        parent=os.getpid(),
                        folder=janitor.folder,
                        attempt=attempt,
                    )
                    watcher = Watcher(
                        Path(group.folder),
                        group.count,
                        group.timeouts_s,
                        first_rank=group.first_rank,
                        world_size=group.world_size,
                    )
                    context = starting.start(group, method, work, sock)
                    ending.callback(context.close, signal.SIGKILL, _GRACE_S)
                    self._pids = list(context.pids().values())
                    ending.callback(self._pids.clear)
                    janitor.watch(self._pids)
                    store = TCPStore(
                        HOST,
                        group.port,
                        is_master=True,
                        wait_for_workers=False,
                        master_listen_fd=sock.detach(),
                    )
            try:
                deaths = self._wait(context, store, watcher)
            except RankError as hang:
                return hang.with_traceback(None)  # else it would keep the store
            if deaths:
                watcher.let_tell(context.pids()[0], lambda: self.stopping)
                return _first_failure(deaths, store, group)
            if not self.stopping:
                self.result = torch.load(result_path(group), map_location="cpu", weights_only=False)
                janitor.watch([])  # what ranks that are done leave running is meant to run
        return None

    def _choose_method(self) -> str:
        method, reason = starting.start_method(others_run=bool(_launches))
        self._announce(method if method == "fork" else f"fresh interpreters, because {reason}")
        _launches.add(self)
        return method

    def _wait(self, context: PContext, store: Store, watcher: Watcher) -> dict[int, int]:
        """Wait until all ranks are done or one has failed.

        Returns:
            The exit codes of those that ended before all were done. Elastic would see them too, but
            then it lets the other ranks half a minute, and takes code 0 for success.

        Raises:
            RankError: If one hangs.
        """
        is_asked = False
        while not self.stopping:
            if self.asked_to_stop and not is_asked:
                is_asked = True
                self.send(signal.SIGTERM)
            codes = {number: children.exit_code(pid) for number, pid in context.pids().items()}
            ended = {number: code for number, code in codes.items() if code is not None}
            all_done = store.check(["all done"])
            if ended and not all_done:
                return ended
            if len(ended) == len(codes):
                return {}
            watcher.check(context.pids(), store)
            running = [pid for number, pid in context.pids().items() if number not in ended]
            children.wait_for_one(running, _POLL_S)
        return {}


def _first_failure(deaths: dict[int, int], store: Store, group: Group) -> Exception:
    """Return the error of the rank that failed first, not of one that lost its peer through it."""
    keys = [f"failure/{n}" for n in range(1, store.add("failures", 0) + 1)]
    # A rank that was killed on the way to its report has none.
    reported: list[Failure] = [pickle.loads(store.get(key)) for key in keys if store.check([key])]
    for failure in reported:
        if not failure.secondary:
            return failure.error()
    heard = {failure.rank for failure in reported}
    first = group.first_rank
    for number, code in deaths.items():
        if first + number not in heard:
            return death_of(first + number, code)
    silent = set(range(first, first + group.count)) - heard
    if group.machine is not None and not silent:
        return ended_elsewhere(reported[0])
    return unanswered(silent, reported[0])


@contextmanager
def _elastic_log_muted() -> Iterator[None]:
    """Keep back elastic's log of what happens in this thread: the caller is told, once."""
    thread = threading.get_ident()

    def of_another_thread(record: logging.LogRecord) -> bool:
        return record.thread != thread

    loggers = [
        logging.getLogger("torch.distributed.elastic.multiprocessing.api"),
        logging.getLogger("torch.multiprocessing.spawn"),
    ]
    for logger in loggers:
        logger.addFilter(of_another_thread)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(of_another_thread)
