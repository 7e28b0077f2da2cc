"""Processes that this one starts, such as a loader's workers: they end with it if it is killed."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import connection
from multiprocessing.util import Finalize
from typing import Any

from torch.multiprocessing import _prctl_pr_set_pdeathsig as _set_death_signal  # type: ignore[attr-defined]

from trainer.launching.janitor import Janitor, note

_AFTER_OTHERS = -200  # multiprocessing removes its own files at -100

_LAST_WORDS_S = 3.0

_parent: int | None = None  # this process, once it takes its children along
_always = False  # not only those that are started within `taken_along`


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends (on Linux)."""
    _set_death_signal(signal.SIGKILL)


def take_along(folder: str) -> None:
    """Have all processes that this one starts from now on end with it, and leave nothing.

    Args:
        folder: Of the janitor who cleans up after this process.
    """
    global _always
    _always = True
    _settle(folder)
    # What multiprocessing says when it removes the semaphores of a process that was killed.
    told, quiet = os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning"
    os.environ["PYTHONWARNINGS"] = f"{told},{quiet}" if told else quiet


@contextmanager
def taken_along() -> Iterator[None]:
    """The same for those that are started meanwhile, in a process that no janitor looks after."""
    global _parent
    if _always:
        yield
        return
    _settle(_own_janitor(os.getpid()).folder)
    try:
        yield
    finally:
        _parent = None


def start_janitor() -> Janitor:
    """Have a janitor clean up when this process is gone, in whatever way it ends."""
    janitor = Janitor()
    Finalize(None, janitor.dismiss, exitpriority=_AFTER_OTHERS)
    return janitor


@functools.cache
def _own_janitor(pid: int) -> Janitor:
    return start_janitor()


def exit_code(pid: int) -> int | None:
    """Return a child's exit code (negative: the signal), or None while it runs; reap nothing."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0  # somebody else has waited for it, and knows its code
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def wait_for_one(pids: Iterable[int], at_most_s: float) -> None:
    """Wait until one of these children has ended."""
    with ExitStack() as stack:
        files = []
        try:
            for pid in pids:
                files.append(os.pidfd_open(pid))
                stack.callback(os.close, files[-1])
        except (AttributeError, OSError):  # not on Linux, or somebody else has waited for it
            time.sleep(at_most_s)
        else:
            connection.wait(files, at_most_s)


def settle_worker() -> None:
    """In a loader's worker, whatever started it: leave nothing, and no last words."""
    _note()
    show = sys.excepthook

    def show_late(kind: type[BaseException], *error: Any) -> None:
        if issubclass(kind, OSError | EOFError):
            time.sleep(_LAST_WORDS_S)  # if the parent was killed, so is this process meanwhile
        show(kind, *error)

    sys.excepthook = show_late


def _note() -> None:
    note(multiprocessing.current_process()._config["tempdir"])  # type: ignore[attr-defined]


def _settle(folder: str) -> None:
    global _parent
    _parent = os.getpid()
    # Where children keep their sockets; it is also how those that are no forks learn of it.
    multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
    note(folder)
    _watch_forks()


@functools.cache
def _watch_forks() -> None:
    fork = threading.local()  # of each thread that forks

    def before() -> None:
        # The kernel looks at the thread that forks, so only the main thread's children, which ends
        # with the process, are tied to it.
        fork.is_child = os.getpid() == _parent
        fork.is_tied = fork.is_child and threading.current_thread() is threading.main_thread()

    def after_in_child() -> None:
        if fork.is_tied:
            die_with_parent()
            if os.getppid() != _parent:  # it died before the line above
                os._exit(1)
        if fork.is_child:
            _note()

    os.register_at_fork(before=before, after_in_child=after_in_child)
