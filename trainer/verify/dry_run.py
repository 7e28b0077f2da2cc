"""One micro-batch through a copy of the task, outside of any wrapper: what it uses, what it gives.

A layer that only one rank uses makes DDP wait for a gradient that never comes. Here it is seen
before DDP is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from trainer.contract import weigh
from trainer.global_loss import TaskLoss
from trainer.logbook import Logbook
from trainer.precision import Precision
from trainer.task import TaskModule, WeightedLoss
from trainer.verify.record import BatchDependence, LayersUsed, relative


class Trial(NamedTuple):
    """One micro-batch: on the task's device (None for none), its samples, and those of the step."""

    batch: Any
    num_samples: int
    global_size: int


def layers_used(task: TaskModule, trial: Trial, precision: Precision) -> LayersUsed | None:
    """Return what forward, loss and backward use; None without samples, or of weight 0.

    Every rank calls it: a loss over the whole global batch takes a collective.

    Args:
        task: A copy, which is changed.
        trial: What it is called with.
        precision: For autocast.
    """
    called: list[str] = []
    for name, module in task.named_modules():
        if name:
            module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
    value, _ = _loss(task, trial, precision, needs_grad=trial.batch is not None)
    if trial.batch is None or value is None:
        return None
    trained = {name: p for name, p in task.named_parameters() if p.requires_grad}
    value.backward()  # type: ignore[no-untyped-call]
    with_grad = [name for name, p in trained.items() if p.grad is not None]
    return LayersUsed(
        list(dict.fromkeys(called)), with_grad, [n for n in trained if n not in with_grad]
    )


def batch_dependence(
    task: TaskModule, trials: list[Trial], precision: Precision, seed: Callable[[], None]
) -> BatchDependence | None:
    """Return the loss of a micro-batch and that of its halves together, without dropout.

    Args:
        task: A copy, which is changed.
        trials: The micro-batch, and its two halves.
        precision: For autocast.
        seed: Puts the random generators where a forward starts.

    Returns:
        None if a loss is missing, not finite, or random even in eval mode.
    """
    task.eval()
    with torch.no_grad():
        seed()
        whole = _mean(task, trials[:1], precision)
        again = _mean(task, trials[:1], precision)
        halves = _mean(task, trials[1:], precision)
    if whole is None or again is None or halves is None or relative(again, whole) > 1e-6:
        return None
    return BatchDependence(whole, halves)


def _mean(task: TaskModule, trials: list[Trial], precision: Precision) -> float | None:
    total = total_weight = 0.0
    for trial in trials:
        value, weight = _loss(task, trial, precision, needs_grad=False)
        if value is not None:
            total += float(value) * weight
            total_weight += weight
    return total / total_weight if total_weight else None


def _loss(
    task: TaskModule, trial: Trial, precision: Precision, needs_grad: bool
) -> tuple[torch.Tensor | None, float]:
    """Return the mean loss and its weight."""
    batch, num_samples, global_size = trial
    with precision.autocast():
        outputs = None if batch is None else task(batch)
        found = TaskLoss(task, Logbook())(outputs, batch, num_samples, global_size)
    value, weight = weigh(found, num_samples, needs_grad)
    if value is not None and isinstance(found, WeightedLoss):
        value = value / weight
    return value, weight
