"""The same LightningModule trained by Lightning's Trainer and by ours."""

from __future__ import annotations

import copy
import functools
import logging
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as lightning
import torch
from support import assert_equal_bits, weights
from torch import Tensor

from trainer import Trainer
from trainer.seeding import Stream, seed_everything, seed_generators, stream_key

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


DATA = ("datamodule", "dataloaders", "train_dataloaders", "val_dataloaders", "ckpt_path")


class Trained(NamedTuple):
    """What a training leaves behind."""

    module: Any
    losses: list[Tensor]
    metrics: dict[str, float]
    weights: dict[str, Tensor]


class SameRandomNumbers(lightning.Callback):
    """Has Lightning's steps draw what ours draw."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        seed_generators(stream_key(0, Stream.FORWARD, self.step, 0))
        self.step += 1

    def __init__(self) -> None:
        self.step = 0


def recorded(module: Any) -> list[Tensor]:
    """Have ``module`` note the losses of its training steps."""
    losses: list[Tensor] = []
    step = module.training_step

    @functools.wraps(step)
    def training_step(*args: Any) -> Any:
        outputs = step(*args)
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        losses.append(loss.detach().clone())
        return outputs

    module.training_step = training_step
    return losses


def theirs(module: Any, data: dict[str, Any], **options: Any) -> Trained:
    """Train by Lightning's Trainer."""
    losses = recorded(module)
    seed_everything(0)
    trainer = run_theirs("fit", module, callbacks=[SameRandomNumbers()], **data, **options)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    del module.training_step
    return Trained(module, losses, metrics, weights(module))


def run_theirs(what: str, module: Any, **options: Any) -> Any:
    """Run a Trainer of Lightning, which warns of many things; return it."""
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    given = {name: options.pop(name) for name in list(options) if name in DATA}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            **{**quiet, "accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0, **options}
        )
        trainer.results = getattr(trainer, what)(module, **given)
    return trainer


def ours(module: Any, data: dict[str, Any], run_dir: Path, **options: Any) -> Trained:
    """Train by our Trainer."""
    losses = recorded(module)
    result = trainer(run_dir, **options).fit(module, **data)
    del module.training_step
    return Trained(module, losses, result.metrics, weights(module))


def trainer(run_dir: Path, **options: Any) -> Trainer:
    quiet: dict[str, Any] = {"callbacks": False, "logger": False, "accelerator": "cpu"}
    return Trainer(**{**quiet, "timeout_s": 30, "run_dir": str(run_dir), **options})


def assert_trains_alike(
    module: Any, data: dict[str, Any], run_dir: Path, **options: Any
) -> tuple[Trained, Trained]:
    """Train copies of a module side by side; every loss and weight must have the same bits.

    Returns:
        What ours and theirs left behind.
    """
    their_module, their_data = copy.deepcopy((module, data))
    left = ours(module, data, run_dir, **options)
    right = theirs(their_module, their_data, **options)
    assert len(left.losses) == len(right.losses) > 0
    assert_equal_bits(left.losses, right.losses)
    assert_equal_bits(left.weights, right.weights)
    return left, right


def plain(values: Any) -> Any:
    """Tensors as numbers, also nested."""
    return torch.utils._pytree.tree_map(
        lambda leaf: leaf.tolist() if isinstance(leaf, Tensor) else leaf, values
    )
