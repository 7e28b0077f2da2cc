"""Checkpoints in a store that fsspec knows: ``s3://``, ``gs://``, ``file://``, ...

A checkpoint is written to a local folder as always and then uploaded, its manifest last: without
one it is none. What counts is what the store has. The local files are copies of it, fetched where
they are needed and checked against the manifest.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from trainer.checkpoint.files import free_name
from trainer.checkpoint.manifest import MANIFEST, parse_manifest, read_manifest, step_names, verify
from trainer.checkpoint.store import LocalStore
from trainer.urls import file_system, local_folder

_OLD = ".old"
_PROBE = ".tmp-probe"


class RemoteStore:
    """A `CheckpointStore` at a url, with copies in a local folder.

    A manifest is the last file to appear and the first to go. If a step is saved twice, the older
    checkpoint waits under a name that readers know until the newer one is there.

    Args:
        url: Of the folder that holds the checkpoints.

    Raises:
        ValueError: If nothing here can read or write it.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._system, self._root = file_system(url)
        self._folder = local_folder(url)
        self._copies = LocalStore(self._folder)

    def open(self) -> None:
        """Try to write, and remove what a kill has left half-done.

        Raises:
            ValueError: If the store cannot be written.
        """
        self._copies.open()
        try:
            self._write(_PROBE, b"probe")
            self._system.rm_file(f"{self._root}/{_PROBE}")
        except Exception as error:
            raise ValueError(
                f"{self.url} cannot be written ({_told(error)}); check that it exists and that you "
                "may write there, or set run_dir to another place"
            ) from error
        for name in self.names():
            newer = name.removesuffix(_OLD)
            with self._telling("clean up"):
                if name != newer and not self._is_whole(newer):
                    self._copy(name, newer)
                if name != newer or not self._has(name):
                    self._remove(name)
        there = self.names()
        for name in self._copies.names():
            if name not in there:
                self._copies.remove(name)

    def names(self) -> list[str]:
        """Return the names of the checkpoints, oldest first; also of those half uploaded."""
        with self._telling("list"):
            return step_names(self._files(""))

    def facts(self, name: str) -> dict[str, Any]:
        """Return what the manifest says, if all files are there with their sizes."""
        facts = self._parsed(name)
        with self._telling(f"list {name} in"):
            sizes = self._files(name)
        for file, expected in facts["files"].items():
            if sizes.get(file) != expected["size"]:
                raise ValueError(
                    f"{self.url}/{name}/{file} is damaged: it has {sizes.get(file, 'no')} bytes "
                    f"instead of {expected['size']}"
                )
        return facts

    def fetch(self, name: str) -> Path:
        """Return the local copy of a checkpoint, with every byte as it was written.

        Raises:
            ValueError: If the checkpoint is damaged or not there.
        """
        facts, copy = self._parsed(name), self.path(name)
        with suppress(ValueError):
            if read_manifest(copy) == facts:
                verify(copy)
                return copy
        with self._download() as folder:
            fetched = folder / name
            fetched.mkdir()
            with self._telling(f"download {name} from"):
                for file in (*facts["files"], MANIFEST):
                    with suppress(FileNotFoundError):  # the check below tells
                        self._system.get_file(f"{self._root}/{name}/{file}", str(fetched / file))
            try:
                verify(fetched)
            except ValueError as error:
                raise ValueError(str(error).replace(str(folder), self.url)) from None
            self._keep(fetched, name)
        return copy

    def fetch_file(self, name: str) -> Path | None:
        """Return a local copy of a single file, if it is there."""
        copy = self._folder / name
        with self._download() as folder, self._telling(f"download {name} from"):
            try:
                self._system.get_file(f"{self._root}/{name}", str(folder / name))
            except FileNotFoundError:
                return None
            (folder / name).replace(copy)
        return copy

    def has(self, name: str) -> bool:
        """Whether there is a checkpoint of that name."""
        with self._telling(f"look for {name} in"):
            return self._has(name)

    def target(self, link: str) -> str | None:
        """Return the name that a link (``best``, ``last``) stands for, if it does."""
        with self._telling(f"read {link} in"), suppress(FileNotFoundError):
            name: str = self._system.cat_file(f"{self._root}/{link}").decode()
            return name if step_names([name]) else None  # it may be half-written
        return None

    def set_aside(self, names: Sequence[str]) -> str:
        """Move checkpoints to ``aside/``."""
        for name in names:
            with self._telling(f"move {name} to aside/ in"):
                self._copy(name, f"aside/{free_name(name, partial(self._is_aside, name))}")
            self.remove(name)
        return f"{self.url}/aside"

    def workspace(self, name: str) -> Path:
        """Return an empty local folder."""
        return self._copies.workspace(name)

    def put(self, workspace: Path, name: str) -> None:
        """Upload what is in ``workspace``, which becomes the local copy."""
        with self._telling(f"upload {name} to"):
            if self._is_whole(name):
                self._copy(name, f"{name}{_OLD}")
            self._remove(name)
            for file in read_manifest(workspace)["files"]:
                self._upload(workspace / file, f"{name}/{file}")
            self._write(f"{name}/{MANIFEST}", (workspace / MANIFEST).read_bytes())
            self._remove(f"{name}{_OLD}")
        self._keep(workspace, name)

    def link(self, link: str, name: str | None) -> None:
        """Have an object called ``link`` hold the name of a checkpoint."""
        if self.target(link) != name:
            with self._telling(f"write {link} in"):
                if name is None:
                    self._system.rm_file(f"{self._root}/{link}")
                else:
                    self._write(link, name.encode())
        if name is not None and not self.path(name).exists():
            try:
                self.fetch(name)
            except ValueError as error:  # the run can do without
                print(f"{link} has no copy here: {error}", file=sys.stderr, flush=True)
                name = None
        self._copies.link(link, name)

    def remove(self, name: str) -> None:
        """Remove a checkpoint and its copy, if they are there."""
        with self._telling(f"remove {name} from"):
            self._remove(name)
        self._copies.remove(name)

    def path(self, name: str) -> Path:
        """Return where the copy of a checkpoint is."""
        return self._copies.path(name)

    @contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        """Turn whatever a store raises into an OSError that says what was tried."""
        try:
            yield
        except Exception as error:
            raise OSError(f"cannot {what} {self.url} ({_told(error)})") from error

    @contextmanager
    def _download(self) -> Iterator[Path]:
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=self._folder) as folder:
            yield Path(folder)

    def _keep(self, folder: Path, name: str) -> None:
        copy = self.path(name)
        if copy.exists():
            shutil.rmtree(copy)
        folder.rename(copy)

    def _parsed(self, name: str) -> dict[str, Any]:
        with self._telling(f"read {name} in"):
            content = self._manifest(name)
        if content is None:
            raise ValueError(f"{self.url}/{name} is no checkpoint: it has no {MANIFEST}")
        return parse_manifest(content, f"{self.url}/{name}")

    # From here on errors of the store are as it raises them.

    def _files(self, folder: str) -> Mapping[str, int]:
        """Return what is in a folder: the size in bytes by name."""
        self._system.invalidate_cache()
        try:
            found = self._system.ls(f"{self._root}/{folder}".rstrip("/"), detail=True)
        except FileNotFoundError:
            return {}
        return {each["name"].rstrip("/").rpartition("/")[2]: each["size"] for each in found}

    def _manifest(self, name: str) -> bytes | None:
        try:  # not `exists`, which takes any error for a no
            content: bytes = self._system.cat_file(f"{self._root}/{name}/{MANIFEST}")
        except FileNotFoundError:
            return None
        return content

    def _is_aside(self, name: str, as_name: str) -> bool:
        """Whether another one lies there; a copy that was made before a kill is made again."""
        return self._manifest(f"aside/{as_name}") not in (None, self._manifest(name))

    def _has(self, name: str) -> bool:
        return self._manifest(name) is not None

    def _is_whole(self, name: str) -> bool:
        try:
            self.facts(name)
        except ValueError:
            return False
        return True

    def _upload(self, file: Path, name: str) -> None:
        self._make(name, lambda path: self._system.put_file(str(file), path))
        self._system.invalidate_cache()
        size, expected = self._system.info(f"{self._root}/{name}")["size"], file.stat().st_size
        if size != expected:
            raise OSError(f"{name} has {size} bytes there instead of {expected}")

    def _write(self, name: str, content: bytes) -> None:
        self._make(name, lambda path: self._system.pipe_file(path, content))
        if self._system.cat_file(f"{self._root}/{name}") != content:
            raise OSError(f"{name} is not there as it was written")

    def _copy(self, name: str, target: str) -> None:
        self._remove(target)
        for file in sorted(self._files(name), key=lambda file: file == MANIFEST):
            copy = partial(self._system.cp_file, f"{self._root}/{name}/{file}")
            self._make(f"{target}/{file}", copy)

    def _remove(self, name: str) -> None:
        files = self._files(name)
        for file in sorted(files, key=lambda file: file != MANIFEST):
            self._system.rm_file(f"{self._root}/{name}/{file}")
        with suppress(FileNotFoundError):  # where folders are more than a part of names
            self._system.rm(f"{self._root}/{name}", recursive=True)

    def _make(self, name: str, write: Callable[[str], Any]) -> None:
        path = f"{self._root}/{name}"
        try:
            write(path)
        except FileNotFoundError:  # not before: stores without folders make a bucket instead
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
            write(path)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
