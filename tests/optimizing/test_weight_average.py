"""An average of the weights: reckoned by hand, evaluated, saved, and gone on with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    Regression,
    assert_equal_bits,
    assert_same,
    fit,
    fit_on,
    on_ranks,
    samples,
    weights,
)
from torch import Tensor, nn

from trainer import Trainer, distributed, load_weights
from trainer.config import TrainerConfig

DATA: dict[str, Any] = {"train": samples(10), "global_batch_size": 4}
Weights = dict[str, Tensor]


class Kept(Regression):
    """Keeps its weights after each step, and what each validation saw; its last layer is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.net[2]
        self.norm = nn.BatchNorm1d(3).double()
        self.steps: list[Weights] = []
        self.validated: list[Weights] = []

    def forward(self, batch: Any) -> Tensor:
        return super().forward((self.norm(batch[0]), batch[1]))

    def after_optimizer_step(self) -> None:
        self.steps.append(weights(self))

    def on_validation_end(self, metrics: Mapping[str, float]) -> None:
        self.validated.append(weights(self))


def moving(steps: list[Weights], decay: float) -> Weights:
    average = dict(steps[0])
    for count, new in enumerate(steps[1:], start=1):
        kept = min(decay, (1 + count) / (10 + count))
        for name in floats(new):
            average[name] = kept * average[name] + (1 - kept) * new[name]
        average |= {name: value for name, value in new.items() if name not in floats(new)}
    return average


def mean(steps: list[Weights]) -> Weights:
    average = dict(steps[-1])
    for name in floats(average):
        average[name] = torch.stack([step[name] for step in steps]).mean(dim=0)
    return average


def floats(found: Weights) -> list[str]:
    return [name for name, value in found.items() if value.is_floating_point()]


EXPECTED = {  # of 4 epochs of 3 steps
    "ema": ({"weight_average_decay": 0.3}, lambda steps: moving(steps, 0.3)),
    "ema from epoch 2": (
        {"weight_average_decay": 0.3, "weight_average_start_epoch": 2},
        lambda steps: moving(steps[6:], 0.3),
    ),
    "swa": ({}, lambda steps: mean(steps[2::3])),
    "swa from epoch 1": ({"weight_average_start_epoch": 1}, lambda steps: mean(steps[5::3])),
}


@pytest.mark.parametrize("case", EXPECTED)
def test_the_average_comes_out_of_a_fit(case: str, tmp_path: Path) -> None:
    options, average = EXPECTED[case]
    task, untouched = Kept(), Kept()
    options = {**options, "weight_average": case[:3]}
    result = fit(
        task,
        tmp_path / "a",
        max_epochs=4,
        val=samples(7),
        test=samples(5),
        **DATA,
        **options,
        test_best=True,
    )
    fit(untouched, tmp_path / "b", max_epochs=4, **DATA)
    assert_equal_bits(task.steps[-1], weights(untouched))  # it changes nothing in the training
    expected = average(task.steps)
    assert_same(weights(task), expected)
    assert_same(task.validated[-1], expected)
    saved = Kept()
    load_weights(saved, result.last_checkpoint or "")
    assert_equal_bits(weights(saved), weights(task))
    options = {"accelerator": "cpu", "run_dir": str(tmp_path / "c"), "global_batch_size": 4}
    again = Trainer(**options).validate(task, val=samples(7))
    assert again["val/loss"] == result.metrics["val/loss"]


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_a_resumed_run_goes_on_with_the_average(kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"weight_average": kind, "val": samples(7), **DATA}
    whole, part, rest = Kept(), Kept(), Kept()
    fit(whole, tmp_path / "whole", max_epochs=4, **options)
    fit(part, tmp_path / "parts", max_steps=7, **options)
    fit(rest, tmp_path / "parts", max_epochs=4, resume="last", **options)
    assert_equal_bits(rest.steps[-1], whole.steps[-1])
    assert_equal_bits(weights(rest), weights(whole))


class Normalized(Regression):
    """Has BatchNorm, whose statistics are those of the micro-batches of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3).double()

    def forward(self, batch: Any) -> Tensor:
        return super().forward((self.norm(batch[0]), batch[1]))


def statistics(run_dir: Path) -> tuple[Weights, Weights, float]:
    task = Normalized()
    options = {"weight_average": "ema", "max_epochs": 2, "val": samples(6)}
    result = fit(task, run_dir, devices=2, train=samples(8), global_batch_size=4, **options)
    last = result.metrics["val/loss"] if result else 0.0
    distributed.wait_for_first_rank()  # a fit in ranks that are there already does not
    saved = Normalized()
    load_weights(saved, run_dir / "checkpoints" / "last")
    return weights(task), weights(saved), last


def test_ranks_leave_with_the_statistics_that_were_saved(tmp_path: Path) -> None:
    [first, second] = on_ranks(2, statistics, tmp_path)
    assert_equal_bits(first[0], first[1])
    assert_equal_bits(second[0], first[0])
    task = Normalized()
    task.load_state_dict(first[0])
    options = {"accelerator": "cpu", "run_dir": str(tmp_path / "c"), "global_batch_size": 4}
    found = Trainer(**options).validate(task, val=samples(6))
    assert found["val/loss"] == pytest.approx(first[2], rel=1e-12)


def test_ranks_have_the_average_of_one_process(tmp_path: Path) -> None:
    options = {**DATA, "micro_batch_size": 1, "max_epochs": 2, "reproducible": True}
    tasks = [Regression(), Regression()]
    for world_size, task in enumerate(tasks, start=1):
        fit_on(world_size, task, tmp_path / str(world_size), weight_average="ema", **options)
    assert_equal_bits(*map(weights, tasks))


class Replaced(Kept):
    """Has a buffer that is a new tensor after each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, batch: Any) -> Tensor:
        if self.training:
            self.seen = self.seen + batch[0].sum()
            self.net[0].weight.data = self.net[0].weight.data.clone()
        return super().forward(batch)


def test_buffers_that_are_replaced_are_averaged_too(tmp_path: Path) -> None:
    whole, part, rest = Replaced(), Replaced(), Replaced()
    options: dict[str, Any] = {"weight_average": "ema", **DATA}
    fit(whole, tmp_path / "whole", max_epochs=2, **options)
    fit(part, tmp_path / "parts", max_steps=4, **options)
    fit(rest, tmp_path / "parts", max_epochs=2, resume="last", **options)
    assert_same(weights(whole), moving(whole.steps, 0.999))
    assert_equal_bits(weights(rest), weights(whole))


def test_a_run_that_wants_no_average_goes_on_from_the_trained_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, part, rest = Kept(), Kept(), Kept()
    fit(whole, tmp_path / "whole", max_steps=5, **DATA)
    fit(part, tmp_path / "parts", max_steps=3, weight_average="ema", **DATA)
    assert not torch.equal(weights(part)["net.0.weight"], part.steps[-1]["net.0.weight"])
    fit(rest, tmp_path / "parts", max_steps=5, resume="last", **DATA)
    assert_equal_bits(weights(rest), weights(whole))
    assert "resume: weight_average was ema, so that average is" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weight_average": "swa", "max_steps": 2}, "swa has averaged nothing: epoch 0 has not en"),
        (
            {"weight_average": "ema", "weight_average_start_epoch": 1, "max_epochs": 1},
            "weight_average=ema has averaged nothing: epoch 1 has not begun",
        ),
    ],
)
def test_it_is_said_if_nothing_was_averaged(
    options: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = Kept()
    fit(task, tmp_path, **DATA, **options)
    assert_equal_bits(weights(task), task.steps[-1])
    assert words in capsys.readouterr().out


def test_another_kind_of_average_starts_anew(tmp_path: Path) -> None:
    fit(Kept(), tmp_path, max_epochs=2, weight_average="ema", **DATA)
    task = Kept()
    fit(task, tmp_path, max_epochs=4, weight_average="swa", resume="last", **DATA)
    assert_same(weights(task), mean(task.steps[2::3]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_average": "sma"}, "weight_average='sma' is not allowed.*ema, swa"),
        ({"weight_average_decay": 0.9}, "weight_average_decay=0.9 with weight_average=null has no"),
        (
            {"weight_average": "swa", "weight_average_decay": 0.9},
            "decay=0.9 with weight_average='swa' has no effect; set weight_average=ema",
        ),
        ({"weight_average_start_epoch": 2}, "set weight_average=ema or swa"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainerConfig.from_options(options)
