"""Verification on real ranks: what is right passes, and each fault that is planted is named."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import Regression, TokenRegression, samples, sgd, weighted_samples, weights
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from trainer import DataModule, OptimizerSetup, Trainer, VerifyReport, distributed

pytestmark = pytest.mark.timeout(120)


def verify(
    task: Regression, run_dir: Path, train: Any = None, *, val: Any = None, **options: Any
) -> VerifyReport:
    train = samples(22) if train is None else train
    if not isinstance(train, DataLoader):
        options = {"global_batch_size": 8, **options}
    options = {"devices": 2, "max_epochs": 9, "accelerator": "cpu", "timeout_s": 10, **options}
    return Trainer(run_dir=str(run_dir), **options).verify(task, train=train, val=val, steps=6)


def generators() -> Any:
    numpy_state: Any = np.random.get_state()
    return random.getstate(), numpy_state[1].tolist(), torch.get_rng_state().tolist()


def assert_clean(report: VerifyReport) -> None:
    assert [check for check in report.checks if check.passed is not True] == [], str(report)
    assert {check.place for check in report.checks} == {1, 2, 3, 4, 5, 6, 7}


def assert_finds(report: VerifyReport, place: int, name: str, *words: str) -> None:
    """The first thing that failed is what was planted."""
    assert not report.passed, str(report)
    first = report.failed[0]
    assert (first.place, first.name) == (place, name), str(report)
    assert first.advice
    for word in words:
        assert word in first.found + first.advice, str(report)


class Noisy(Regression):
    """Draws from every generator while it trains."""

    def forward(self, batch: Any) -> Tensor:
        if not self.training:
            return super().forward(batch)
        noise = 0.01 * (random.random() + np.random.random_sample())
        return super().forward([nn.functional.dropout(batch[0], 0.1)]) + noise


def test_a_sound_task_passes_and_stays_as_it_is(tmp_path: Path) -> None:
    task, options = Noisy(), {"devices": 2, "global_batch_size": 8, "accelerator": "cpu"}
    task.net.eval()
    before = weights(task)
    trainer = Trainer(max_epochs=9, run_dir=str(tmp_path), **options)
    drawn = generators()
    report = trainer.verify(task, train=samples(22), steps=6)
    assert generators() == drawn
    assert (task.training, task.net.training) == (True, False)
    assert all(torch.equal(value, before[name]) for name, value in weights(task).items())
    assert all(p.grad is None for p in task.parameters())
    assert_clean(report)
    assert "verified: 14 checks passed" in str(report)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["verify.json", "verify.png"]
    found = json.loads((tmp_path / "verify.json").read_text())
    assert found["passed"]
    assert len(found["losses"]["2"]) == 6


def test_weighted_losses_of_a_loader_pass(tmp_path: Path) -> None:
    loader: DataLoader[Any] = DataLoader(
        weighted_samples([1, 2, 0, 3, 1, 1, 2, 4, 1, 1, 5]), batch_size=4
    )
    report = verify(TokenRegression(), tmp_path, loader, micro_batch_size=2)
    assert_clean(report)
    assert "4 = 2 in a micro-batch x 1 accumulated x 2 ranks" in str(report)
    assert "as SequentialSampler says" in str(report)  # a choice, not a fault


def test_reproducible_mode_has_equal_bits(tmp_path: Path) -> None:
    report = verify(Noisy(), tmp_path, reproducible=True, micro_batch_size=2, devices=4)
    assert_clean(report)
    assert "equal bits in 6 steps" in str(report)
    assert "the same bits as on one process" in str(report)
    assert "all-to-all" in str(report)


def test_compressed_gradients_and_a_search_for_unused_ones_are_expected(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    task = Regression().float()
    task.net.append(nn.Dropout(0.1))
    data = samples(22, torch.float32)
    options: dict[str, Any] = {"comm_hook": "fp16", "find_unused_parameters": True}
    options |= {"lr_scaling": "linear", "lr_reference_batch_size": 16}
    report = verify(task, tmp_path, data, **options)
    assert report.passed, str(report)
    printed = capfd.readouterr().out
    assert printed.count("learning rate: 0.1 x 0.5") == 1, "not once for each run"
    assert "note: dropout" not in printed, "both runs have one cut"
    assert "3 all-reduces of 78 B, as it should be for 108 B" in str(report)  # 27 x 2 + 4 + 5 x 4


class SameOrder(Sampler[int]):
    """Has no notion of an epoch."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(22, generator=torch.Generator().manual_seed(3)).tolist())

    def __len__(self) -> int:
        return 22


def test_a_sampler_that_ignores_the_epoch(tmp_path: Path) -> None:
    loader: DataLoader[Any] = DataLoader(samples(22), batch_size=8, sampler=SameOrder())
    report = verify(Regression(), tmp_path, loader)
    assert_finds(report, 1, "new order", "SameOrder ignores the epoch", "set_epoch")
    assert len(report.failed) == 1


class DrawnByRank(Regression):
    """Draws its weights when the fit starts, each rank by a seed of its own."""

    def on_fit_start(self) -> None:
        torch.manual_seed(self.run.rank)
        for layer in self.net:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()


def test_ranks_that_draw_other_weights(tmp_path: Path) -> None:
    report = verify(DrawnByRank(), tmp_path)
    assert_finds(report, 2, "initial weights", "rank 1", "net.0.weight", "on_fit_start")
    assert len(report.failed) == 1  # rank 0's weights are those of the single process


class SeededByRank(Noisy):
    def forward(self, batch: Any) -> Tensor:
        torch.manual_seed(self.run.rank)
        return super().forward(batch)


def test_a_forward_that_seeds_by_rank(tmp_path: Path) -> None:
    report = verify(SeededByRank(), tmp_path)
    assert_finds(report, 2, "random streams", "micro-batch 1 of step 1", "torch generator", "seed")


class Augmented(TensorDataset):
    """Moves its samples by a generator of its own, which nobody seeds."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + np.random.default_rng().random(), y


def test_a_dataset_that_draws_from_a_generator_of_its_own(tmp_path: Path) -> None:
    report = verify(Regression(), tmp_path, Augmented(*samples(22).tensors))
    assert_finds(report, 2, "random streams", "though their indices agree", "global generator")


class AroundDDP(Regression):
    """Trains a layer by itself, on what its own rank has seen."""

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        self.seen = batch[0]
        return super().loss(outputs, batch)

    def before_optimizer_step(self) -> None:
        self.net[0](self.seen).square().mean().backward()


def test_a_task_that_calls_its_own_layer_around_ddp(tmp_path: Path) -> None:
    report = verify(AroundDDP(), tmp_path)
    failed = {check.name: check for check in report.failed}
    assert set(failed) == {"loss curves", "equal weights", "same weights"}, str(report)
    assert "net.0.weight, net.0.bias" in failed["equal weights"].found
    assert "net.2" not in failed["equal weights"].found
    assert "hooks" in failed["equal weights"].advice


class Contrasting(Regression):
    """Compares each sample with the others of its micro-batch."""

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        return ((outputs - outputs.mean()) - (batch[1] - batch[1].mean())).square().mean()


def test_a_loss_that_depends_on_the_batch(tmp_path: Path) -> None:
    report = verify(Contrasting(), tmp_path)
    assert_finds(report, 4, "loss by parts", "global_loss = True", "WeightedLoss")
    assert len(report.failed) == 1


class Together(Contrasting):
    global_loss = True


def test_a_loss_over_the_global_batch_passes(tmp_path: Path) -> None:
    report = verify(Together(), tmp_path, global_batch_size=9, devices=3)
    assert report.passed, str(report)
    assert "the loss sees the whole global batch" in str(report)
    assert [check.name for check in report.checks if not check.passed] == ["random streams"]


class ScaledByRanks(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01 * self.run.world_size)


def test_a_learning_rate_that_depends_on_the_world_size(tmp_path: Path) -> None:
    report = verify(ScaledByRanks(), tmp_path)
    assert_finds(report, 3, "learning rate", "0.02 on rank 0 of 2", "0.01 on one process")
    assert {check.name for check in report.failed[1:]} == {"loss curves", "same weights"}
    assert "first FAIL above" in report.failed[1].advice


class OneRankOnly(Regression):
    def __init__(self) -> None:
        super().__init__(sgd)
        self.head = nn.Linear(1, 1).double()

    def forward(self, batch: Any) -> Tensor:
        outputs = super().forward(batch)
        return self.head(outputs[:, None])[:, 0] if self.run.rank == 0 else outputs


def test_a_layer_that_only_one_rank_uses(tmp_path: Path) -> None:
    report = verify(OneRankOnly(), tmp_path)
    assert_finds(report, 2, "layers", "head (rank 0 only)", "find_unused_parameters=true")
    curves = next(check for check in report.failed if check.place == 4)
    assert "the run on 2 processes failed: ValueError: no gradient for head.weight" in curves.found
    assert "rank 1, step 0" in str(report)  # the traceback
    assert [check.passed for check in report.checks if check.place > 4] == [None] * 3


class OnPlateau(Regression):
    """Its learning rate follows the validation."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return OptimizerSetup(optimizer, ReduceLROnPlateau(optimizer), monitor="val/loss")


def test_a_schedule_that_follows_the_validation(tmp_path: Path) -> None:
    assert_clean(verify(OnPlateau(), tmp_path, val=samples(5)))
    report = verify(OnPlateau(), tmp_path)
    assert_finds(report, 1, "set-up", "this fit has no validation: give validation data")
    assert_only_its_message(report)


def assert_only_its_message(report: VerifyReport) -> None:
    """What failed is said once, without general advice, and nothing is found beside it."""
    (failed,) = report.failed
    assert failed.found == "the run on 2 processes failed", str(report)
    assert failed.advice.startswith(("ValueError: ", "NotFiniteError: ", "SampleError: "))
    assert failed.advice.endswith("; the traceback is below")
    assert "one process fails too" not in failed.advice
    assert "\n" not in failed.advice


class Broken(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise OSError("no such file")
        return super().__getitem__(index)


def test_a_dataset_that_fails_in_a_loader_worker(tmp_path: Path) -> None:
    report = verify(Regression(), tmp_path, Broken(*samples(22).tensors), num_workers=1)
    assert_finds(report, 4, "loss curves", "SampleError: Broken[3] raised OSError: no such file")
    assert_only_its_message(report)
    assert "in __getitem__" in str(report)  # the traceback


class Infinite(Regression):
    def loss(self, outputs: Tensor, batch: Any) -> Any:
        return super().loss(outputs, batch) / 0


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    report = verify(Infinite(), tmp_path)
    assert_finds(report, 4, "loss curves", "became NaN or infinite first at step 1")
    assert_only_its_message(report)


class Hanging(Regression):
    def after_optimizer_step(self) -> None:
        if self.run.rank == 1 and self.run.step == 2:
            time.sleep(600)


def test_a_rank_that_hangs(tmp_path: Path) -> None:
    report = verify(Hanging(), tmp_path, timeout_s=2, start_timeout_s=60)
    assert_finds(report, 4, "loss curves", "rank 1 hangs in the optimizer's step")


class OwnShards(IterableDataset[Any]):
    def __init__(self, by_rank: bool) -> None:
        self.by_rank = by_rank

    def shard(self, rank: int, world_size: int) -> Iterator[Any]:
        step = world_size if self.by_rank else 1
        return iter(list(samples(22))[rank * self.by_rank :: step])

    def __iter__(self) -> Iterator[Any]:
        return iter(samples(22))


class ByRank(IterableDataset[Any]):
    """Shards itself behind the Trainer's back, which keeps a part of what it yields."""

    def __iter__(self) -> Iterator[Any]:
        return iter(list(samples(44))[distributed.rank() :: distributed.world_size()])


def test_streams(tmp_path: Path) -> None:
    report = verify(Regression(), tmp_path, OwnShards(by_rank=True))
    assert report.passed, str(report)
    assert "not compared: the stream shards itself" in str(report)
    report = verify(Regression(), tmp_path, OwnShards(by_rank=False))
    assert_finds(report, 1, "samples", "ranks 0 and 1 get the same samples", "shard")
    report = verify(Regression(), tmp_path, ByRank())
    assert_finds(report, 1, "samples", "other samples on 2 processes", "on every rank")


def test_it_starts_its_ranks_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match="start the program without a launcher"):
        verify(Regression(), tmp_path)


class Points(DataModule):
    def train_dataset(self) -> Any:
        return samples(22)


CONFIG = """\
defaults:
  - trainer: default
  - _self_
task:
  _target_: test_verify.${which}
data:
  _target_: test_verify.Points
trainer: {global_batch_size: 8, max_steps: 4, run_dir: made, accelerator: cpu}
mode: verify
which: ???
"""
PROGRAM = """\
from trainer import hydra_main, run
@hydra_main(".", "app")
def main(cfg):
    run(cfg)
main()
"""


def program(folder: Path, which: str) -> subprocess.CompletedProcess[str]:
    (folder / "app.yaml").write_text(CONFIG)
    (folder / "program.py").write_text(PROGRAM)
    tests = Path(__file__).parents[1]
    return subprocess.run(
        [sys.executable, "program.py", f"which={which}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{tests.parent}:{tests}:{tests / 'distributed'}"},
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_the_command_line_prints_the_report_and_ends_with_its_verdict(tmp_path: Path) -> None:
    done = program(tmp_path, "Regression")
    assert done.returncode == 0, done.stderr
    assert "4 steps of 8 samples" in done.stdout
    assert "verified: 1" in done.stdout.splitlines()[-1]
    assert {path.name for path in (tmp_path / "made").iterdir()} == {
        ".hydra",
        "verify.json",
        "verify.png",
    }
    done = program(tmp_path, "ScaledByRanks")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "look first at 3 learning rate" in done.stdout.splitlines()[-1]
