"""What happens in a rank that another process of this machine has started.

It settles (it lives no longer than its parent and leaves Ctrl-C to it), joins the group, does its
work, and reports what failed; ``ranks.py`` is the other side.
"""

from __future__ import annotations

import gc
import math
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import thread as pools
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.util import _run_finalizers  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from trainer import distributed, startup, stopping
from trainer.compiling import renew_threads
from trainer.diagnosis.failures import Failure, RankError
from trainer.launching import attempt, children, watching
from trainer.launching.attempt import Attempt
from trainer.launching.machines import Machine
from trainer.launching.sending import MAKE_ROOM, receive, refused_by_system
from trainer.lazy_dynamo import defer_dynamo
from trainer.meeting import meet
from trainer.watch import Phase, watch

_TEARDOWN_S = 10  # when all is done; NCCL's can hang

LINGER_S = 1.0
"""How long a rank that lost its peers stays, so that the rank which really failed ends first."""

HANDLED_SIGNALS = (*stopping.STOP_SIGNALS, signal.SIGHUP)
HOST = "127.0.0.1"

_is_rank = False


@dataclass(frozen=True)
class Group:
    """The ranks of one launch on this machine: what each has to know of it.

    Attributes:
        count: How many there are.
        kind: ``"cpu"`` or ``"cuda"``.
        num_threads: Threads per rank; None leaves torch's own choice.
        timeouts_s: The longest that a rank may stay in one phase, once it has done a step, and
            before.
        port: Of the store, on this machine.
        parent: The process that starts the ranks.
        folder: For files that live no longer than the ranks.
        can_stop: Whether they stop, saved, when a signal asks them to.
        caller_listens: Whether the parent handles the signals that ask to stop.
        attempt: Which start of the ranks this is.
        machine: This one among several; None if it is the only one.
    """

    count: int
    kind: str
    num_threads: int | None
    timeouts_s: tuple[float, float]
    port: int = 0
    parent: int = 0
    folder: str = ""
    can_stop: bool = False
    caller_listens: bool = False
    attempt: Attempt = Attempt()  # noqa: RUF009 - immutable
    machine: Machine | None = None

    @property
    def world_size(self) -> int:
        """The number of ranks, those of other machines included."""
        return self.count * (1 if self.machine is None else self.machine.count)

    @property
    def first_rank(self) -> int:
        """The number of the first rank of this machine."""
        return 0 if self.machine is None else self.count * self.machine.rank


@dataclass(frozen=True)
class Work:
    """What the ranks run: ``job(*args)``.

    Attributes:
        job: The function.
        args: Its arguments.
        where: Says how far a failed rank had come.
    """

    job: Callable[..., Any]
    args: tuple[Any, ...]
    where: Callable[[], str]


def in_child() -> bool:
    """Whether this process is a rank that another one started through `run`."""
    return _is_rank


def result_path(group: Group) -> Path:
    """Where the first rank of this machine leaves its result for the caller."""
    return Path(group.folder, "result")


def work_path(path: str | Path) -> str:
    """Where the work of fresh interpreters lies, beside what else they need in ``path``."""
    return f"{path}.pt"


def forked_rank(number: int, group: Group, work: Work, listener: socket.socket) -> NoReturn:
    """Be rank ``number`` of this machine, as a fork of the caller."""
    # What is there already would be searched for garbage, and its pages copied for that.
    gc.freeze()
    listener.close()
    renew_threads()
    _settle(group)
    _run_rank(number, group, lambda: work)
    _leave(number, group.timeouts_s[0])


def fresh_rank(path: str) -> NoReturn:
    """Be a rank as a fresh interpreter; what to do lies in ``path``."""
    defer_dynamo()
    group, sys.argv[:], start = pickle.loads(Path(path).read_bytes())
    startup.go_on(start)
    _settle(group)
    number = int(os.environ["LOCAL_RANK"])
    _run_rank(number, group, lambda: receive(work_path(path)))
    _leave(number, group.timeouts_s[0])


def _run_rank(number: int, group: Group, load: Callable[[], Work]) -> None:
    store = TCPStore(HOST, group.port, is_master=False)  # to report, also while the group waits
    asked = TCPStore(HOST, group.port, is_master=False)
    watching.report_when_asked(number, group.first_rank, Path(group.folder), asked)
    work = None
    startup.note("launch")
    try:
        work = load()
        if group.num_threads is not None:
            torch.set_num_threads(group.num_threads)
        if group.world_size > 1:
            rank, world_size = group.first_rank + number, group.world_size
            distributed.setup(_group_store(group), rank, world_size, group.kind, group.timeouts_s)
        else:
            distributed.set_timeouts(group.timeouts_s)
        startup.note("join")
        result = work.job(*work.args)
        if number == 0:
            try:
                _write_result(result, group)
            except (OSError, RuntimeError) as error:
                reason = refused_by_system(error)
                if reason is None:
                    raise
                raise RankError(
                    f"the result of rank {group.first_rank} cannot be written to "
                    f"{group.folder}: {reason}; {MAKE_ROOM}"
                ) from error
        flush()
        if group.machine is not None:
            distributed.wait_for_first_rank()
        _wait_for_all(store, group.count)
    except BaseException as error:
        _fail(error, group.first_rank + number, work, store)


def _group_store(group: Group) -> Store:
    """Return the store through which the ranks find each other."""
    if group.machine is None:
        return PrefixStore("group", TCPStore(HOST, group.port, is_master=False))
    return meet(group.timeouts_s[1]).store


def _leave(number: int, timeout_s: float) -> NoReturn:
    """End this process as Python does, but leave the interpreter whole.

    The group's threads can abort one that takes itself apart. The user's get ``timeout_s`` to end.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_TEARDOWN_S)
    distributed.teardown()
    signal.alarm(0)
    deadline = time.monotonic() + timeout_s
    _end_idle_pools()
    for thread in threading.enumerate():
        if thread.daemon or thread is threading.current_thread():
            continue
        thread.join(max(0, deadline - time.monotonic()))
        if thread.is_alive():
            print(
                f"rank {number} is done, but its thread {thread.name!r} still ran after "
                f"timeout_s={timeout_s:g}: it ends with the rank",
                file=sys.stderr,
            )
    _run_finalizers()  # multiprocessing's: what was put in a queue is sent
    flush()
    os._exit(0)


def _end_idle_pools() -> None:
    """Tell the threads of every ThreadPoolExecutor to end with their work, as Python does."""
    with pools._global_shutdown_lock:
        pools._shutdown = True
    for queue in list(pools._threads_queues.values()):
        queue.put(None)


def _settle(group: Group) -> None:
    """Make this process a rank: it lives no longer than its parent and leaves Ctrl-C to it."""
    global _is_rank
    _is_rank = True
    if os.getpgrp() != os.getpid():  # a fresh interpreter leads a group already
        os.setsid()  # so that all that it starts can be found, and ended
    signal.set_wakeup_fd(-1)  # the parent's event loop, if it has one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if group.can_stop:
        stopping.note_in_rank(group.parent if group.caller_listens else None)
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
    attempt.enter(group.attempt)
    children.die_with_parent()
    if os.getppid() != group.parent:  # it died before the line above
        os._exit(1)
    children.take_along(group.folder)


def _fail(error: BaseException, number: int, work: Work | None, store: Store) -> NoReturn:
    """Report ``error`` and end this process at once: nothing in it may wait for another rank."""
    try:
        place = work.where() if work else "starting"
    except Exception as second:
        place = f"an unknown place (where() raised {second!r})"
    failure = Failure.of(error, number, place)
    # Not in a file: a full disk may be what it is about.
    store.set(f"failure/{store.add('failures', 1)}", pickle.dumps(failure))  # type: ignore[arg-type]
    flush()
    if failure.secondary:
        time.sleep(LINGER_S)
    os._exit(1)


def _wait_for_all(store: Store, count: int) -> None:
    """Keep this rank's connections open until the machine's slowest rank has finished its work."""
    watch.limit_s = math.inf
    watch.enter(Phase.DONE)
    if store.add("done", 1) == count:
        store.set("all done", "")
    store.wait(["all done"], timedelta(days=365))


def _write_result(result: Any, group: Group) -> None:
    os.makedirs(group.folder, exist_ok=True)  # a system that cleans /tmp may have found it too old
    with open(result_path(group), "wb") as file:
        try:
            torch.save(result, file, pickle_protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError):
            import cloudpickle

            file.seek(0)
            file.truncate()
            torch.save(result, file, cloudpickle, pickle.HIGHEST_PROTOCOL)


def flush() -> None:
    """Flush what this process has printed, where somebody still reads it."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):  # closed, or nobody reads it any more
                stream.flush()
