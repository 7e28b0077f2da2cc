"""What ``configure_optimizers`` of a LightningModule may return, as the Trainer takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainer.task import OptimizerSetup

if TYPE_CHECKING:
    from trainer.lightning.module import LightningTask

_FORMS = (
    "an optimizer, a list of them, two lists (optimizers, schedulers), a dict with 'optimizer' "
    "and 'lr_scheduler', or a list of such dicts"
)


@dataclass
class ScheduleConfig:
    """A learning rate scheduler and when it advances; the fields are Lightning's."""

    scheduler: Any
    name: str | None = None
    interval: str = "epoch"
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        """Refuse what Lightning would not take."""
        self.reduce_on_plateau |= isinstance(self.scheduler, ReduceLROnPlateau)
        if self.interval not in ("step", "epoch"):
            raise ValueError(
                f"configure_optimizers: interval={self.interval!r} of a scheduler; it must be "
                "'step' or 'epoch'"
            )
        if self.frequency < 1:
            raise ValueError(
                f"configure_optimizers: frequency={self.frequency} of a scheduler; it must be at "
                "least 1"
            )
        if self.reduce_on_plateau and self.monitor is None:
            raise ValueError(
                f"configure_optimizers: {type(self.scheduler).__name__} without 'monitor', the "
                "name of the metric that it follows"
            )


class Optimization:
    """The optimizers of a LightningModule and their schedulers.

    Attributes:
        optimizers: In the module's order.
        schedulers: Likewise.
    """

    def __init__(self, task: LightningTask, found: Any) -> None:
        """Take apart what ``configure_optimizers`` returned.

        Raises:
            ValueError: If it is none of the forms that Lightning takes.
        """
        self._task = task
        self.optimizers, given, monitor = _taken_apart(found)
        for optimizer in self.optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise ValueError(
                    f"configure_optimizers returned a {type(optimizer).__name__} in place of an "
                    "optimizer, which it takes to train"
                )
        self.schedulers = [_config(scheduler, monitor) for scheduler in given]
        for config in self.schedulers:
            if getattr(config.scheduler, "optimizer", None) not in (None, *self.optimizers):
                raise ValueError(
                    f"configure_optimizers: the {type(config.scheduler).__name__} was built for an "
                    "optimizer that is not returned with it"
                )
        self._own: Schedulers | None = None

    def setup(self) -> Any:
        """Return what the Trainer steps.

        Raises:
            ValueError: If there are several optimizers, and the module leaves it to the Trainer
                to step them.
        """
        if len(self.optimizers) > 1:
            raise ValueError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers; to use several, "
                "set self.automatic_optimization = False and step them in training_step"
            )
        (optimizer,) = self.optimizers
        if not self.schedulers:
            return OptimizerSetup(optimizer)
        config = self.schedulers[0]
        is_plain = len(self.schedulers) == 1 and config.frequency == 1
        is_plain &= not config.reduce_on_plateau
        if is_plain and not self._task.calls.defines("lr_scheduler_step"):
            return OptimizerSetup(optimizer, config.scheduler, interval=config.interval)
        self._own = Schedulers(self._task, optimizer, self.schedulers)
        return OptimizerSetup(optimizer, self._own, interval="step")

    def manual_setup(self) -> Any:
        """Return what the Trainer saves of a module that steps its optimizers itself."""
        found = {}
        for number, optimizer in enumerate(self.optimizers):
            own = [
                c for c in self.schedulers if getattr(c.scheduler, "optimizer", None) is optimizer
            ]
            kept = Schedulers(self._task, optimizer, own, by_hand=True) if own else None
            found[str(number)] = OptimizerSetup(optimizer, kept, interval="step")
        return found["0"] if len(found) == 1 else found

    def end_epoch(self, metrics: Mapping[str, torch.Tensor]) -> None:
        """Advance what goes by epochs, unless the loop does."""
        if self._own is not None:
            self._own.end_epoch(metrics)


class Schedulers:
    """Several schedulers of one optimizer, or one that is not stepped each time.

    The loop calls ``step`` after every step. What goes by epochs, or follows a metric, advances at
    the end of an epoch.
    """

    def __init__(
        self,
        task: LightningTask,
        optimizer: torch.optim.Optimizer,
        configs: list[ScheduleConfig],
        by_hand: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self._task = task
        self._configs = configs
        self._schedulers = [config.scheduler for config in configs]
        self._by_hand = by_hand  # the module steps them

    def step(self) -> None:
        """Advance what goes by steps; ``frequency`` counts those of the epoch."""
        facts, count = self._task.facts, self._task.run.step_in_epoch + 1
        due = [c for c in self._configs if c.interval == "step" and count % c.frequency == 0]
        if any(config.reduce_on_plateau for config in due) and not self._by_hand:
            facts.note(self._task.log_book.latest.reduce())
        self._advance("step", count, facts.callback_metrics)

    def end_epoch(self, metrics: Mapping[str, torch.Tensor]) -> None:
        """Advance what goes by epochs."""
        self._advance("epoch", self._task.facts.current_epoch + 1, metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all."""
        return {"_schedulers": [scheduler.state_dict() for scheduler in self._schedulers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""
        for scheduler, own in zip(self._schedulers, state["_schedulers"], strict=True):
            scheduler.load_state_dict(own)

    def _advance(self, interval: str, count: int, metrics: Mapping[str, torch.Tensor]) -> None:
        for config in () if self._by_hand else self._configs:
            if config.interval != interval or count % config.frequency:
                continue
            value: Any = None
            if config.reduce_on_plateau:
                if config.monitor not in metrics:
                    if not config.strict:
                        continue
                    raise ValueError(
                        f"the {type(config.scheduler).__name__} follows {config.monitor!r}, which "
                        f"was not logged; there are: {', '.join(sorted(metrics)) or 'none'}"
                    )
                value = metrics[str(config.monitor)]
            if self._task.calls.defines("lr_scheduler_step"):
                self._task.calls.hook("lr_scheduler_step", config.scheduler, value)
            elif value is None:
                config.scheduler.step()
            else:
                config.scheduler.step(value)


def _taken_apart(found: Any) -> tuple[list[torch.optim.Optimizer], Sequence[Any], str | None]:
    """Return optimizers, schedulers and the metric that is meant for the latter."""
    if isinstance(found, torch.optim.Optimizer):
        return [found], [], None
    if isinstance(found, Mapping):
        _check_entry(found)
        return [found["optimizer"]], _schedulers_of(found), found.get("monitor")
    if isinstance(found, list | tuple) and found:
        if all(isinstance(entry, torch.optim.Optimizer) for entry in found):
            return list(found), [], None
        if len(found) == 2 and isinstance(found[0], list | tuple):
            schedulers = found[1] if isinstance(found[1], list | tuple) else [found[1]]
            return list(found[0]), list(schedulers), None
        if all(isinstance(entry, Mapping) for entry in found):
            for entry in found:
                _check_entry(entry)
            return (
                [entry["optimizer"] for entry in found],
                [
                    _config(scheduler, entry.get("monitor"))
                    for entry in found
                    for scheduler in _schedulers_of(entry)
                ],
                None,
            )
    raise ValueError(
        f"configure_optimizers returned a {type(found).__name__}; it must return {_FORMS}"
    )


def _schedulers_of(entry: Mapping[str, Any]) -> Sequence[Any]:
    return [entry["lr_scheduler"]] if entry.get("lr_scheduler") is not None else []


def _config(scheduler: Any, monitor: str | None) -> ScheduleConfig:
    if isinstance(scheduler, ScheduleConfig):
        return scheduler
    if not isinstance(scheduler, Mapping):
        return ScheduleConfig(scheduler, monitor=monitor)
    _check_keys(scheduler, tuple(field.name for field in fields(ScheduleConfig)))
    if "scheduler" not in scheduler:
        raise ValueError("configure_optimizers: a dict of a scheduler without 'scheduler'")
    return ScheduleConfig(**{"monitor": monitor, **scheduler})


def _check_entry(found: Mapping[str, Any]) -> None:
    _check_keys(found, ("optimizer", "lr_scheduler", "monitor"))
    if "optimizer" not in found:
        raise ValueError("configure_optimizers: a dict without 'optimizer'")


def _check_keys(found: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = [str(key) for key in found if key not in known]
    if unknown:
        raise ValueError(
            f"configure_optimizers: a dict with {', '.join(unknown)}; the keys are "
            f"{', '.join(known)}"
        )
