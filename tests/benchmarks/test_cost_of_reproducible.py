"""The benchmark of what ``reproducible=true`` costs, on few steps."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

from benchmarks.reproducible import CONTESTANTS, measure, wide


def test_every_contestant_trains() -> None:
    data = TensorDataset(torch.randn(512, 1000), torch.randint(1000, (512,)))
    found = measure(wide, data, (1, 4), rounds=1)
    assert found.keys() == CONTESTANTS.keys()
    assert all(len(seconds) == 1 for seconds in found.values())
