"""Disks that kill, fail and forget: every call that changes a file, seen and interfered with.

`interfering` sees the calls of this process to the system, one by one and before they happen, so
that a process can be killed or an error raised at each of them. `Disk` remembers them, and tells
what would be there after a power failure.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.common import part_of

Before: TypeAlias = Callable[[str, tuple[Any, ...]], None]

_EVENTS = {
    "os.mkdir": "mkdir",
    "os.rename": "rename",
    "os.remove": "unlink",
    "os.rmdir": "rmdir",
    "os.symlink": "symlink",
    "os.truncate": "truncate",
    "os.link": "link",
}
_watching: list[tuple[Path, Before]] = []
_local = threading.local()


@contextmanager
def interfering(folder: Path, before: Before) -> Iterator[None]:
    """Call ``before(name, args)`` before every change below ``folder``, in any thread.

    It may raise, or end the process. The names: create, write, fsync, mkdir, rename, unlink, rmdir,
    symlink, truncate, link. Meanwhile fsync does nothing else: it takes long, and makes no
    difference to those who live on.
    """
    _install()
    _watching.append((folder.resolve(), before))
    try:
        yield
    finally:
        _watching.pop()


def quickly(folder: Path) -> AbstractContextManager[None]:
    """Leave out every fsync below ``folder``."""
    return interfering(folder, lambda name, args: None)


class Killing:
    """Ends the process at one call, by SIGKILL; a write is cut in its middle."""

    def __init__(self, moment: int) -> None:
        self.calls = 0
        self._moment = moment

    def before(self, name: str, args: tuple[Any, ...]) -> None:
        """Count a call; to be given to `interfering`."""
        if self.calls == self._moment:
            if name == "write":
                _real_write(args[0], args[1][: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        self.calls += 1


class Failing:
    """Raises an OSError at some of the calls."""

    def __init__(self, moments: range, error: int) -> None:
        self.calls = 0
        self._moments, self._error = moments, error

    def before(self, name: str, args: tuple[Any, ...]) -> None:
        """Count a call; to be given to `interfering`."""
        self.calls += 1
        if self.calls - 1 in self._moments:
            raise OSError(self._error, os.strerror(self._error))


_real_write, _real_fsync = os.write, os.fsync


def _write(descriptor: int, data: Any) -> int:
    if _watching:
        _tell("write", (descriptor, memoryview(data)), _path_of(descriptor))
    return _real_write(descriptor, data)


def _fsync(descriptor: int) -> None:
    if _watching:
        _tell("fsync", (descriptor,), _path_of(descriptor))
    else:
        _real_fsync(descriptor)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _watching or getattr(_local, "is_telling", False):
        return
    if event == "open":
        path, _, flags = args
        if isinstance(path, str | os.PathLike) and flags & os.O_CREAT:
            _tell("create", (path,), Path(path))
    elif event in _EVENTS:
        if event in ("os.remove", "os.rmdir"):
            path = Path(args[0])
            if args[1] != -1:  # relative to an open folder
                path = _path_of(args[1]) / path
            args = (path,)
        elif event == "os.symlink":
            path = Path(args[1])
        else:
            path = _path_of(args[0]) if isinstance(args[0], int) else Path(args[0])
        _tell(_EVENTS[event], args, path)


def _tell(name: str, args: tuple[Any, ...], path: Path) -> None:
    if getattr(_local, "is_telling", False):
        return
    _local.is_telling = True  # what `before` does itself is not looked at
    try:
        for folder, before in _watching:
            if folder in (absolute := Path(os.path.abspath(path))).parents or folder == absolute:
                before(name, args)
    finally:
        _local.is_telling = False


def _path_of(descriptor: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


def _install() -> None:
    if os.write is _real_write:
        sys.addaudithook(_audit)  # for good: Python has no way to take it back
        os.write, os.fsync = _write, _fsync  # type: ignore[assignment]


def damage(file: Path, how: str, rng: random.Random) -> None:
    """Change a file: ``flip`` one bit, ``cut`` it, ``zero`` a page, or ``add`` a byte."""
    content = bytearray(file.read_bytes())
    if how == "flip":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del content[rng.randrange(len(content)) :]
    elif how == "zero":
        size = rng.choice([64, 512, 4096])
        start = rng.randrange(0, len(content), size)
        page = content[start : start + size]
        content[start : start + size] = bytes(len(page)) if any(page) else b"x" * len(page)
    else:
        content.append(rng.randrange(256))
    file.write_bytes(content)


@dataclass
class _Node:
    """A file, a folder or a link, in memory and on the disk."""

    kind: str
    now: Any  # bytes, {name: node}, or the link's target
    durable: Any
    pending: list[dict[str, _Node | None]] = field(default_factory=list)  # changes of names


class Disk:
    """A disk that is free to forget whatever was not brought to it by fsync.

    Of the names in a folder, any part of the changes since its last fsync may be there after a
    power failure, each change whole; of a file, nothing, half or all that was written since.

    Args:
        folder: What lies below it; empty at first.
    """

    def __init__(self, folder: Path) -> None:
        self.root = _Node("folder", {}, {})
        self._folder = folder.resolve()

    def before(self, name: str, args: tuple[Any, ...]) -> None:
        """Note a change; to be given to `interfering`."""
        getattr(self, f"_{name}")(*args)

    def after_power_failure(self, target: Path, rng: random.Random, luck: float) -> None:
        """Lay out in ``target`` what might be there if the power failed now.

        Args:
            target: A new folder.
            rng: Decides what is kept.
            luck: How likely a change is on the disk that nobody has brought there.
        """
        self._lay_out(self.root, target, rng, luck)

    def _lay_out(self, node: _Node, target: Path, rng: random.Random, luck: float) -> None:
        if node.kind == "file":
            half = (len(node.durable) + len(node.now)) // 2
            is_kept = rng.random() < luck
            end = len(node.now) if is_kept else rng.choice([len(node.durable), half])
            target.write_bytes(node.now[:end])
        elif node.kind == "link":
            target.symlink_to(node.now)
        else:
            target.mkdir()
            names = dict(node.durable)
            for change in node.pending:
                if rng.random() < luck:
                    names.update(change)
            for name, child in names.items():
                if child is not None:
                    self._lay_out(child, target / name, rng, luck)

    def _parent(self, path: Any) -> tuple[_Node, str]:
        absolute = Path(os.path.abspath(path))
        node = self.root
        for part in absolute.parent.relative_to(self._folder).parts:
            node = node.now[part]
        return node, absolute.name

    def _node(self, path: Any) -> _Node:
        if Path(os.path.abspath(path)) == self._folder:
            return self.root
        parent, name = self._parent(path)
        found: _Node = parent.now[name]
        return found

    def _change(self, parent: _Node, names: dict[str, _Node | None]) -> None:
        parent.pending.append(names)
        for name, node in names.items():
            if node is None:
                del parent.now[name]
            else:
                parent.now[name] = node

    def _add(self, path: Any, node: _Node) -> None:
        parent, name = self._parent(path)
        self._change(parent, {name: node})

    def _create(self, path: Any) -> None:
        self._add(path, _Node("file", b"", b""))

    def _mkdir(self, path: Any, *_: Any) -> None:
        parent, name = self._parent(path)
        if name not in parent.now:  # else it is there, and nothing happens
            self._add(path, _Node("folder", {}, {}))

    def _symlink(self, target: Any, path: Any, *_: Any) -> None:
        self._add(path, _Node("link", str(target), None))

    def _write(self, descriptor: int, data: memoryview) -> None:
        self._node(_path_of(descriptor)).now += bytes(data)

    def _fsync(self, descriptor: int) -> None:
        node = self._node(_path_of(descriptor))
        node.durable, node.pending = node.now.copy() if node.kind == "folder" else node.now, []

    def _rename(self, source: Any, target: Any, *_: Any) -> None:
        (old, name), (new, other) = self._parent(source), self._parent(target)
        assert old is new, "only renames within one folder are one change"
        self._change(old, {other: old.now[name], name: None})

    def _unlink(self, path: Any) -> None:
        parent, name = self._parent(path)
        if name in parent.now:
            self._change(parent, {name: None})

    _rmdir = _unlink


if __name__ == "__main__":
    part_of("benchmarks.checkpoint --only faults", __doc__)
