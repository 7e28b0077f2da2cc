"""Manual optimization: a module that runs backward and steps its optimizers itself.

``self.manual_backward`` averages the gradients over the ranks at once, so that whatever reads them
next (clipping, an optimizer, the user) finds those of the global batch. A sum of gradients that
were averaged before and those of this backward is averaged like the latter alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer import distributed

if TYPE_CHECKING:
    from trainer.lightning.module import LightningTask


class ManualOptimization:
    """What ``self.manual_backward`` and ``optimizer.step`` of such a module do.

    Attributes:
        share: By what this rank's loss is scaled, so that the mean over the ranks is the mean over
            the samples; 1 where all ranks have as many.
    """

    def __init__(self, task: LightningTask) -> None:
        self.share = 1.0
        self._task = task
        self._inside = False
        self._guards: list[Any] = []
        if distributed.world_size() > 1:
            self._guards = [
                parameter.register_post_accumulate_grad_hook(self._check)  # type: ignore[no-untyped-call]
                for parameter in task.parameters()
                if parameter.requires_grad
            ]

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward, and average the gradients over the ranks."""
        self._task.calls.hook("on_before_backward", loss)
        self._inside = True
        try:
            loss = loss if self.share == 1 else loss * self.share
            loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self._inside = False
        if distributed.world_size() > 1:
            average_gradients([p for p in self._task.parameters() if p.requires_grad])
        self._task.calls.hook("on_after_backward")

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Step an optimizer, whose closure may compute the gradients."""

        def compute() -> Any:
            result = closure()
            self._task.calls.hook("on_before_optimizer_step", optimizer)
            return result

        return optimizer.step(compute, **kwargs)

    def close(self) -> None:
        """Let go of the parameters."""
        for guard in self._guards:
            guard.remove()
        self._guards.clear()

    def _check(self, parameter: torch.Tensor) -> None:
        if not self._inside:
            name = type(self._task.module).__name__
            raise ValueError(
                f"{name}.training_step called backward on a loss, and its gradients would differ "
                "on the ranks; call self.manual_backward(loss)"
            )


def average_gradients(parameters: list[nn.Parameter]) -> None:
    """Make gradients their mean over the ranks; None stays where no rank has one.

    Args:
        parameters: The same ones on every rank.
    """
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for own in by_dtype.values():
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in own]
        there = parts[0].new_tensor([float(p.grad is not None) for p in own])
        flat = torch.cat([there, *(part.reshape(-1) for part in parts)])
        distributed.all_reduce_sum(flat)
        counts = flat[: len(own)].tolist()
        flat /= distributed.world_size()
        start = len(own)
        for parameter, part, count in zip(own, parts, counts, strict=True):
            end = start + part.numel()
            if count:
                parameter.grad = flat[start:end].view_as(part).clone()
            start = end


class Clipping:
    """What ``self.clip_gradients`` works with."""

    def clip_gradients(self, optimizer: Any, clip_val: float | None, algorithm: Any) -> None:
        """Clip the gradients of an optimizer by norm or by value, as Lightning names it."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not clip_val or clip_val <= 0:
            return
        if str(getattr(algorithm, "value", algorithm)) == "value":
            nn.utils.clip_grad_value_(parameters, clip_val)
        else:
            nn.utils.clip_grad_norm_(parameters, clip_val)
