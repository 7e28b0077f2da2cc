"""Norms of gradients, weights and updates: right, equal on every rank, and only where logged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    Regression,
    TokenRegression,
    adamw,
    assert_equal_bits,
    fit_on,
    samples,
    weighted_samples,
    weights,
)
from torch import Tensor, nn

from trainer import TaskModule, WeightedLoss
from trainer.loggers import JsonlLogger

pytestmark = pytest.mark.timeout(60)

EVERYTHING = {"statistics": ["gradients", "weights", "updates"], "logger": [JsonlLogger()]}


def logged(task: TaskModule, run_dir: Path, world_size: int = 1, **options: Any) -> list[Any]:
    options = {"train": samples(24), "global_batch_size": 4, "max_epochs": 1, **options}
    fit_on(world_size, task, run_dir, **{**EVERYTHING, **options})
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def by_hand(task: Regression, clip: float) -> list[dict[str, float]]:
    """The same in a plain loop, of every second step."""
    optimizer, found = task.configure_optimizers(), []
    x, y = samples(24).tensors
    modules = {"": task, "/net.0": task.net[0], "/net.2": task.net[2]}
    for step, (some_x, some_y) in enumerate(zip(x.split(4), y.split(4), strict=True), 1):
        optimizer.zero_grad()
        nn.functional.mse_loss(task((some_x,)), some_y).backward()
        before = weights(task)
        values = {}
        for name, module in modules.items():
            own = list(module.parameters())
            values[f"train/grad_norm{name}"] = norm([p.grad for p in own])
            values[f"train/weight_norm{name}"] = norm(own)
        nn.utils.clip_grad_norm_(task.parameters(), clip)
        optimizer.step()
        for name in modules:
            names = [n for n, _ in task.named_parameters() if n.startswith(name[1:])]
            change = norm([weights(task)[n] - before[n] for n in names])
            values[f"train/update_ratio{name}"] = change / values[f"train/weight_norm{name}"]
        if step % 2 == 0:
            found.append(values)
    return found


def norm(tensors: Any) -> float:
    return float(torch.cat([t.detach().flatten() for t in tensors]).norm())


def norms(event: dict[str, Any]) -> dict[str, Any]:
    parts = ("_norm", "_ratio")
    return {name: value for name, value in event.items() if any(p in name for p in parts)}


@pytest.mark.parametrize("world_size", [1, 2])
def test_they_are_those_of_a_plain_loop(world_size: int, tmp_path: Path) -> None:
    clip = 0.5
    options = {"log_every_n_steps": 2, "gradient_clip_norm": clip}
    events = logged(Regression(), tmp_path, world_size, **options)
    expected = by_hand(Regression(), clip)
    assert [event["step"] for event in events] == [2, 4, 6]
    assert expected[0]["train/grad_norm"] > clip, "it is the norm before clipping"
    for event, values in zip(events, expected, strict=True):
        assert norms(event) == pytest.approx(values, rel=1e-9)


def test_reproducible_they_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    options = {"reproducible": True, "micro_batch_size": 1, "log_every_n_steps": 3}
    found = [logged(Regression(), tmp_path / str(n), n, **options) for n in (1, 2)]
    assert_equal_bits(*[list(map(norms, events)) for events in found])


def test_they_change_nothing(tmp_path: Path) -> None:
    plain, looked_at = Regression(adamw), Regression(adamw)
    logged(plain, tmp_path / "plain", statistics=[])
    logged(looked_at, tmp_path / "looked at", log_every_n_steps=1)
    assert_equal_bits(weights(looked_at), weights(plain))


def test_the_last_step_and_the_end_of_an_epoch_are_logged_too(tmp_path: Path) -> None:
    options = {"max_epochs": None, "max_steps": 8, "statistics": ["gradients"]}
    events = logged(Regression(), tmp_path, **options)
    assert [event["step"] for event in events] == [6, 8]
    assert all("train/grad_norm" in event for event in events)
    assert not any("train/weight_norm" in event for event in events)


class Fused(TokenRegression):
    """Has an optimizer whose kernel divides gradients, if it may."""

    def __init__(self, fused: bool) -> None:
        super().__init__(lambda params: torch.optim.SGD(params, lr=0.1, fused=fused))
        self.float()

    def loss(self, outputs: Tensor, batch: Any) -> WeightedLoss:
        total, weight = super().loss(outputs, batch)
        return WeightedLoss(total, weight * (1.5 if self.run.step else 1.0))


def test_gradients_that_the_optimizer_divides_are_shown_divided(tmp_path: Path) -> None:
    train = weighted_samples([1, 2, 0.5, 3] * 6)
    train.tensors = tuple(tensor.float() for tensor in train.tensors)
    options = {"train": train, "log_every_n_steps": 1}
    fused, plain = (logged(Fused(f), tmp_path / str(f), **options) for f in (True, False))
    for one, other in zip(fused, plain, strict=True):
        assert norms(one) == pytest.approx(norms(other), rel=1e-5)


class Scaled(Regression):
    """Has a parameter of its own that starts at 0, and a sparse one."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.table = nn.Embedding(3, 1, sparse=True).double()

    def forward(self, batch: Any) -> Tensor:
        rows = self.table(torch.zeros(len(batch[0]), dtype=torch.long)).squeeze(1)
        return super().forward(batch) + self.bias + rows


def test_weights_of_0_have_no_ratio(tmp_path: Path) -> None:
    task = Scaled()
    task.optimizer = lambda params: torch.optim.SGD(params, lr=0.1)
    first, second, *_ = logged(task, tmp_path, log_every_n_steps=1)
    assert first["train/weight_norm/bias"] == 0
    assert "train/update_ratio/bias" not in first
    assert second["train/update_ratio/bias"] > 0
    assert first["train/grad_norm/table"] > 0
    assert first["train/grad_norm"] > first["train/grad_norm/bias"]


class Pair(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Regression(), Regression()

    def forward(self, batch: Any) -> Tensor:
        part: Tensor = (self.one if self.run.turn == "one" else self.two)(batch)
        return part

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(outputs, batch[1])

    def configure_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {n: torch.optim.SGD(getattr(self, n).parameters(), lr=0.1) for n in ("one", "two")}


def test_each_of_several_optimizers_has_its_own(tmp_path: Path) -> None:
    event = logged(Pair(), tmp_path)[0]
    assert {"train/grad_norm/one", "train/grad_norm/two/two.net.0"} <= set(event)
    assert "train/grad_norm" not in event
