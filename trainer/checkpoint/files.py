"""Bytes on their way to the disk: hashed as they are written, and there after a power failure."""

from __future__ import annotations

import errno
import hashlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

# Hashed and written while they are in the processor's cache; either lets go of the GIL.
_CHUNK = 4 << 20
# Some network file systems cannot bring a folder to the disk, and say so.
_NOTHING_TO_DO = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)


def free_name(name: str, is_taken: Callable[[str], bool]) -> str:
    """Return ``name``, with a number before its suffix if that name is taken."""
    free, number = name, 0
    while is_taken(free):
        number += 1
        free = f"{Path(name).stem}-{number}{Path(name).suffix}"
    return free


def write_file(path: Path, write: Callable[[BinaryIO], Any]) -> dict[str, Any]:
    """Write a new file and bring it to the disk.

    Args:
        path: The file; it must not be there.
        write: Writes the content into the open file, from front to back.

    Returns:
        Its ``size`` and ``sha256``, of what was meant to be written.

    Raises:
        OSError: If that is not possible, whatever ``write`` makes of it.
    """
    raw = _HashedFile(path)
    try:
        with io.BufferedWriter(raw, 1 << 20) as file:
            write(file)
            file.flush()
            os.fsync(raw.fileno())
    except Exception:
        if raw.error is not None:  # torch.save raises something else in its place
            raise raw.error from None
        raise
    return {"size": raw.size, "sha256": raw.digest.hexdigest()}


def replace_file(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file, in place of an older one; whatever happens, one of them is there whole.

    Raises:
        OSError: If that is not possible; names ``path``.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.unlink(missing_ok=True)  # of a write that was killed
        try:
            write_file(part, write)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        if error.strerror is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def fsync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOTHING_TO_DO:
            raise
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, and bring them to the disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        fsync_folder(folder.parent)


class _HashedFile(io.RawIOBase):
    """A new file that knows the hash of what was written, and the first error that it met."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.size = 0
        self.digest = hashlib.sha256()
        self.error: OSError | None = None
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> int:
        chunk = memoryview(data).cast("B")[:_CHUNK]
        try:
            count = os.write(self._descriptor, chunk)
        except OSError as error:
            self.error = self.error or OSError(error.errno, error.strerror, str(self._path))
            raise self.error from None
        self.digest.update(chunk[:count])
        self.size += count
        return count

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._descriptor)
