"""The benchmark of compiled code: what it refuses, and the time that its net takes."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from benchmarks import compiled
from benchmarks.resting import rest


def test_one_round_has_nothing_that_was_compiled_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compiled", "recipes", "--rounds", "1"])
    with pytest.raises(SystemExit, match="2"):
        compiled.main()
    assert "--rounds must be 2 or more" in capsys.readouterr().err


def test_a_net_rests_forward_and_twice_as_long_backward() -> None:
    inputs = torch.ones(2, requires_grad=True)
    begun = time.perf_counter()
    outputs = 3 * rest(inputs, 0.02)
    between = time.perf_counter()
    outputs.sum().backward()  # type: ignore[no-untyped-call]
    assert between - begun >= 0.02
    assert time.perf_counter() - between >= 0.04
    assert inputs.grad is not None
    assert inputs.grad.tolist() == [3, 3]
