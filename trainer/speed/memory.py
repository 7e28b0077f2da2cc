"""How much memory this process has needed."""

from __future__ import annotations

import sys

import torch


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that this process has had: of its device, or else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # where there is no Unix there is none

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
