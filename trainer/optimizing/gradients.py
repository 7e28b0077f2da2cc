"""What happens to gradients between the last backward and the optimizer's step."""

from __future__ import annotations

import torch
from torch import nn

from trainer.messages import listed
from trainer.optimizing.optimization import is_plain_update
from trainer.optimizing.statistics import Statistics
from trainer.step import StepModule

# Below this share of the planned weight a step counts as one of weight 0: the resolution of the
# float32 in which the ranks add up their weights.
NO_WEIGHT = 1e-6


class Gradients:
    """Checks and corrects the gradients of one wrapped module.

    Built anew whenever the module is wrapped, for it remembers which parameters are trained.

    Attributes:
        update_is_plain: Whether the update is nothing but the step of one of torch's optimizers.
    """

    def __init__(
        self,
        step_module: StepModule,
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None,
        may_miss: bool,
        statistics: Statistics | None = None,
    ) -> None:
        """Note whose gradients these are, and who reads them.

        Args:
            step_module: What is wrapped; its ``extra_weight`` has as gradient the relative
                difference between the true and the planned weight of the global batch.
            optimizer: Steps on them.
            clip_norm: The largest global L2 norm; None for any.
            may_miss: Whether parameters may go without a gradient (the strategy's
                ``may_miss_gradients``).
            statistics: Look at the gradients, and at what comes of them.
        """
        task = step_module.task
        self.update_is_plain = is_plain_update(task, optimizer)
        self._step_module = step_module
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._statistics = statistics
        self._named = dict(task.named_parameters())
        self._trained = [p for p in self._named.values() if p.requires_grad]
        self._frozen = [p for p in self._named.values() if not p.requires_grad]
        self._required = [p.requires_grad for p in self._named.values()]
        self._may_miss = may_miss
        self._one = torch.ones_like(step_module.extra_weight, requires_grad=False)
        # Its kernel divides them on its way, which saves a pass over all of them.
        is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        self._divides_in_update = is_fused and self.update_is_plain and clip_norm is None

    def check(self) -> None:
        """Refuse to step if a parameter has no gradient, or was frozen or thawed in mid-run.

        Raises:
            ValueError: Naming the parameters and what to do.
        """
        if [p.requires_grad for p in self._named.values()] != self._required:
            was_frozen = [p for p in self._trained if not p.requires_grad]
            was_thawed = [p for p in self._frozen if p.requires_grad]
            old, new = (True, False) if was_frozen else (False, True)
            raise ValueError(
                f"requires_grad of {self._names(was_frozen or was_thawed)} changed from {old} to "
                f"{new} in mid-run, which the reduction of gradients over the ranks cannot follow; "
                "change requires_grad in TaskModule.on_epoch_start only"
            )
        missing = [] if self._may_miss else [p for p in self._trained if p.grad is None]
        if missing:
            raise ValueError(
                f"no gradient for {self._names(missing)}: the loss does not depend on them in this "
                "step. Use them in forward or loss, set requires_grad=False for good, or allow it "
                "with find_unused_parameters=true"
            )

    def correct(self, scaler: torch.amp.GradScaler) -> bool:
        """Unscale gradients, and make those over the planned into those over the true weight.

        Args:
            scaler: What scaled the loss. It must see the gradients before they are corrected: it
                would take an error in the weight for an overflow.

        Returns:
            Whether the global batch has any weight; if not, there is nothing to step on.

        Raises:
            ValueError: If there is weight, but too little to be told from none, and that can be
                read without waiting for an accelerator. Where it cannot, gradients become NaN, so
                that the run ends at its next log event or checkpoint.
        """
        extra = self._step_module.extra_weight.grad
        ratio: torch.Tensor | None = None  # of the true to the planned weight
        if extra is not None:
            ratio = 1 + extra / scaler.scale(self._one)
            has_weight = self._step_module.has_weight
            # A rank with weight of its own knows that the sum is not 0, so it need not wait.
            if has_weight and _is_slow_to_read(ratio):
                ratio = torch.where(ratio < NO_WEIGHT, torch.nan, ratio)
            elif (number := float(ratio)) < NO_WEIGHT:
                if has_weight:
                    self._explain_small_weight()
                return False
            elif number == 1:
                ratio = None
        scaler.unscale_(self._optimizer)
        if ratio is not None:
            if self._divides_in_update and not scaler.is_enabled():
                self._optimizer.grad_scale = ratio  # type: ignore[attr-defined]
            else:
                grads = [p.grad for p in self._trained if p.grad is not None]
                torch._foreach_div_(grads, ratio)
        return True

    def clip(self) -> None:
        """Scale the optimizer's gradients so that their global L2 norm is at most ``clip_norm``."""
        if self._statistics is not None:
            self._statistics.before_update()
        if self._clip_norm is not None:
            groups = self._optimizer.param_groups
            parameters = [p for group in groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self._clip_norm)

    def clear(self) -> None:
        """Forget all gradients and their weights, for the next step."""
        if self._statistics is not None:
            self._statistics.after_update()
        vars(self._optimizer).pop("grad_scale", None)
        for parameter in self._trained:
            parameter.grad = None
        self._step_module.extra_weight.grad = None
        self._step_module.has_weight = False

    def _explain_small_weight(self) -> None:
        raise ValueError(
            f"the weights of the losses of a global batch add up to less than {NO_WEIGHT:g} of "
            "what samples weighed in the first micro-batch of the run, which is too small to be "
            "told from 0; let the weights of WeightedLoss vary less"
        )

    def _names(self, parameters: list[nn.Parameter]) -> str:
        wanted = {id(p) for p in parameters}
        return listed([name for name, p in self._named.items() if id(p) in wanted])


def trained_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters that require a gradient.

    Raises:
        ValueError: If there is none.
    """
    names = tuple(name for name, p in module.named_parameters() if p.requires_grad)
    if not names:
        raise ValueError(
            f"no parameter of {type(module).__name__} requires a gradient, so there is nothing to "
            "train; check requires_grad, and that the layers are attributes of the task"
        )
    return names


def _is_slow_to_read(number: torch.Tensor) -> bool:
    return number.device.type != "cpu"
