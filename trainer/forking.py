"""Forking beside other threads: at a moment in which they rest."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path


@functools.cache
def fork_safely() -> None:
    """Have every later fork of this process wait for a moment in which its other threads rest.

    Gloo's threads free tensors, for which they become threads of Python for an instant, under a
    lock of the interpreter's. A process forked in that instant (a loader worker) waits for the lock
    for ever; Python 3.12 makes the lock anew in the child.
    """
    if sys.platform == "linux" and sys.version_info < (3, 12):
        os.register_at_fork(before=wait_for_rest)


def wait_for_rest(at_most_s: float = 0.1) -> None:
    """Wait until no other thread of this process runs: what it holds, a child would wait for."""
    deadline = time.monotonic() + at_most_s  # a thread may have long work of another kind
    while _others_run() and time.monotonic() < deadline:
        time.sleep(0.0005)


def _others_run() -> bool:
    """Whether another thread of this process runs, or is about to."""
    own = threading.get_native_id()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it ended just now
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            if state == "R" and int(task.name) != own:
                return True
    return False
