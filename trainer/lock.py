"""One fit at a time writes to a folder: two would set each other's files aside."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.launching import attempt

_FILE = ".lock"
_WAIT_S = 3.0  # for a fit that was just killed to be gone
_POLL_S = 0.1

_held: dict[str, object] = {}  # by this process's fits
os.register_at_fork(after_in_child=_held.clear)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other fits out of ``folder``.

    The kernel lets go of the lock when this process ends, however it ends. Where the file system
    has no locks no other process is kept out.

    Raises:
        ValueError: If another fit is at work there; says in which process.
    """
    # The kernel's lock does not tell the threads of a process apart, and goes when any of them
    # closes the file.
    place, fit = os.path.realpath(folder), object()
    if _held.setdefault(place, fit) is not fit:
        raise ValueError(_explain(folder, _this_process()))
    # The lock is the process's own. One by flock would be shared with forked loader workers, and
    # live on in those that a killed process leaves.
    descriptor = None
    try:
        descriptor = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT, 0o666)
        _take(descriptor, folder)
        yield
    finally:
        del _held[place]
        if descriptor is not None:
            os.close(descriptor)


def check_free(folder: Path) -> None:
    """Refuse a folder in which another process has a fit at work.

    Raises:
        ValueError: Saying which one.
    """
    if (folder / _FILE).exists():
        with locked(folder):
            pass


def is_held(folder: Path) -> bool | None:
    """Whether a fit is at work in ``folder``; None if that cannot be told. Changes nothing there.

    Raises:
        OSError: If it is somebody else's folder.
    """
    if os.path.realpath(folder) in _held:  # to look closer would let go of this process's lock
        return True
    try:
        descriptor = os.open(folder / _FILE, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return True if error.errno in (errno.EACCES, errno.EAGAIN) else None
    finally:
        os.close(descriptor)
    return False


def _take(descriptor: int, folder: Path) -> None:
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return  # there are no locks here
        if time.monotonic() > deadline:
            holder = _holder(descriptor)
            if _is_earlier(holder):
                return
            raise ValueError(_explain(folder, holder))
        time.sleep(_POLL_S)
    text = json.dumps(_this_process() | attempt.current()._asdict())
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)


def _this_process() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname()}


def _holder(descriptor: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:  # it is just being written
        return {}
    return found if isinstance(found, dict) else {}


def _is_earlier(holder: dict[str, Any]) -> bool:
    """Whether the lock is that of an attempt before this one, on a machine that is gone.

    Network file systems give its locks free only after a while.
    """
    now = attempt.current()
    if now.launch is None or holder.get("launch") != now.launch:
        return False
    return (holder["requeues"], holder["number"]) < (now.requeues, now.number)


def _explain(folder: Path, holder: dict[str, Any]) -> str:
    who = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
    return (
        f"{who} is training in {folder}; wait for it or stop it, or set run_dir=<another folder> "
        f"(if that process is no more, remove {folder / _FILE})"
    )
