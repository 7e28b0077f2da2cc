"""Seeds: one for the whole run, and from it one stream for every micro-batch."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global random generators.

    Args:
        seed: Any integer of at least 0.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_stream(device: torch.device, seed: int, step: int, number: int) -> None:
    """Put torch's generators at the start of the stream of one micro-batch.

    So what dropout draws depends on the step and on the micro-batch's number within the global
    batch, not on the rank that computes it.

    Args:
        device: Where the micro-batch is computed.
        seed: Seed of the run.
        step: Optimizer steps done.
        number: Number of the micro-batch within its global batch, over all ranks.
    """
    key = stream_key(seed, step, number)
    torch.default_generator.manual_seed(key)  # torch.manual_seed takes a hundred times as long
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(key)


def stream_key(*parts: int) -> int:
    """Mix integers into one 63-bit seed, so that every (seed, step, ...) has its own stream.

    The mixing function is splitmix64's finalizer (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014), applied after adding each part.
    """
    key = 0
    for part in parts:
        key = (key + part + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        key ^= key >> 31
    return key >> 1
