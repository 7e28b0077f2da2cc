"""`Trainer.find_lr`: the same curve on any number of ranks, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import (
    Regression,
    TokenRegression,
    adamw,
    assert_equal_bits,
    fit,
    samples,
    weighted_samples,
    weights,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainer import OptimizerSetup, TaskModule, Trainer, run
from trainer.finding.curve import is_beyond, smoothed, steepest
from trainer.finding.lr_report import LRReport

pytestmark = pytest.mark.timeout(60)


def find(task: TaskModule, run_dir: Path, **options: Any) -> LRReport:
    own = {name: options.pop(name) for name in ("steps", "min_lr", "max_lr") if name in options}
    if "optimizer" in options:
        own["optimizer"] = options.pop("optimizer")
    train = options.pop("train", samples(40))
    options = {"global_batch_size": 8, "accelerator": "cpu", "timeout_s": 30, **options}
    trainer = Trainer(run_dir=str(run_dir), **options)
    report = trainer.find_lr(task, train=train, **{"steps": 40, "min_lr": 1e-4, **own})
    assert report is not None
    return report


class Tall(Regression):
    """Has parameter groups with rates of their own, and a schedule that is soon over."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[float]] = []

    def configure_optimizers(self) -> OptimizerSetup:
        first, _, last = self.net
        groups = [
            {"params": first.parameters(), "lr": 0.01, "name": "body"},
            {"params": last.parameters(), "lr": 0.1, "name": "head"},
        ]
        self.optim = torch.optim.SGD(groups)
        schedule = torch.optim.lr_scheduler.OneCycleLR(self.optim, [0.01, 0.1], total_steps=5)
        return OptimizerSetup(self.optim, schedule)

    def after_optimizer_step(self) -> None:
        self.seen.append([group["lr"] for group in self.optim.param_groups])


class Pair(TaskModule):
    """Two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Regression(), Regression()

    def forward(self, batch: Any) -> Tensor:
        part: Tensor = (self.one if self.run.turn == "one" else self.two)(batch)
        return part

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(outputs, batch[1])

    def configure_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {
            name: torch.optim.SGD(getattr(self, name).parameters(), lr=0.01)
            for name in ("one", "two")
        }


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes as long as a sweep; `alone`, which is made before, has a picture."""
    monkeypatch.setattr(LRReport, "write", lambda _: None)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> LRReport:
    task = Regression()
    before = weights(task)
    run_dir = tmp_path_factory.mktemp("alone")
    report = find(task, run_dir, max_epochs=3)
    assert_equal_bits(task, before)
    assert all(p.grad is None and p.requires_grad for p in task.parameters())
    assert {path.name for path in run_dir.iterdir()} == {"find_lr.json", "find_lr.png"}
    return report


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_curve_is_the_same_on_any_number_of_ranks(
    world_size: int, alone: LRReport, tmp_path: Path
) -> None:
    task = Regression()
    before = weights(task)
    report = find(task, tmp_path, devices=world_size)
    assert report.rates == alone.rates
    assert report.losses == pytest.approx(alone.losses, rel=1e-6)
    assert report.suggestion == alone.suggestion
    assert_equal_bits(task, before)


def test_reproducible_it_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    options = {
        "reproducible": True,
        "micro_batch_size": 2,
        "train": weighted_samples([1, 2, 0.5] * 8),
    }
    found = [find(TokenRegression(), tmp_path, devices=n, **options).losses for n in (1, 2)]
    assert_equal_bits(*found)


def test_it_stops_where_the_loss_diverges(alone: LRReport) -> None:
    assert 10 < len(alone.rates) < 40
    assert alone.suggestion is not None
    assert alone.smoothed[-1] > 3 * min(alone.smoothed)
    assert alone.rates[1] / alone.rates[0] == pytest.approx((10 / 1e-4) ** (1 / 39))


def test_what_is_written_is_what_was_found(alone: LRReport) -> None:
    found = json.loads((alone.run_dir / "find_lr.json").read_text())
    assert found["losses"] == alone.losses
    assert found["suggestion"] == alone.suggestion
    assert f"suggestion  {alone.suggestion:.3g}" in str(alone)


def test_a_fit_afterwards_is_as_without(tmp_path: Path) -> None:
    fitted = []
    for number, first in enumerate((True, False)):
        task = Regression(adamw)
        if first:
            find(task, tmp_path / "find")
        fit(task, tmp_path / str(number), train=samples(16), max_steps=3, shuffle=True)
        fitted.append(weights(task))
    assert_equal_bits(*fitted)


class Kept(Regression):
    """Makes its optimizer once."""

    def __init__(self) -> None:
        super().__init__(lambda _: self.optim)
        self.optim = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_an_optimizer_that_is_older_is_as_it_was(tmp_path: Path) -> None:
    task = Kept()
    find(task, tmp_path)
    assert task.optim.param_groups[0]["lr"] == 0.1
    assert not task.optim.state


def test_parameter_groups_are_scaled_together(tmp_path: Path) -> None:
    task = Tall()
    report = find(task, tmp_path, steps=12)
    assert report.groups == pytest.approx({"body": 0.1, "head": 1})
    body, head = zip(*task.seen, strict=True)
    assert list(head) == pytest.approx(report.rates)
    assert list(body) == pytest.approx([rate / 10 for rate in report.rates])
    assert "body" in str(report)


def test_what_a_task_states_is_swept_and_not_what_comes_of_scaling(tmp_path: Path) -> None:
    scaling = {"lr_scaling": "linear", "lr_reference_batch_size": 4, "lr_warmup_steps": 9}
    plain, scaled = find(Regression(), tmp_path), find(Regression(), tmp_path, **scaling)
    assert scaled.rates[:5] == plain.rates[:5]
    fall = [report.losses[0] - report.losses[9] for report in (plain, scaled)]
    assert fall[1] > 1.5 * fall[0]


def test_of_several_optimizers_one_is_swept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Pair has the optimizers one, two: find_lr.optimizer"):
        find(Pair(), tmp_path)
    with pytest.raises(ValueError, match="three is none of them"):
        find(Pair(), tmp_path, optimizer="three")
    with pytest.raises(ValueError, match="Regression has one optimizer, which has no name"):
        find(Regression(), tmp_path, optimizer="one")
    report = find(Pair(), tmp_path, optimizer="two")
    assert report.suggestion is not None


class Itself(Regression):
    optimizes_itself = True

    def optimize(self, batch: Any, num_samples: int, global_size: int) -> None:
        """Do nothing."""


def test_a_task_that_optimizes_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Itself optimizes itself"):
        find(Itself(), tmp_path)


class Infinite(Regression):
    def loss(self, outputs: Tensor, batch: Any) -> Any:
        return super().loss(outputs, batch) + (float("inf") if self.run.step == 7 else 0)


def test_an_infinite_loss_ends_it(tmp_path: Path) -> None:
    report = find(Infinite(), tmp_path)
    assert len(report.losses) == 7
    assert report.suggestion is None
    assert "does not fall" in str(report)


def test_a_first_loss_that_is_not_finite_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Never(Regression):
        def loss(self, outputs: Tensor, batch: Any) -> Any:
            return super().loss(outputs, batch) * float("nan")

    monkeypatch.undo()  # it is written, without a picture
    report = find(Never(), tmp_path)
    assert (report.losses, report.suggestion) == ([], None)
    assert "The loss of the first step was not finite" in str(report)
    assert [path.name for path in tmp_path.iterdir()] == ["find_lr.json"]


def test_buffers_that_no_checkpoint_has_are_given_back(tmp_path: Path) -> None:
    class Counting(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()), persistent=False)

        def forward(self, batch: Any) -> Any:
            self.seen += 1
            return super().forward(batch)

    task = Counting()
    find(task, tmp_path)
    assert task.seen == 0
    options = {"run_dir": str(tmp_path), "accelerator": "cpu", "global_batch_size": None}
    loader = DataLoader(samples(8), batch_size=4)
    found = Trainer(**options).find_lr(task, train_dataloaders=loader, steps=10)
    assert found is not None
    assert len(found.losses) == 10
    with pytest.raises(ValueError, match="train_dataloaders= and train= are the same thing"):
        Trainer(**options).find_lr(task, train=loader, train_dataloaders=loader)


@pytest.mark.parametrize("seed", range(50))
def test_noise_at_low_rates_is_no_fall(seed: int) -> None:
    rates = np.geomspace(1e-7, 1, 100)
    noise = np.random.default_rng(seed).normal(scale=0.5, size=100)
    falls = 2 / (1 + (rates / 1e-2) ** 2) + noise
    found = steepest(rates.tolist(), smoothed(falls.tolist()))
    assert found is not None
    assert 1e-3 < rates[found] < 1e-1


def test_mistakes_in_its_options_are_named(tmp_path: Path) -> None:
    cfg = {
        "task": {"_target_": "support.Regression"},
        "data": {"_target_": "trainer.DataModule"},
        "trainer": {"run_dir": str(tmp_path), "accelerator": "cpu"},
        "mode": "find_lr",
    }
    with pytest.raises(ValueError, match="find_lr: there is no option 'step'; did you mean steps"):
        run({**cfg, "find_lr": {"step": 10}})
    with pytest.raises(ValueError, match="find_lr: max_lr=1e-09 is not above min_lr=1e-07"):
        run({**cfg, "find_lr": {"max_lr": 1e-9}})


def test_the_steepest_fall_is_found_before_the_minimum() -> None:
    rates = [10.0**n for n in range(-6, 4)]
    falls = [5.0, 5, 5, 4.9, 4.5, 2, 1, 0.9, 3, 9]
    assert steepest(rates, falls) == 5
    assert steepest(rates, list(range(10))) is None
    assert is_beyond(falls)
    assert not is_beyond(falls[:-1])
    assert smoothed([2.0, 2.0, 2.0]) == pytest.approx([2, 2, 2])
