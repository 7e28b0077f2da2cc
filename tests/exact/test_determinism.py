"""Deterministic algorithms, for the time of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import Regression, fit, fit_on, samples
from torch import Tensor

from trainer.exact.determinism import deterministic_algorithms


def settings() -> list[bool]:
    return [
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
    ]


def test_torchs_settings_are_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = settings()
    with deterministic_algorithms():
        assert settings() == [True, False, False, False]
    assert settings() == before
    with pytest.raises(KeyError), deterministic_algorithms():
        raise KeyError
    assert settings() == before


class Putting(Regression):
    """Uses an operation that has no deterministic algorithm."""

    def forward(self, batch: Any) -> Tensor:
        self.settings = settings()
        outputs = super().forward(batch)
        torch.zeros(9).put_(torch.tensor([1]), torch.ones(1))
        return outputs


OPTIONS: dict[str, Any] = {"reproducible": True, "micro_batch_size": 2, "max_steps": 1}


def test_an_operation_without_a_deterministic_algorithm_is_refused(tmp_path: Path) -> None:
    for ranks in (1, 2):
        with pytest.raises(ValueError, match="put_ has no deterministic algorithm on this device"):
            fit_on(ranks, Putting(), tmp_path, train=samples(8), global_batch_size=4, **OPTIONS)


def test_without_reproducible_it_is_not(tmp_path: Path) -> None:
    task = Putting()
    fit(task, tmp_path, train=samples(8), max_steps=1)
    assert task.settings[0] is False
