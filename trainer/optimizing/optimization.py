"""The user's optimizer and learning rate schedule, on the clock of the run."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from trainer import distributed
from trainer.optimizing.lr_scaling import LRScaling
from trainer.state import OnTheClock
from trainer.task import OptimizerSetup, TaskModule

INTERVALS = ("step", "epoch")


class Schedule:
    """Steps the learning rate scheduler when its interval says so.

    Attributes:
        setup: The optimizer and its scheduler.
        rates: The learning rate of each parameter group in the step that was done last.
    """

    def __init__(self, setup: OptimizerSetup, scaling: LRScaling, clock: OnTheClock) -> None:
        """Note what makes up the learning rate.

        Args:
            setup: The optimizer and its scheduler.
            scaling: What the optimizer steps with, in place of what its groups hold.
            clock: Tells the step.
        """
        self.setup = setup
        self._scaling = scaling
        self._clock = clock
        self._optimizer = setup.optimizer
        self._scheduler = setup.scheduler
        self._monitor = setup.monitor
        self._interval = None if setup.monitor else setup.interval or "step"
        self._note_rates()

    def check_monitor(self, validates: bool) -> None:
        """Refuse a schedule that follows a metric which no validation will measure.

        Raises:
            ValueError: If there is a monitor and ``validates`` is False.
        """
        if self._monitor is not None and not validates:
            raise ValueError(
                f"the scheduler monitors {self._monitor!r}, but this fit has no validation: give "
                "validation data and validate_every_n_epochs or validate_every_n_steps"
            )

    def scaled(self) -> AbstractContextManager[None]:
        """Return the context for the optimizer's step: there its groups hold scaled values."""
        return self._scaling.applied(self._optimizer, self._clock.step)

    def after_step(self) -> None:
        """Note the rates that were used, and advance a schedule by steps."""
        self._note_rates()
        self._advance("step")

    def after_epoch(self) -> None:
        """Advance a schedule by epochs."""
        self._advance("epoch")

    def after_validation(self, metrics: Mapping[str, float]) -> None:
        """Advance a schedule that follows a metric.

        Raises:
            ValueError: If nobody measures that metric.
        """
        if self._scheduler is None or self._monitor is None:
            return
        if self._monitor not in metrics:
            raise ValueError(
                f"the scheduler monitors {self._monitor!r}, which the validation does not measure; "
                f"it measures: {', '.join(sorted(metrics)) or 'nothing'}"
            )
        self._scheduler.step(metrics[self._monitor])

    def named_rates(self, name: str) -> dict[str, float]:
        """Return ``{name: rate}``, or one entry ``name/<group>`` per group if there are several."""
        groups = self._optimizer.param_groups
        if len(groups) == 1:
            return {name: float(self.rates[0])}
        names = [f"{name}/{group.get('name', number)}" for number, group in enumerate(groups)]
        return dict(zip(names, map(float, self.rates), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return the rates that were used last, and the scheduler's state, if there is one."""
        scheduler = {} if self._scheduler is None else dict(self._scheduler.state_dict())
        return {"rates": self.rates, "scheduler": scheduler}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""
        self.rates = state["rates"]
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])

    def advance_to(self, step: int, epoch: int) -> None:
        """Bring a schedule that has not been used to where a run stands.

        One that follows a metric stays as it is: nobody knows what it would have seen.
        """
        for _ in range({"step": step, "epoch": epoch, None: 0}[self._interval]):
            self._advance(str(self._interval))
        self._note_rates()

    def _note_rates(self) -> None:
        factor = self._scaling.factor(self._clock.step)
        # A product is a copy, also where the rate is a tensor that the scheduler fills anew.
        self.rates = [group["lr"] * factor for group in self._optimizer.param_groups]

    def _advance(self, interval: str) -> None:
        if self._scheduler is None or self._interval != interval:
            return
        with warnings.catch_warnings():
            # Torch warns if the optimizer has not stepped yet, as after an fp16 overflow in the
            # first step. The clock counts such a step too, and the user can do nothing about it.
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*optimizer.step.*")
            self._scheduler.step()


def configure_optimizers(task: TaskModule, scaling: LRScaling) -> dict[str | None, Schedule]:
    """Ask the task for its optimizers and check the answer.

    Args:
        task: Gives the optimizers and the clock.
        scaling: How the learning rate follows the global batch; rank 0 prints what comes of it.

    Returns:
        Each with its schedule, by its name; None is the name of one that is not in a mapping.

    Raises:
        ValueError: If there is something that is no optimizer or `OptimizerSetup`, an optimizer
            that the loop cannot step, an inconsistent setup, or nothing that ``scaling`` could
            scale.
    """
    found: Any = task.configure_optimizers()
    if not isinstance(found, Mapping):
        return {None: _schedule(task, found, scaling)}
    if not found or not all(isinstance(name, str) and name for name in found):
        raise ValueError(
            f"configure_optimizers returned a mapping with the keys {list(found)}; they are the "
            "optimizers' names: give at least one, each as text, or return the only optimizer"
        )
    schedules: dict[str | None, Schedule] = {
        name: _schedule(task, each, scaling) for name, each in found.items()
    }
    if len({id(schedule.setup.optimizer) for schedule in schedules.values()}) < len(schedules):
        raise ValueError(
            f"configure_optimizers returned the same optimizer under several names "
            f"({', '.join(found)}); each turn needs one of its own"
        )
    return schedules


def _schedule(task: TaskModule, found: Any, scaling: LRScaling) -> Schedule:
    """Check one optimizer, with its schedule if there is one."""
    setup = found if isinstance(found, OptimizerSetup) else OptimizerSetup(found)
    if not isinstance(setup.optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"configure_optimizers returned a {type(found).__name__}; it must return a "
            "torch.optim.Optimizer or OptimizerSetup(optimizer, scheduler)"
        )
    try:
        inspect.signature(type(setup.optimizer).step).bind(setup.optimizer)
    except TypeError:
        raise ValueError(
            f"configure_optimizers returned {type(setup.optimizer).__name__}, whose step needs a "
            "closure that computes the loss several times per step; the Trainer computes it once: "
            "use an optimizer whose step() works without (AdamW, SGD, ...)"
        ) from None
    _check_schedule(setup)
    own = {id(p) for p in task.parameters()}
    foreign = sum(id(p) not in own for g in setup.optimizer.param_groups for p in g["params"])
    if foreign:
        raise ValueError(
            f"{foreign} parameters of the optimizer are not parameters of "
            f"{type(task).__name__}, so their gradients would not be reduced over the ranks; build "
            "the optimizer in configure_optimizers from self.parameters()"
        )
    scaling.check(setup.optimizer)
    if scaling.rule != "none" and distributed.rank() == 0:
        print(scaling.describe(setup.optimizer, setup.scheduler is not None), flush=True)
    return Schedule(setup, scaling, task.run)


def is_plain_update(task: TaskModule, optimizer: torch.optim.Optimizer) -> bool:
    """Whether nothing acts in an update but the step of one of torch's own optimizers.

    That draws no random numbers, and nobody else reads the gradients.
    """
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    return (
        type(optimizer).__module__.startswith("torch.optim.")
        and not any(hooks)
        and not task._acts_in_update
    )


def _check_schedule(setup: OptimizerSetup) -> None:
    scheduler, monitor = setup.scheduler, setup.monitor
    if setup.interval not in (None, *INTERVALS):
        raise ValueError(
            f"OptimizerSetup(interval={setup.interval!r}): it must be 'step' or 'epoch'"
        )
    if scheduler is None:
        if monitor is not None:
            raise ValueError(
                f"OptimizerSetup(monitor={monitor!r}) without a scheduler; leave monitor out or "
                "give the scheduler that follows it"
            )
        return
    if getattr(scheduler, "optimizer", setup.optimizer) is not setup.optimizer:
        raise ValueError(
            f"OptimizerSetup(...): the {type(scheduler).__name__} was built for another optimizer, "
            "so it would change nothing; build it from the optimizer that is given with it"
        )
    if isinstance(scheduler, ReduceLROnPlateau) and monitor is None:
        raise ValueError(
            "ReduceLROnPlateau needs a metric: give OptimizerSetup(..., monitor='val/loss')"
        )
    if monitor is not None and type(scheduler).step is LRScheduler.step:
        raise ValueError(
            f"OptimizerSetup(monitor={monitor!r}): a {type(scheduler).__name__} follows no metric, "
            "it counts steps or epochs; leave monitor out"
        )
    if monitor is not None and setup.interval is not None:
        raise ValueError(
            f"OptimizerSetup(interval={setup.interval!r}, monitor={monitor!r}): a scheduler that "
            "follows a metric advances after each validation; leave interval out"
        )
