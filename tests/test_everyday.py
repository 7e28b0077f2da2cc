"""What people do between two runs: try everything once, overfit, freeze, look for a NaN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import Regression, assert_equal_bits, fit_on, samples, train_by_hand, weights
from torch import Tensor

from trainer import OptimizerSetup
from trainer.callbacks import LearningRate

pytestmark = pytest.mark.timeout(60)

both = pytest.mark.parametrize("world_size", [1, 2])


class Noted(Regression):
    """Notes how often it computes, by split."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        with (self.folder / f"{self.run.split}-{self.run.rank}").open("a") as file:
            file.write(f"{len(outputs)}\n")
        return super().loss(outputs, batch)


@both
def test_a_fast_run_does_everything_once_and_leaves_nothing(
    world_size: int, tmp_path: Path
) -> None:
    run_dir, noted = tmp_path / "run", tmp_path / "noted"
    noted.mkdir()
    task = Noted(noted)
    before = weights(task)
    data = {"train": samples(40), "val": samples(40), "test": samples(40), "test_best": True}
    options = {"global_batch_size": 4, "max_epochs": 3, "fast_dev_run": True, "callbacks": None}
    found = fit_on(world_size, task, run_dir, logger=None, **data, **options)
    assert (found.step, found.samples, found.last_checkpoint) == (1, 4, None)
    assert {"train/loss", "val/loss", "test/loss"} <= set(found.metrics)
    for rank in range(world_size):
        for split in ("train", "val", "test"):
            sizes = (noted / f"{split}-{rank}").read_text().split()
            assert sizes == [str(4 // world_size)]
    assert list(run_dir.iterdir()) == []
    assert any(not torch.equal(weights(task)[name], old) for name, old in before.items())


@both
def test_one_batch_is_learned_by_heart(world_size: int, tmp_path: Path) -> None:
    task, expected = Regression(), Regression()
    options = {"global_batch_size": 8, "max_steps": 30, "overfit_batches": 1, "shuffle": True}
    options["checkpoint"] = {"every_n_epochs": None}
    fit_on(world_size, task, tmp_path, train=samples(40), **options)
    first = torch.utils.data.Subset(samples(40), range(8))
    train_by_hand(expected, first, global_batch_size=8, epochs=30)
    torch.testing.assert_close(weights(task), weights(expected), rtol=1e-9, atol=1e-9)


class Broken(Regression):
    """Takes a root of which the gradient is no number, in the third step of one rank."""

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        loss = super().loss(outputs, batch)
        if self.run.step == 2 and self.run.rank == self.run.world_size - 1:
            loss = loss + 0 * (0 * outputs.sum()).sqrt()
        return loss


def test_a_rank_with_a_gradient_that_is_no_number_names_the_operation(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"global_batch_size": 4, "max_steps": 4, "detect_anomaly": True}
    with pytest.raises(Exception, match="SqrtBackward0"):
        fit_on(2, Broken(), tmp_path, train=samples(16), **options)
    assert "(0 * outputs.sum()).sqrt()" in capfd.readouterr().err


class Thawing(Regression):
    """Trains its head alone for an epoch, with rates of their own for both."""

    def on_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.run.epoch > 0)

    def configure_optimizers(self) -> OptimizerSetup:
        groups = [
            {"params": self.net[0].parameters(), "lr": 0.01, "name": "body"},
            {"params": self.net[2].parameters(), "name": "head"},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        halve = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return OptimizerSetup(optimizer, halve, interval="epoch")


@both
def test_a_frozen_body_stays_until_it_is_thawed(world_size: int, tmp_path: Path) -> None:
    options = {"train": samples(16), "global_batch_size": 8, "callbacks": [LearningRate()]}
    options["log_every_n_steps"] = 1
    task = Thawing()
    before = weights(task)
    found = fit_on(world_size, task, tmp_path / "1", max_epochs=1, **options)
    assert_equal_bits(weights(task.net[0]), weights(Thawing().net[0]))
    assert not torch.equal(task.net[2].weight, before["net.2.weight"])
    assert found.metrics["train/lr/body"] == 0.01
    assert found.metrics["train/lr/head"] == 0.1
    thawed = Thawing()
    found = fit_on(world_size, thawed, tmp_path / "2", max_epochs=2, **options)
    assert found.metrics["train/lr/body"] == 0.005
    assert not torch.equal(thawed.net[0].weight, before["net.0.weight"])
