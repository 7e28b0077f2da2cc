"""What the programs here share: the net and the data of the MNIST recipe, and a clock."""

from __future__ import annotations

import gzip
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

FOLDER = Path(__file__).parents[2] / "recipes" / "data" / "mnist"
BATCH_SIZE = 128
STEPS = 2
FIRST, LAST = "first", "last"


def read_digits() -> TensorDataset:
    """Return the training images as bytes (n, 1, 28, 28), and their labels (n)."""
    return TensorDataset(
        _read("train-images-idx3", 16).view(-1, 1, 28, 28), _read("train-labels-idx1", 8).long()
    )


def _read(name: str, header: int) -> Tensor:
    packed = (FOLDER / f"{name}-ubyte.gz").read_bytes()
    return torch.tensor(np.frombuffer(gzip.decompress(packed), dtype=np.uint8, offset=header))


def build_net() -> nn.Sequential:
    """Return the net of the recipe."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def normalized(images: Tensor) -> Tensor:
    """Return the images as the net takes them."""
    return (images.float() - 33.32) / 78.57


def note_step(step: int) -> None:
    """Note, for the benchmark, when this rank has done its first and its last step.

    Args:
        step: From 1.
    """
    for what, number in ((FIRST, 1), (LAST, STEPS)):
        if step == number:
            path = Path(os.environ["BENCHMARK_FOLDER"], f"{what}-{os.getpid()}")
            path.write_text(str(time.monotonic()))
