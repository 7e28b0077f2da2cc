"""Whether a task is, and returns, what the contract of `TaskModule` says."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from trainer.task import RunFacts, TaskModule, WeightedLoss

CONTRACT = tuple(
    name
    for name in vars(TaskModule)
    if not name.startswith("_")
    and name not in ("run", "global_loss", "optimizes_itself", "forward")
)

WRITE = {
    "loss": "loss(self, outputs, batch), which returns the mean loss over the batch's samples",
    "optimize": "optimize(self, batch, num_samples, global_size), which does a step, as "
    "optimizes_itself says",
    "configure_optimizers": "configure_optimizers(self), which returns an optimizer over "
    "self.parameters()",
}


def check_contract(task: nn.Module, to_fit: bool = False) -> None:
    """Refuse a task that lacks a method, or in which an attribute hides one of the contract.

    Args:
        task: What the user gave.
        to_fit: Whether it is to be trained, which takes a loss and an optimizer.

    Raises:
        ValueError: If ``task`` is not a `TaskModule`, is incomplete or has such an attribute.
    """
    name = type(task).__name__
    if not isinstance(task, TaskModule):
        raise ValueError(
            f"the task is a {name}; it must be a trainer.TaskModule: subclass it "
            "and define forward(batch), loss(outputs, batch) and configure_optimizers()"
        )
    if task._speaks_for_another:
        return  # checked when it was made, by other rules
    missing = [
        method
        for method in ("optimize" if task.optimizes_itself else "loss", "configure_optimizers")
        if getattr(type(task), method) is getattr(TaskModule, method)
    ]
    if "loss" in missing and hasattr(task, "training_step"):
        raise ValueError(
            f"{name} defines training_step, which nothing calls here, and no loss. Let "
            "forward(self, batch) return the outputs for a whole batch (inputs and targets, as the "
            "data yields it), and loss(self, outputs, batch) the mean loss over its samples; "
            "validation and test use the same two"
        )
    if to_fit and missing:
        raise ValueError(
            f"{name} does not define {' and '.join(WRITE[method] for method in missing)}, which it "
            "takes to train"
        )
    hidden = set(vars(task)) | set(task._modules) | set(task._parameters) | set(task._buffers)
    for name in (*CONTRACT, "forward"):
        if name in hidden:
            raise ValueError(
                f"{type(task).__name__} has an attribute {name!r}, which hides the method "
                f"TaskModule.{name}; give the attribute another name (self.{name}_fn, say) and "
                f"keep {name} for the method"
            )
    if not isinstance(task.global_loss, bool):
        raise ValueError(
            f"{type(task).__name__}.global_loss is a {type(task.global_loss).__name__}; it is "
            "True or False: whether loss(outputs, batch) gets the whole global batch"
        )
    if "run" in hidden and not isinstance(task.run, RunFacts):
        raise ValueError(
            f"{type(task).__name__} sets self.run, which the Trainer uses for the facts of the run "
            "(self.run.step, ...); give the attribute another name"
        )


def weigh(loss: Any, num_samples: int, needs_grad: bool) -> tuple[torch.Tensor | None, float]:
    """Check what ``TaskModule.loss`` returned and find its weight.

    Returns:
        The loss (a mean, or the total of a `WeightedLoss`) and its weight; ``(None, 0)`` if the
        weight is 0, whatever the loss is then. To read a weight on an accelerator waits for it.

    Raises:
        ValueError: If ``loss`` is not a scalar tensor, a `WeightedLoss` or None, or if it needs no
            gradient although ``needs_grad``.
    """
    if loss is None:
        return None, 0.0
    value, weight = loss, float(num_samples)
    if isinstance(loss, WeightedLoss):
        value, given = loss
        if isinstance(given, torch.Tensor) and given.dim() != 0:
            raise ValueError(
                f"loss returned a WeightedLoss whose weight has shape {tuple(given.shape)}; "
                "it must be a number or a scalar tensor: sum it"
            )
        weight = float(given)
        if not 0 <= weight < math.inf:
            raise ValueError(
                f"loss returned a WeightedLoss with weight {weight}; a weight is finite and at "
                "least 0"
            )
        if weight == 0:
            return None, 0.0
    if not isinstance(value, torch.Tensor):
        raise ValueError(
            f"loss returned {_named(value)}; it must return a scalar tensor (the mean over the "
            "samples), a WeightedLoss(total, weight), or None to skip this micro-batch"
        )
    if value.dim() != 0:
        raise ValueError(
            f"loss returned a tensor of shape {tuple(value.shape)}; it must be a scalar: take the "
            "mean over the samples, or return WeightedLoss(total, weight) for another weighting"
        )
    if needs_grad and not value.requires_grad:
        raise ValueError(
            "loss returned a tensor that needs no gradient, so there is nothing to train; check "
            "for detach(), item() or no_grad() on the way, and that parameters require gradients"
        )
    return value, weight


def _named(value: Any) -> str:
    return f"a {type(value).__name__} ({value!r:.60})"
