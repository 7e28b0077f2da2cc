"""Whether a dataset draws random numbers: seen by their generators having moved.

Seeding the generators for every sample takes about as long as fetching one from memory, and most
datasets draw nothing.
"""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import torch

from trainer.seeding import seed_generators

_KEY = 0x5EED  # any


def watch() -> None:
    """Put Python's, NumPy's and torch's CPU generator where `anything_drawn` expects them."""
    seed_generators(_KEY)


def anything_drawn() -> bool:
    """Whether one of the generators has been used, or seeded, since `watch`."""
    found = (
        random.random(),
        np.random.random_sample(),
        torch.rand((), dtype=torch.float64, device="cpu").item(),
    )
    return found != _untouched()


@cache
def _untouched() -> tuple[float, float, float]:
    """Return the first number of each generator; computed without touching the global ones."""
    own = torch.Generator("cpu").manual_seed(_KEY)
    return (
        random.Random(_KEY).random(),
        np.random.RandomState(_KEY).random_sample(),
        torch.rand((), dtype=torch.float64, device="cpu", generator=own).item(),
    )
