"""What happens to gradients between the last backward and the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from trainer.step import StepModule

# Below this share of the planned weight a step counts as one of weight 0: the resolution of the
# float32 in which the ranks add up their weights.
NO_WEIGHT = 1e-6


class Gradients:
    """Checks and corrects the gradients of one wrapped module.

    Built anew whenever the module is wrapped, for it remembers which parameters are trained.
    """

    def __init__(self, step_module: StepModule, may_miss: bool) -> None:
        """Note the parameters.

        Args:
            step_module: What is wrapped; its ``extra_weight`` has as gradient the relative
                difference between the true and the planned weight of the global batch.
            may_miss: Whether parameters may go without a gradient (``find_unused_parameters``).
        """
        task = step_module.task
        self._step_module = step_module
        self._named = [(name, p) for name, p in task.named_parameters() if p.requires_grad]
        self._trained = [p for _, p in self._named]
        self._frozen = [p for p in task.parameters() if not p.requires_grad]
        self._may_miss = may_miss

    def check(self) -> None:
        """Refuse to step if a parameter has no gradient, or was frozen or thawed in mid-run.

        Raises:
            ValueError: Naming the parameters and what to do.
        """
        if not self._may_miss and any(p.grad is None for p in self._trained):
            self._explain_missing()
        if self._frozen and any(p.requires_grad for p in self._frozen):
            raise ValueError(
                "requires_grad of a parameter changed from False to True in mid-run, so its "
                "gradient was not reduced over the ranks; change requires_grad in "
                "TaskModule.on_epoch_start only"
            )

    def correct(self, loss_scale: float) -> bool:
        """Make gradients over the planned weight into gradients over the true weight, in place.

        Args:
            loss_scale: The factor by which ``extra_weight``'s gradient is still scaled.

        Returns:
            Whether the global batch has any weight; if not, there is nothing to step on.

        Raises:
            ValueError: If there is weight, but too little to be told from none.
        """
        extra = self._step_module.extra_weight.grad
        if extra is None:
            return True
        true_over_planned = 1 + extra / loss_scale
        # A look at a number on an accelerator waits for it, so it is taken only where the sum may
        # be 0: a rank with weight of its own knows that it is not.
        if extra.device.type == "cpu" or not self._step_module.has_weight:
            ratio = float(true_over_planned)
            if ratio < NO_WEIGHT:
                if self._step_module.has_weight:
                    self._explain_small_weight()
                return False
            if ratio == 1:
                return True
        grads = [p.grad for p in self._trained if p.grad is not None]
        torch._foreach_mul_(grads, 1 / true_over_planned)
        return True

    def clip(self, max_norm: float | None) -> None:
        """Scale gradients down so that their global L2 norm is at most ``max_norm``."""
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self._trained, max_norm)

    def clear(self) -> None:
        """Forget all gradients, for the next step."""
        for parameter in self._trained:
            parameter.grad = None
        self._step_module.extra_weight.grad = None

    def _explain_small_weight(self) -> None:
        raise ValueError(
            f"the weights of the losses of a global batch add up to less than {NO_WEIGHT:g} per "
            "sample, which is too small to be told from 0; multiply total and weight of every "
            "WeightedLoss by the same number, so that a sample weighs about 1"
        )

    def _explain_missing(self) -> None:
        frozen = [name for name, p in self._named if not p.requires_grad]
        if frozen:
            raise ValueError(
                f"requires_grad of {_listed(frozen)} changed from True to False in mid-run; change "
                "requires_grad in TaskModule.on_epoch_start only"
            )
        missing = [name for name, p in self._named if p.grad is None]
        raise ValueError(
            f"no gradient for {_listed(missing)}: the loss does not depend on them in this step. "
            "Use them in forward or loss, set requires_grad=False for good, or allow it with "
            "find_unused_parameters=true"
        )


def trained_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the parameters that require a gradient."""
    return tuple(name for name, p in module.named_parameters() if p.requires_grad)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more parameters"
