"""Places beside this machine's own folders, named by a url whose protocol fsspec knows."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_PROTOCOL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)


def is_url(place: str | os.PathLike[str] | None) -> TypeGuard[str]:
    """Whether ``place`` is a url like ``s3://bucket/run``, not a path."""
    return isinstance(place, str) and _PROTOCOL.match(place) is not None


def local_folder(url: str) -> Path:
    """Return where the files of ``url`` lie on this machine: ``runs/s3/bucket/run``."""
    protocol, _, rest = url.partition("://")
    names = rest.rpartition("@")[2].split("/")  # without user and password
    return Path("runs", protocol, *(n for n in names if n not in ("", ".", ".."))).absolute()


def check_protocol(url: str) -> None:
    """Refuse a url that nothing here can read or write.

    Raises:
        ValueError: Saying which package to install.
    """
    import fsspec

    protocol = url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise ValueError(
            f"{url}: fsspec knows no {protocol}://; give a path, or one of "
            f"{', '.join(f'{name}://' for name in ('s3', 'gs', 'abfs', 'sftp', 'hdfs', 'file'))}"
        ) from None
    except ImportError as error:
        raise ValueError(f"{url} needs a package that is not there: {error}") from error


def file_system(url: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of ``url``, and the path in it.

    A forked process must make its own: many of them talk through a thread.

    Raises:
        ValueError: If nothing here can read or write it.
    """
    from fsspec.core import url_to_fs

    check_protocol(url)
    system, path = url_to_fs(url)
    return system, path.rstrip("/")
