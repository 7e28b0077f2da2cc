"""The GAN recipe: the same run on one process and on two, with a picture to look at."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from matplotlib.image import imread

from recipes.mnist import MnistData
from recipes.mnist_gan import MnistGan, SaveSamples
from trainer import Trainer

REPOSITORY = Path(__file__).parents[2]
SMALL = {
    "max_steps": 4,
    "log_every_n_steps": 2,
    "global_batch_size": 32,
    "micro_batch_size": 8,
    "eval_batch_size": 32,
    "limit_val_batches": 4,
    "num_threads": 1,
    "reproducible": True,
}
BATCH = torch.arange(2 * 784).remainder(256).byte().view(2, 28, 28), torch.tensor([3, 5])


def events(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_two_ranks_make_the_run_of_one(tmp_path: Path) -> None:
    options = [f"trainer.{name}={value}" for name, value in SMALL.items()]
    command = [sys.executable, "-m", "recipes.mnist_gan", "task.width=4", *options]
    command += ["trainer.devices=2", f"trainer.run_dir={tmp_path / '2'}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    trainer = Trainer(**SMALL, run_dir=str(tmp_path / "1"), callbacks=SaveSamples())
    trainer.fit(MnistGan(width=4), MnistData())

    alone, both = events(tmp_path / "1"), events(tmp_path / "2")
    assert [event["step"] for event in both] == [event["step"] for event in alone]
    for name in ("train/loss/critic", "train/loss/generator", "val/distance"):
        found = [[event[name] for event in run if name in event] for run in (both, alone)]
        assert found[0] == found[1] != [], name
    pictures = [imread(tmp_path / run / "samples/step-00000004.png") for run in "12"]
    assert pictures[0].shape[0] == 8 * 28
    assert (pictures[0] == pictures[1]).all()


def test_the_losses_are_those_of_the_paper() -> None:
    task = MnistGan(width=4)
    logits = {"drawn": torch.tensor([[0.5], [-1.0]]), "real": torch.tensor([[2.0], [0.0]])}
    probability = {name: values.sigmoid() for name, values in logits.items()}
    critic = -(probability["real"].log().mean() + (1 - probability["drawn"]).log().mean()) / 2
    torch.testing.assert_close(task.loss(logits, BATCH), critic)
    task.run = replace(task.run, turn="generator")
    torch.testing.assert_close(task.loss(logits, BATCH), -probability["drawn"].log().mean())
    task.run = replace(task.run, split="val")
    assert task.loss(logits, BATCH) is None
