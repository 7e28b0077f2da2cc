"""The benchmark of what ``reproducible=true`` costs: which time it counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from benchmarks import reproducible
from benchmarks.nets import TwoLayers
from benchmarks.reproducible import GLOBAL_BATCH, measure


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_the_steps_in_the_middle_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(reproducible, "time", clock)
    monkeypatch.setattr(reproducible, "WARM_UP", 2)

    class Slow(TwoLayers):
        def forward(self, batch: Any) -> Tensor:
            clock.now += 1 if 2 <= self.run.step < 5 else 1000
            return super().forward(batch)

    size = 6 * GLOBAL_BATCH
    data = TensorDataset(torch.randn(size, 32), torch.randint(10, (size,)))
    found = measure(Slow, data, 3, rounds=2)
    assert found == {
        "default": [4, 4],
        "reproducible": [4, 4],
        "default, even share": [1, 1],
    }
