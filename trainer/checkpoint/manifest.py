"""What makes a folder a checkpoint: the manifest with the size and SHA-256 of every file.

It is written last, so a folder that has one is complete, and whatever is read is checked against
it first.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT_VERSION = 3
FOLDER = "checkpoints"
WEIGHTS, STATE, CONFIG, MANIFEST = "model.safetensors", "state.pt", "config.yaml", "manifest.json"

_STEP_FOLDER = re.compile(r"step-(\d{8,})(\.old)?")


def find(run_dir: Path, which: str | os.PathLike[str], of_run: str = "best") -> Path:
    """Return the checkpoint that a user means.

    Args:
        run_dir: The folder of the run.
        which: ``"best"``, ``"last"``, or a path: a checkpoint folder, a ``.safetensors`` file or
            the folder of a run, as it stands or inside ``run_dir`` or its ``checkpoints``.
        of_run: Which one the folder of a run stands for, ``"best"`` or ``"last"``.

    Raises:
        ValueError: If there is none; says which ones there are.
    """
    folder = Path(run_dir) / FOLDER
    named = which in ("best", "last")
    if named:
        places = [folder / which]
    else:
        given = [Path(which), Path(run_dir) / which, folder / which]
        places = [p for path in given for p in (path, path / of_run, path / FOLDER / of_run)]
    for place in places:
        if (place / MANIFEST).is_file() or (place.is_file() and place.suffix == ".safetensors"):
            return place.resolve()
    there = [path.name for path in step_folders(folder)]
    wanted = f"no checkpoint {str(which)!r} in {folder}" if named else f"{which} is no checkpoint"
    raise ValueError(
        f"{wanted}: a checkpoint is a folder with a {MANIFEST}, or a .safetensors file; "
        + (f"there are {', '.join(there)} in {folder}" if there else f"{folder} holds none")
        + "; give best, last, or the path of one"
    )


def newest_valid(run_dir: Path) -> Path | None:
    """Return the newest checkpoint of a run whose every byte is as it was written.

    Damaged ones are passed over, and named on stderr with what is wrong.
    """
    for path in reversed(step_folders(Path(run_dir) / FOLDER)):
        try:
            verify(path)
        except ValueError as error:
            print(f"NOT using a damaged checkpoint: {error}", file=sys.stderr, flush=True)
        else:
            return path
    return None


def verify(path: Path) -> None:
    """Check every file of the checkpoint ``path`` against its manifest.

    Raises:
        ValueError: If the checkpoint is missing, incomplete or damaged; says where.
    """
    for name in read_manifest(path)["files"]:
        verified(path, name)


def step_folders(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, oldest first."""
    found = [p for p in folder.glob("step-*") if _STEP_FOLDER.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=lambda p: (step_of(p), p.suffix != ".old"))


def step_of(path: Path) -> int:
    """Return the step in a checkpoint folder's name."""
    match = _STEP_FOLDER.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def manifest_text(facts: Mapping[str, Any]) -> str:
    """Return the manifest that holds ``facts``, with a digest of its own."""
    body = json.dumps(facts, indent=2)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return json.dumps({**facts, "sha256": digest}, indent=2) + "\n"


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the facts in the manifest of the checkpoint ``path``.

    Raises:
        ValueError: If there is none, or it is damaged or of another format version.
    """
    file = Path(path) / MANIFEST
    if not file.is_file():
        raise ValueError(
            f"{path} is no checkpoint: "
            + (f"it has no {MANIFEST}" if Path(path).is_dir() else "there is no such folder")
        )
    try:
        text = file.read_text(encoding="utf-8")
        facts: dict[str, Any] = json.loads(text)
        del facts["sha256"]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if text != manifest_text(facts):
        raise ValueError(f"{file} is damaged: its SHA-256 does not match")
    if facts["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {facts['format_version']}, this trainer reads "
            f"{FORMAT_VERSION}; use the trainer's version that wrote it"
        )
    return facts


def seal(path: Path) -> dict[str, Any]:
    """Bring ``path`` to the disk; return its size and digest."""
    fsync(path)
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def verified(path: Path, name: str) -> Path:
    """Return the file ``name`` of a checkpoint once it is as the manifest says."""
    expected = read_manifest(path)["files"][name]
    file = Path(path) / name
    if not file.is_file():
        raise ValueError(f"{file} is missing")
    size = file.stat().st_size
    if size != expected["size"]:
        raise ValueError(f"{file} is damaged: it has {size} bytes instead of {expected['size']}")
    if _sha256(file) != expected["sha256"]:
        raise ValueError(f"{file} is damaged: its SHA-256 does not match the {MANIFEST}")
    return file


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):  # large enough for hashlib to let go of the GIL
            digest.update(chunk)
    return digest.hexdigest()


def fsync(path: Path) -> None:
    """Bring a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
