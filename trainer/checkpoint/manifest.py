"""What makes a folder a checkpoint: the manifest with the size and SHA-256 of every file.

It is written last, so a folder that has one is complete, and whatever is read is checked against
it first. What cannot be read is damaged, for whatever reason.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint.files import sha256

FORMAT_VERSION = 3
FOLDER = "checkpoints"
WEIGHTS, STATE, CONFIG, MANIFEST = "model.safetensors", "state.pt", "config.yaml", "manifest.json"

FILES_OF_WEIGHTS = (".safetensors", ".ckpt")  # which others write

_FILES = {WEIGHTS, STATE, CONFIG}
_STEP_NAME = re.compile(r"step-(\d{8,})(\.old)?")


def find(run_dir: Path, which: str | os.PathLike[str], of_run: str = "best") -> Path:
    """Return the checkpoint that a user means.

    Args:
        run_dir: The folder of the run.
        which: ``"best"``, ``"last"``, or a path: a checkpoint folder, a ``.safetensors`` or
            ``.ckpt`` file, or the folder of a run, as it stands or inside ``run_dir`` or its
            ``checkpoints``.
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
        if _is_file(place / MANIFEST) or (place.suffix in FILES_OF_WEIGHTS and _is_file(place)):
            return place.resolve()
    there = [path.name for path in step_folders(folder)]
    wanted = f"no checkpoint {str(which)!r} in {folder}" if named else f"{which} is no checkpoint"
    raise ValueError(
        f"{wanted}: a checkpoint is a folder with a {MANIFEST}, or a .safetensors or .ckpt "
        "file; "
        + (f"there are {', '.join(there)} in {folder}" if there else f"{folder} holds none")
        + "; give best, last, or the path of one"
    )


def refuse_damaged(path: Path) -> None:
    """Refuse a checkpoint that a user has named, if it is damaged.

    Raises:
        ValueError: Saying where it is damaged, and which one beside it is the newest that is not.
    """
    try:
        verify(path)
    except ValueError as error:
        whole = (p for p in reversed(step_folders(path.parent)) if p != path and _is_whole(p))
        other = next(whole, None)
        advice = (
            "there is no valid one beside it"
            if other is None
            else f"the newest valid one beside it is {other}: give that, or resume=auto"
        )
        raise ValueError(f"{error}; {advice}") from error


def verify(path: Path, hashes: bool = True) -> None:
    """Check every file of the checkpoint ``path`` against its manifest.

    Args:
        path: The checkpoint.
        hashes: Whether to read the files, or only to look whether they are there in full length.

    Raises:
        ValueError: If the checkpoint is missing, incomplete or damaged; says where.
    """
    for name, expected in read_manifest(path)["files"].items():
        _check_file(Path(path) / name, expected, hashes)


def verified(path: Path, name: str) -> Path:
    """Return the file ``name`` of a checkpoint once it is as the manifest says.

    Raises:
        ValueError: If it is missing or damaged.
    """
    file = Path(path) / name
    _check_file(file, read_manifest(path)["files"][name])
    return file


def step_folders(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, oldest first.

    Raises:
        OSError: If there is such a folder, and it cannot be read.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in step_names(names)]


def step_names(names: Iterable[str]) -> list[str]:
    """Return those names that a checkpoint may have, oldest first."""
    found = [name for name in names if _STEP_NAME.fullmatch(name)]
    return sorted(found, key=lambda name: (step_of(name), not name.endswith(".old")))


def step_of(path: str | Path) -> int:
    """Return the step in a checkpoint's name."""
    match = _STEP_NAME.fullmatch(Path(path).name)
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
    try:
        if not file.is_file():
            if Path(path).is_dir():
                raise ValueError(f"{path} is no checkpoint: it has no {MANIFEST}")
            raise ValueError(f"{path} is no checkpoint: there is no such folder")
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    return parse_manifest(content, str(path))


def parse_manifest(content: bytes, path: str) -> dict[str, Any]:
    """Return the facts in a manifest.

    Args:
        content: The file.
        path: The checkpoint, for messages.

    Raises:
        ValueError: If it is damaged or of another format version.
    """
    file = f"{path}/{MANIFEST}"
    try:
        facts: dict[str, Any] = json.loads(content)
        del facts["sha256"]
        is_whole = content == manifest_text(facts).encode()
        version = facts["format_version"]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if not is_whole:
        raise ValueError(f"{file} is damaged: its SHA-256 does not match")
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {version}, this trainer reads {FORMAT_VERSION}; use the "
            "trainer's version that wrote it"
        )
    if not _is_sound(facts):  # somebody made it, with a digest that fits
        raise ValueError(f"{file} does not describe a checkpoint")
    return facts


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # it is there; whoever reads it says what is wrong
        return True


def _is_sound(facts: Mapping[str, Any]) -> bool:
    """Whether a manifest lists the files of a checkpoint, no others, and says what it must."""
    files, metric = facts.get("files"), facts.get("metric")
    return (
        type(facts.get("step")) is int
        and type(facts.get("world_size")) is int
        and isinstance(facts.get("monitor", 0), str | None)
        and (metric is None or (type(metric) is float and math.isfinite(metric)))
        and isinstance(files, dict)
        and files.keys() == _FILES
        and all(isinstance(f, dict) and f.keys() == {"size", "sha256"} for f in files.values())
    )


def _is_whole(path: Path) -> bool:
    try:
        verify(path)
    except ValueError:
        return False
    return True


def _check_file(file: Path, expected: Mapping[str, Any], hashes: bool = True) -> None:
    try:
        if not file.is_file():
            raise ValueError(f"{file} is missing")
        size = file.stat().st_size
        if size != expected["size"]:
            raise ValueError(
                f"{file} is damaged: it has {size} bytes instead of {expected['size']}"
            )
        if hashes and sha256(file) != expected["sha256"]:
            raise ValueError(f"{file} is damaged: its SHA-256 does not match the {MANIFEST}")
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
