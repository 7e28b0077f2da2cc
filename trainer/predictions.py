"""Predictions: joined in the order of the dataset, in memory or from files."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from trainer import distributed
from trainer.checkpoint.weights import read_torch
from trainer.launching import attempt
from trainer.trees import has_rows, joined, map_leaves

INDEX = "predictions.json"

Part: TypeAlias = tuple[int, int]
"""The position of the first sample in a file, and how many samples there are."""


def join(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Concatenate the predictions for micro-batches of ``sizes`` samples into those for all.

    A list has one entry per sample, even where these have as many entries themselves.

    Raises:
        ValueError: If anything does not belong to samples.
    """
    if not parts:
        return []
    return joined(parts, sizes, _join_leaves, "the prediction", fields_in_lists=False)


def load_predictions(folder: str | os.PathLike[str]) -> Any:
    """Return what ``Trainer.predict(output_dir=folder)`` has written, as if it had returned it.

    All of it is in memory then. To go through the files one by one, take them in the order of
    their names, and read each with ``torch.load``.

    Args:
        folder: The ``output_dir``.

    Raises:
        ValueError: If files are missing or damaged, or the prediction was cut short.
    """
    folder = Path(folder)
    try:
        listed = json.loads((folder / INDEX).read_bytes())["parts"]
        parts: list[Part] = [(int(position), int(size)) for position, size in listed]
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{folder} has no {INDEX}, which is written once all predictions are there; give the "
            "output_dir of a prediction, or predict again if it was cut short"
        ) from None
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{folder / INDEX} is damaged: {error!r}") from error
    files = [folder / _name(position) for position, _ in parts]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of {len(files)} files, first {missing[0]}; machines "
            "without a shared disk write their own each: copy them into one folder"
        )
    return join([read_torch(file) for file in files], [size for _, size in parts])


def make_folder(folder: Path) -> None:
    """Make the folder on every machine, before any rank writes into it.

    Raises:
        ValueError: If it cannot be made, or holds predictions already.
    """
    distributed.on_first_rank(lambda: _check_has_none(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"output_dir {folder} cannot be made: {error.strerror}; give a folder that can be "
            "written"
        ) from error


def write_part(folder: Path, part: Part, outputs: Any) -> None:
    """Write the predictions for a micro-batch.

    Raises:
        ValueError: If anything in them does not belong to samples, or could not be read again.
        OSError: If that is not possible; names the file.
    """
    position, size = part
    join([outputs], [size])  # what could not be joined is told of now
    written = io.BytesIO()
    torch.save(map_leaves(_without_the_rest, outputs), written)
    written.seek(0)
    if unreadable := get_unsafe_globals_in_checkpoint(written):
        raise ValueError(
            f"predict returned what is not read from a file again ({', '.join(unreadable)}); with "
            "an output_dir it must return tensors, numbers, strings, and lists, tuples or dicts of "
            "these: torch.from_numpy makes a tensor of an array"
        )
    file = folder / _name(position)
    try:
        file.write_bytes(written.getbuffer())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error


def write_index(folder: Path, parts: Iterable[Part]) -> None:
    """Say that all predictions are there, and in which files."""
    (folder / INDEX).write_text(json.dumps({"parts": sorted(parts)}) + "\n")


def _name(position: int) -> str:
    return f"predictions-{position:012d}.pt"


def _files(folder: Path) -> list[Path]:
    return list(folder.glob("predictions-*.pt"))


def _check_has_none(folder: Path) -> None:
    if attempt.current().is_restart:  # they are its own; the same files are written anew
        (folder / INDEX).unlink(missing_ok=True)
        return
    if folder.is_dir() and ((folder / INDEX).exists() or _files(folder)):
        raise ValueError(
            f"output_dir {folder} holds predictions already, which would be mixed with the new "
            "ones; give another folder or remove them"
        )


def _without_the_rest(leaf: Any) -> Any:
    """Return a tensor without what else its memory holds, which would be written with it."""
    if isinstance(leaf, torch.Tensor) and leaf.nbytes < leaf.untyped_storage().nbytes():
        return leaf.clone()
    return leaf


def _join_leaves(parts: Sequence[Any], sizes: Sequence[int], path: str) -> Any:
    first = parts[0]
    if all(part is None for part in parts):
        return None
    if isinstance(first, torch.Tensor) and all(map(has_rows, parts, sizes)):
        if len(shapes := {tuple(part.shape[1:]) for part in parts}) > 1:
            kinds = " and ".join(map(str, sorted(shapes)[:3]))
            raise ValueError(
                f"predict returned tensors whose samples have the shapes {kinds}, which are not "
                "joined into one; return a list with one entry per sample"
            )
        return torch.cat(list(parts))
    shape = f" of shape {tuple(first.shape)}" if isinstance(first, torch.Tensor) else ""
    raise ValueError(
        f"predict returned a {type(first).__name__}{shape} for a batch of {sizes[0]} samples; it "
        "must return tensors whose first dimension is the samples, lists with one entry per "
        "sample, or tuples or dicts of these"
    )
