"""The checkpoint that is meant, on this machine or in a store."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from trainer.checkpoint import manifest
from trainer.checkpoint.manifest import FOLDER, MANIFEST
from trainer.checkpoint.remote import RemoteStore
from trainer.checkpoint.store import CheckpointStore, LocalStore
from trainer.config import TrainerConfig
from trainer.urls import is_url

_LINKS = ("best", "last")


def run_place(config: TrainerConfig, run_dir: Path) -> str | Path:
    """Return where the checkpoints of a run are: its url if it has one, else its folder."""
    return config.run_dir.rstrip("/") if is_url(config.run_dir) else run_dir


def store_of(run: str | Path) -> CheckpointStore:
    """Return the checkpoints of the run at `run_place`."""
    return RemoteStore(f"{run}/{FOLDER}") if is_url(run) else LocalStore(Path(run) / FOLDER)


def newest_valid(store: CheckpointStore, launch: str | None = None) -> Path | None:
    """Return the newest checkpoint of a run whose every byte is as it was written.

    Damaged ones are passed over, and named on stderr with what is wrong.

    Args:
        store: Where the checkpoints of the run lie.
        launch: Only look at those of this launch.
    """
    for name in reversed(store.names()):
        try:
            if launch is None or store.facts(name).get("launch") == launch:
                return store.fetch(name)
        except ValueError as error:
            print(f"NOT using a damaged checkpoint: {error}", file=sys.stderr, flush=True)
    return None


def find(run: str | Path, which: str | os.PathLike[str], of_run: str = "best") -> Path:
    """Return the checkpoint that a user means, on this machine.

    Args:
        run: The run that is at work, see `run_place`.
        which: As for `manifest.find`; or a url in place of a path.
        of_run: Which one a run stands for, ``"best"`` or ``"last"``.

    Raises:
        ValueError: If there is none; says which ones there are. If one from a store is damaged.
        OSError: If a store does not answer.
    """
    if is_url(which):
        run = which = which.rstrip("/")
        places = [which, f"{which}/{of_run}", f"{which}/{FOLDER}/{of_run}"]
    elif is_url(run) and (which in _LINKS or not Path(which).exists()):
        places = [f"{run}/{FOLDER}/{which}", f"{run}/{which}"]
    else:
        return manifest.find(Path(run), which, of_run)
    for place in places:
        found = _fetched(place)
        if found is not None:
            return found
    folder = RemoteStore(f"{run}/{FOLDER}")
    raise ValueError(
        f"no checkpoint {str(which)!r}: a checkpoint is a folder with a {MANIFEST}, or a "
        f".safetensors or .ckpt file; there are {', '.join(folder.names()) or 'none'} in "
        f"{folder.url}"
    )


def local(path: str | os.PathLike[str]) -> Path:
    """Return ``path``; of a url the copy on this machine.

    A link such as ``last`` is followed once, here: while it is read a run may set it anew.

    Raises:
        ValueError: If nothing is there, or it is damaged.
    """
    return find("", path) if is_url(path) else Path(path).resolve()


def _fetched(url: str) -> Path | None:
    """Return the local copy of what is at ``url``, if it is a checkpoint, a link or weights."""
    parent, _, name = url.rpartition("/")
    if parent.endswith("/"):  # of memory://run
        return None
    store = RemoteStore(parent)
    if name.endswith(manifest.FILES_OF_WEIGHTS):
        return store.fetch_file(name)
    target = store.target(name) if name in _LINKS else name
    return store.fetch(target) if target and store.has(target) else None
