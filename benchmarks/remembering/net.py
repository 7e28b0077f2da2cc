"""What the programs here share: a net of 84 MB, data of a given size, a word to the benchmark."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

WIDTH = 2048
BATCH_SIZE = 16
STEPS = 4
LEARNING_RATE = 1e-4


def build_net() -> nn.Sequential:
    """Return five square layers."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))


def build_data(megabytes: int) -> TensorDataset:
    """Return samples (n, WIDTH) in so much memory."""
    return TensorDataset(torch.ones(megabytes * 2**18 // WIDTH, WIDTH))


def note_step(step: int) -> None:
    """Tell the benchmark that this process is a rank, and when it has done its last step.

    Args:
        step: From 1.
    """
    if step in (1, STEPS):
        Path(os.environ["BENCHMARK_FOLDER"], f"step-{step}-{os.getpid()}").touch()
