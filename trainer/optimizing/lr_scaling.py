"""A learning rate that follows the global batch: what the optimizer steps with.

A task states its learning rate for a *reference* batch size, and so does its schedule: parameter
groups hold those values all the time, except during the optimizer's step. So a scheduler of any
kind, a hook that sets a rate and a checkpoint see nothing but unscaled values, and what a step
uses is a function of them and of the step's number alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from trainer.config import TrainerConfig


@dataclass(frozen=True)
class LRScaling:
    """How hyperparameters change with ``k = global_batch_size / reference_batch_size``.

    - ``linear`` (Goyal et al. 2017, arXiv:1706.02677, for SGD): ``lr * k``.
    - ``sqrt`` (Malladi et al. 2022, arXiv:2205.10287, for Adam and RMSprop): ``lr * sqrt(k)``,
      ``1 - k * (1 - beta)`` and ``eps / sqrt(k)``. A group without betas (RMSprop: ``alpha``) and
      eps has its lr scaled alone.

    Attributes:
        rule: ``none``, ``linear`` or ``sqrt``.
        global_batch_size: Samples per step.
        reference_batch_size: The number of samples that the task's learning rate is meant for.
        warmup_steps: Steps in which a larger rate rises, linearly, from the unscaled one.
    """

    rule: str = "none"
    global_batch_size: int = 1
    reference_batch_size: int = 1
    warmup_steps: int = 0

    @classmethod
    def of(cls, config: TrainerConfig, global_batch_size: int | None) -> LRScaling:
        """Return what ``config`` asks for.

        Args:
            config: The options.
            global_batch_size: Of the training data; None if every batch has its own size.

        Raises:
            ValueError: If there is a rule, but not one batch size to go by.
        """
        reference = config.lr_reference_batch_size
        if config.lr_scaling == "none" or reference is None:
            return cls()
        if global_batch_size is None:
            raise ValueError(
                f"lr_scaling={config.lr_scaling} with a DataLoader whose batches have no fixed "
                "size: there is no global batch size for the learning rate to follow; give the "
                "loader a batch_size, or set lr_scaling=none"
            )
        return cls(config.lr_scaling, global_batch_size, reference, config.lr_warmup_steps)

    @cached_property
    def k(self) -> float:
        """How many times the reference the global batch is."""
        return self.global_batch_size / self.reference_batch_size

    @cached_property
    def full_factor(self) -> float:
        """What the learning rate is multiplied by after the warm-up."""
        return math.sqrt(self.k) if self.rule == "sqrt" else self.k

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied by in the step after ``step`` others."""
        full = self.full_factor
        if full > 1 and step < self.warmup_steps:
            return 1 + (full - 1) * step / self.warmup_steps
        return full

    @contextmanager
    def applied(self, optimizer: torch.optim.Optimizer, step: int) -> Iterator[None]:
        """Let the parameter groups hold scaled values inside this context.

        Raises:
            ValueError: If a schedule has moved a beta to where it cannot be scaled.
        """
        if self.k == 1:
            yield
            return
        kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
        try:
            for group in optimizer.param_groups:
                scaled = self._scaled(group, self.factor(step))
                kept.append((group, {name: group[name] for name in scaled}))
                group.update(scaled)
            yield
        finally:
            for group, values in kept:
                group.update(values)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse at the start what cannot be scaled.

        Raises:
            ValueError: If a group has no learning rate, or a beta would not be above 0.
        """
        if self.k == 1:
            return
        for number, group in enumerate(optimizer.param_groups):
            if group.get("lr") is None:
                raise ValueError(
                    f"lr_scaling={self.rule}: parameter group {number} of the "
                    f"{type(optimizer).__name__} has no lr to scale; use an optimizer with an lr, "
                    "or set lr_scaling=none"
                )
            scaled = self._scaled(group, 1.0)
            if "betas" in scaled and "base_momentum" in group:  # a schedule moves beta1 down to it
                self._beta(group["base_momentum"])

    def describe(self, optimizer: torch.optim.Optimizer, is_scheduled: bool) -> str:
        """Return one line for the start of a run."""
        groups, full = optimizer.param_groups, self.full_factor
        # With a schedule, the rate that it was built around: its peak, or what it started from.
        names = ("max_lr", "initial_lr", "lr")
        rates = _distinct([float(next(g[name] for name in names if name in g)) for g in groups])
        line = "learning rate and its schedule: " if is_scheduled else "learning rate: "
        line += ", ".join(f"{rate:.4g} x {full:.4g} = {rate * full:.4g}" for rate in rates)
        line += (
            f" ({self.rule}: global_batch_size {self.global_batch_size} / "
            f"reference {self.reference_batch_size})"
        )
        if self.warmup_steps and full > 1:
            start = "the unscaled one" if is_scheduled else ", ".join(f"{r:.4g}" for r in rates)
            line += f", rising from {start} over the first {self.warmup_steps} steps"
        scaled = [(group, self._scaled(group, full)) for group in groups]
        for name in ("betas", "alpha", "eps"):
            changes = [f"{_show(g[name])} -> {_show(s[name])}" for g, s in scaled if name in s]
            if changes:
                line += f"; {name} " + ", ".join(_distinct(changes))
        return line

    def _scaled(self, group: dict[str, Any], factor: float) -> dict[str, Any]:
        scaled: dict[str, Any] = {"lr": group["lr"] * factor}
        if self.rule == "sqrt" and isinstance(group.get("eps"), int | float):
            if "betas" in group:
                scaled["betas"] = tuple(self._beta(beta) for beta in group["betas"])
            elif "alpha" in group:
                scaled["alpha"] = self._beta(group["alpha"])
            if len(scaled) > 1:
                scaled["eps"] = group["eps"] / math.sqrt(self.k)
        return scaled

    def _beta(self, beta: Any) -> Any:
        scaled = 1 - self.k * (1 - beta)
        if scaled <= 0:
            most, reference = 1 / (1 - beta), self.reference_batch_size
            raise ValueError(
                f"lr_scaling=sqrt with global_batch_size {self.global_batch_size} and "
                f"lr_reference_batch_size={reference}: k = {self.k:.4g}, and a beta of "
                f"{float(beta):.4g} would become 1 - k (1 - beta) = {float(scaled):.4g}, which "
                f"must be above 0. Keep k below {most:.4g}: a global batch below "
                f"{reference * most:.4g}, a learning rate that was tuned for a larger reference, "
                "or a beta nearer to 1; lr_scaling=linear leaves betas alone"
            )
        return scaled


def _show(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_show, value))})"
    return f"{float(value):.4g}"


def _distinct(values: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
