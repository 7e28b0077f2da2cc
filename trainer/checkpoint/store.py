"""Where the checkpoints of a run lie: there whole or not at all, whatever happens meanwhile."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainer.checkpoint.files import free_name, fsync_folder, make_folder
from trainer.checkpoint.manifest import read_manifest, step_folders, verify

_TEMPORARY = ".tmp-"


class CheckpointStore(Protocol):
    """Holds the checkpoints of a run by name (``step-00000500``). Every method raises OSError."""

    def open(self) -> None:
        """Make the place, and remove what a kill has left half-done."""

    def names(self) -> list[str]:
        """Return the names of the checkpoints, oldest first; damaged ones too."""

    def facts(self, name: str) -> Mapping[str, Any]:
        """Return what the manifest says; raise ValueError if a checkpoint is plainly damaged."""

    def set_aside(self, names: Sequence[str]) -> str:
        """Put checkpoints where no resume finds them; return that place."""

    def workspace(self, name: str) -> Path:
        """Return an empty local folder for the files of a new checkpoint."""

    def put(self, workspace: Path, name: str) -> None:
        """Take what is in ``workspace``, in place of an older checkpoint of the same name.

        It appears whole or not at all, survives a power failure, and has been read back.
        """

    def link(self, link: str, name: str | None) -> None:
        """Have ``link`` (``best``, ``last``) stand for a checkpoint, or for none."""

    def remove(self, name: str) -> None:
        """Remove a checkpoint, if it is there."""

    def fetch(self, name: str) -> Path:
        """Return `path`, once each byte there is as it was written; raise ValueError if damaged."""

    def path(self, name: str) -> Path:
        """Return where a checkpoint is, for this machine."""


class LocalStore:
    """A `CheckpointStore` in a folder.

    A checkpoint appears in one rename. Names are brought to the disk in the order in which they
    must be there: the files, their folder, its name, the links, and only then a removal.

    Args:
        folder: The run's ``checkpoints``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = Path(folder)

    def open(self) -> None:
        """Make the folder, and remove what a kill has left half-done."""
        make_folder(self._folder)
        for path in self._folder.glob(f"{_TEMPORARY}*"):
            _remove(path)
        for older in self._folder.glob("step-*.old"):
            self._settle(older.with_suffix(""), older)

    def names(self) -> list[str]:
        """Return the names of the checkpoints, oldest first."""
        return [path.name for path in step_folders(self._folder)]

    def facts(self, name: str) -> dict[str, Any]:
        """Return what the manifest says, if all files are there with their sizes."""
        verify(self.path(name), hashes=False)
        return read_manifest(self.path(name))

    def set_aside(self, names: Sequence[str]) -> str:
        """Move checkpoints to ``aside/``; return that place."""
        aside = self._folder / "aside"
        aside.mkdir(exist_ok=True)
        for name in names:
            free = free_name(name, lambda taken: (aside / taken).exists())
            self.path(name).rename(aside / free)
        fsync_folder(aside)
        fsync_folder(self._folder)
        return str(aside)

    def workspace(self, name: str) -> Path:
        """Return an empty folder in the same file system."""
        workspace = self._temporary(name)
        workspace.mkdir()
        return workspace

    def put(self, workspace: Path, name: str) -> None:
        """Rename ``workspace``, once its files are on the disk."""
        # A folder cannot replace another in one move. If this step was saved before, the older one
        # steps aside under a name that readers know, so that at any moment one of them is there.
        target, older = self.path(name), self.path(f"{name}.old")
        fsync_folder(workspace)
        if older.exists():  # removing it has failed before
            self._settle(target, older)
        if target.exists():
            target.rename(older)
        workspace.rename(target)
        fsync_folder(self._folder)
        damage = self._settle(target, older)
        if damage is not None:
            raise OSError(f"read back, {damage}")

    def link(self, link: str, name: str | None) -> None:
        """Replace a symbolic link in one move."""
        path = self._folder / link
        if name == (os.readlink(path) if path.is_symlink() else None):
            return
        if name is None:
            path.unlink()
        else:
            temporary = self._temporary(link)
            temporary.symlink_to(name)
            temporary.replace(path)
        fsync_folder(self._folder)

    def remove(self, name: str) -> None:
        """Remove a checkpoint, if it is there."""
        path = self.path(name)
        if not path.exists():
            return
        # Renamed first: a kill half-way must not leave something that looks like a checkpoint.
        doomed = self._temporary(f"removed-{name}")
        path.rename(doomed)
        fsync_folder(self._folder)
        shutil.rmtree(doomed)

    def fetch(self, name: str) -> Path:
        """Return the checkpoint's folder, once it is verified."""
        verify(self.path(name))
        return self.path(name)

    def path(self, name: str) -> Path:
        """Return the checkpoint's folder."""
        return self._folder / name

    def _temporary(self, name: str) -> Path:
        path = self._folder / f"{_TEMPORARY}{name}"
        _remove(path)  # left over if removing it has failed before
        return path

    def _settle(self, target: Path, older: Path) -> ValueError | None:
        """Of two checkpoints of a step keep the newer one, unless it is damaged; return how."""
        damage = None
        try:
            verify(target)
        except ValueError as error:
            damage = error
            self.remove(target.name)
            if older.exists():
                older.rename(target)
                fsync_folder(self._folder)
        else:
            self.remove(older.name)
        return damage


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
