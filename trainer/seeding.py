"""Seeds: one for the whole run, and from it one stream for every micro-batch."""

from __future__ import annotations

import random

import numpy as np
import torch

from trainer.plan import stream_key


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
