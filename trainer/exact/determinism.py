"""Settings of torch under which an operation gives the same bits every time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Have torch choose deterministic algorithms, and be as before afterwards.

    Raises:
        ValueError: Where an operation has none.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic: Any = torch.utils.deterministic  # a module with a property
    fill, benchmark = deterministic.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    # cuBLAS reads it when it is used first, and torch insists on it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # To fill memory before it is written makes mistakes reproducible, and everything slower.
    deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False  # it chooses algorithms by their speed of the moment
    try:
        yield
    except RuntimeError as error:
        if "does not have a deterministic implementation" not in str(error):
            raise
        operation = str(error).split(" does not have")[0]
        raise ValueError(
            f"reproducible=true, but {operation} has no deterministic algorithm on this device; "
            "use another operation, or reproducible=false"
        ) from error
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        deterministic.fill_uninitialized_memory = fill
        torch.backends.cudnn.benchmark = benchmark
