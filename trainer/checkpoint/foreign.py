"""Checkpoints of Lightning (``.ckpt``), read without executing anything that they hold.

They may hold objects of any class, such as hyperparameters. Here each of these becomes an inert
stand-in, so that the weights can be read beside them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SUFFIX = ".ckpt"


class Inert(dict[Any, Any]):
    """Stands in for an object of a class that is not to be imported."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        """Take any arguments."""
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        """Forget the state."""


def read_lightning(path: Path) -> dict[str, Any]:
    """Return what a checkpoint of Lightning holds, on the CPU; tensors and plain values as such.

    Raises:
        ValueError: If there is no such file, or it is damaged, or no checkpoint of Lightning.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        inert: list[Any] = [(type(name, (Inert,), {}), name) for name in unknown]
        with torch.serialization.safe_globals(inert):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what a hostile pickle makes of the reader is up to the pickle
        raise ValueError(f"{path} cannot be read as a checkpoint of Lightning: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("state_dict"), dict):
        raise ValueError(f"{path} is no checkpoint of Lightning: it has no 'state_dict'")
    return found
