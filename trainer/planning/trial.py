"""A fit that is only tried: it writes and keeps nothing, and the task is as it was afterwards."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from trainer.config import CheckpointConfig, TrainerConfig
from trainer.optimizing.turns import Turn
from trainer.task import TaskModule


def quiet(config: TrainerConfig, **changes: Any) -> TrainerConfig:
    """Return the options of a fit, without what would leave something behind or take time."""
    return replace(
        config,
        resume=None,
        accept_changes=[],
        fast_dev_run=True,  # no checkpoints; the limits that go with it are set elsewhere
        num_sanity_val_steps=0,
        detect_anomaly=False,
        profile=None,
        statistics=[],
        bucket_cap_mb=None if config.bucket_cap_mb == "auto" else config.bucket_cap_mb,
        checkpoint=CheckpointConfig(),
        **changes,
    )


@contextmanager
def unchanged(task: TaskModule) -> Iterator[None]:
    """Give ``task`` its own weights, buffers, modes and ``requires_grad`` back afterwards."""
    # On the host, so that it takes no memory of a device that is to be measured.
    kept = {
        name: value.cpu().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in task.state_dict().items()
    }
    others = [  # no state_dict has them
        (module._buffers, name, copy.deepcopy(module._buffers[name]))
        for module in task.modules()
        for name in module._non_persistent_buffers_set
    ]
    modes = [(module, module.training) for module in task.modules()]
    trained = [(parameter, parameter.requires_grad) for parameter in task.parameters()]
    try:
        yield
    finally:
        task.load_state_dict(kept)
        for buffers, name, value in others:
            buffers[name] = value
        for module, training in modes:
            module.training = training
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)
            parameter.grad = None


@contextmanager
def optimizers_unchanged(turns: Sequence[Turn]) -> Iterator[None]:
    """Give optimizers, which may be older than the trial, their rates and state back afterwards."""
    kept = [(turn.optimizer, copy.deepcopy(turn.optimizer.state_dict())) for turn in turns]
    try:
        yield
    finally:
        for optimizer, state in kept:
            optimizer.load_state_dict(state)
