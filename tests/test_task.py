"""The contract of a task."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import Regression, fit, on_ranks, samples, train_by_hand
from torch import nn

from trainer import TaskModule, Trainer
from trainer.contract import CONTRACT, check_contract
from trainer.loggers.jsonl import JsonlLogger
from trainer.task import RunFacts, first_dimension


def test_a_task_trains_without_a_trainer() -> None:
    task = Regression()
    before = task.net[0].weight.clone()
    task.log("anything", 1.0)
    train_by_hand(task, samples(8), global_batch_size=4)
    assert not torch.equal(task.net[0].weight, before)
    assert (task.run.step, task.run.world_size, task.run.split) == (0, 1, "train")


def test_a_complete_task_is_accepted() -> None:
    check_contract(Regression())


@pytest.mark.parametrize("name", [*CONTRACT, "forward"])
@pytest.mark.parametrize("value", [nn.Linear(1, 1), lambda: None])
def test_an_attribute_that_hides_a_method_is_refused(name: str, value: Any) -> None:
    task = Regression()
    setattr(task, name, value)
    with pytest.raises(ValueError, match=rf"attribute '{name}'.*hides.*self\.{name}_fn"):
        check_contract(task)


def test_a_buffer_hides_a_method_too() -> None:
    task = Regression()
    task._buffers["predict"] = torch.ones(1)
    with pytest.raises(ValueError, match="'predict'"):
        check_contract(task)


def test_the_contract_is_what_the_class_defines() -> None:
    assert {"loss", "configure_optimizers", "log", "on_epoch_start", "batch_size"} <= set(CONTRACT)


def test_an_own_run_attribute_is_refused() -> None:
    task = Regression()
    task.run = "first try"  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"sets self\.run"):
        check_contract(task)
    task.run = RunFacts(rank=1)
    check_contract(task)


def test_another_module_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the task is a Linear; .*trainer\.TaskModule"):
        Trainer(max_steps=1).fit(nn.Linear(1, 1), train=samples(4))  # type: ignore[arg-type]


def test_what_is_missing_to_train_is_said_before_the_launch() -> None:
    class Half(TaskModule):
        def forward(self, batch: Any) -> Any:
            return batch

    class WithLoss(Half):
        def loss(self, outputs: Any, batch: Any) -> Any:
            return outputs.mean()

    check_contract(Half())  # enough to predict
    check_contract(WithLoss())
    with pytest.raises(ValueError, match=r"Half does not .*loss\(self.*configure_optimizers\(self"):
        Trainer(max_steps=1).fit(Half(), train=samples(4))
    with pytest.raises(ValueError, match=r"does not define configure_optimizers\(self\), which"):
        check_contract(WithLoss(), to_fit=True)


def test_a_task_in_the_style_of_lightning_is_told_what_to_write() -> None:
    class Habit(TaskModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return 0

    with pytest.raises(ValueError, match=r"Habit defines training_step, .* loss\(self, outputs, b"):
        check_contract(Habit())


@pytest.mark.parametrize(
    ("method", "arguments"), [("forward", 1), ("loss", 2), ("configure_optimizers", 0)]
)
def test_a_missing_method_is_named(method: str, arguments: int) -> None:
    class Empty(TaskModule):
        pass

    with pytest.raises(NotImplementedError, match=f"Empty must define {method}"):
        getattr(Empty(), method)(*[None] * arguments)


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(5, 2),
        (torch.zeros(5), torch.zeros(3)),
        {"name": "x", "scalar": torch.tensor(1), "tokens": [torch.zeros(5, 1)]},
        SimpleNamespace(tokens=torch.zeros(5)),
    ],
)
def test_the_samples_of_a_batch_are_its_first_tensors_first_dimension(batch: Any) -> None:
    assert first_dimension(batch) == 5


def test_a_batch_without_tensors_needs_its_own_count() -> None:
    with pytest.raises(ValueError, match=r"of type dict.*define batch_size"):
        first_dimension({"names": ["a", "b"]})


def test_what_a_task_measures_at_an_end_is_logged(tmp_path: Path) -> None:
    class Measuring(Regression):
        def on_epoch_end(self) -> dict[str, float]:
            return {"own/epoch": float(self.run.epoch), "own/draw": float(torch.rand(()))}

        def on_fit_end(self) -> dict[str, float]:
            return {"own/end": float(self.run.step)}

    def run() -> Any:
        result = fit(
            Measuring(),
            tmp_path / "run",
            train=samples(6),
            max_epochs=2,
            global_batch_size=4,
            devices=2,
            logger=[JsonlLogger()],
        )
        return result.metrics

    metrics, _ = on_ranks(2, run)
    assert (metrics["own/epoch"], metrics["own/end"]) == (2, 4)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found = [event for event in map(json.loads, lines) if "own/epoch" in event]
    assert [(event["step"], event["own/epoch"]) for event in found] == [(2, 1), (4, 2)]
    assert found[0]["own/draw"] != found[1]["own/draw"]
