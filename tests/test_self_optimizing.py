"""Tasks that run backward and step their optimizers themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import Regression, assert_equal_bits, assert_same, fit, fit_on, samples, weights
from torch import Tensor, nn

from trainer import Callback, OptimizerSetup, TaskModule, distributed
from trainer.checkpoint.writer import read_state


class ByItself(TaskModule):
    """What a `Regression` does in a step, done by hand, twice with half of the rate."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizes_itself = True
        self.net = Regression().net

    def forward(self, batch: Any) -> Tensor:
        result: Tensor = self.net(batch[0]).squeeze(1)
        return result

    def configure_optimizers(self) -> Any:
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        return self.optimizer

    def optimize(self, batch: Any, num_samples: int, global_size: int) -> None:
        for _ in range(2):
            loss = nn.functional.mse_loss(self(batch), batch[1])
            self.optimizer.zero_grad()
            (loss * num_samples / global_size).backward()
            for parameter in self.net.parameters():
                distributed.all_reduce_sum(parameter.grad)
            self.optimizer.step()
        self.log("mine", loss)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(outputs, batch[1])


def by_hand() -> dict[str, Tensor]:
    task = ByItself()
    task.configure_optimizers()
    x, y = samples(12).tensors
    for start in (0, 4, 8):
        task.optimize((x[start : start + 4], y[start : start + 4]), 4, 4)
    return weights(task)


OPTIONS: dict[str, Any] = {"train": samples(12), "global_batch_size": 4}


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_trains_as_by_hand(world_size: int, tmp_path: Path) -> None:
    task = ByItself()
    options = {**OPTIONS, "drop_last": True, "val": samples(4), "max_epochs": 1}
    result = fit_on(world_size, task, tmp_path, **options)
    assert_same(weights(task), by_hand())
    assert result.step == 3
    assert {"train/mine", "val/loss"} <= result.metrics.keys()
    assert result.last_checkpoint is not None
    assert read_state(result.last_checkpoint)["optimizer"]["state"]


def test_a_resumed_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, part, rest = ByItself(), ByItself(), ByItself()
    fit(whole, tmp_path / "whole", max_steps=5, **OPTIONS)
    fit(part, tmp_path / "parts", max_steps=2, **OPTIONS)
    fit(rest, tmp_path / "parts", max_steps=5, resume="last", **OPTIONS)
    assert_equal_bits(rest, whole)
    assert "nothing was trained" not in capsys.readouterr().out


class Halving(ByItself):
    """Has a schedule."""

    def configure_optimizers(self) -> OptimizerSetup:
        optimizer = super().configure_optimizers()
        return OptimizerSetup(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))


def test_its_schedule_advances_once_in_a_step(tmp_path: Path) -> None:
    task = Halving()
    fit(task, tmp_path, max_steps=3, **OPTIONS)
    assert task.optimizer.param_groups[0]["lr"] == 0.05 / 2**3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_clip_norm": 1.0}, "gradient_clip_norm=1.0 with ByItself, which optimizes its"),
        ({"precision": "fp16"}, "precision='fp16' with ByItself"),
        ({"lr_scaling": "linear", "lr_reference_batch_size": 2}, "lr_scaling='linear' with ByIt"),
        ({"comm_hook": "bf16"}, "comm_hook='bf16' with"),
        ({"statistics": ["gradients"]}, "statistics=.*gradients.* with ByItself"),
        ({"reproducible": True, "micro_batch_size": 4}, "reproducible=true with ByItself"),
        ({"micro_batch_size": 2}, r"ByItself optimizes itself, .*micro_batch_size=null \(now 2\)"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        fit(ByItself(), tmp_path, max_steps=1, **OPTIONS, **options)


def test_every_rank_needs_a_sample(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"every rank needs a sample.*2 ranks set drop_last=true"):
        fit_on(2, ByItself(), tmp_path, max_steps=1, train=samples(5), global_batch_size=4)


class Ending(Regression):
    """Measures something at the end of each epoch, and of the run."""

    def on_epoch_end(self) -> dict[str, float]:
        assert self.run.run_dir is not None
        return {"epochs": float(self.run.epoch)}

    def on_fit_end(self) -> dict[str, float]:
        return {"steps": float(self.run.step)}


class Clock(Callback):
    """Notes the time that a callback sees."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_log(self, run: Any, metrics: dict[str, float]) -> None:
        self.seen.append(run.time_s)


def test_what_is_measured_at_an_end_is_written_once_also_after_a_resume(tmp_path: Path) -> None:
    clock = Clock()
    options: dict[str, Any] = {**OPTIONS, "logger": None, "callbacks": [clock]}
    fit(Ending(), tmp_path, max_epochs=1, **options)
    fit(Ending(), tmp_path, max_epochs=2, resume="last", **options)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [line.count('"epochs"') for line in lines].count(1) == 2
    assert '"steps": 6.0' in lines[-1]
    assert 0 < clock.seen[0] < clock.seen[-1]
