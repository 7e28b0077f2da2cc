"""Optimizers that take turns: what each of them has to itself in a step.

A task with one optimizer has one turn, which has no name. With several, as for a generator and its
critic, a step gives each of them one: forward, loss, backward and update, in which only its own
parameters require gradients. So each has a wrapper of its own that reduces exactly those, and no
search for parameters that got none is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trainer import distributed, metrics
from trainer.config import TrainerConfig
from trainer.logbook import Logbook
from trainer.messages import listed
from trainer.optimizing.gradients import Gradients, trained_names
from trainer.optimizing.lr_scaling import LRScaling
from trainer.optimizing.optimization import Schedule, configure_optimizers
from trainer.optimizing.statistics import Statistics
from trainer.options import show
from trainer.precision import LossScaler
from trainer.session import Session
from trainer.state import TrainState
from trainer.step import StepModule
from trainer.strategies import build_strategy
from trainer.strategies.comm_clock import CommTimes
from trainer.strategies.ddp import check_same_tensors
from trainer.task import TaskModule
from trainer.watch import Phase, watch

# Options for what happens between a loss and the update that follows from it.
_ON_GRADIENTS = (
    "precision",
    "gradient_clip_norm",
    "reproducible",
    "lr_scaling",
    "comm_hook",
    "bucket_cap_mb",
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "sync_batchnorm",
    "statistics",
)


class Turn:
    """One optimizer's part in every step.

    Attributes:
        name: What ``configure_optimizers`` calls it; None for a task's only optimizer.
        stream_place: What its random streams have in their keys beside those of the step.
        optimizer: The user's.
        schedule: Its learning rate.
        strategy: Reduces its gradients.
        scaler: Scales its loss.
        step_module: Computes its loss.
        module: What the loop calls: the wrapped ``step_module``, from `wrap`.
        gradients: What happens to its gradients, from `wrap`.
    """

    module: nn.Module
    gradients: Gradients

    def __init__(
        self,
        name: str | None,
        number: int,
        schedule: Schedule,
        session: Session,
        state: TrainState,
        logbook: Logbook,
        train_metrics: metrics.MetricSet,
    ) -> None:
        """Build what the optimizer has to itself.

        Args:
            name: Its name, if there are several.
            number: Which turn of a step this is, from 0.
            schedule: The optimizer and its learning rate.
            session: The task on its device.
            state: The clock.
            logbook: Gets the losses.
            train_metrics: Are updated in every turn.

        Raises:
            ValueError: If the strategy does not allow the way global batches are cut.
        """
        config = session.config
        self.name = name
        self.stream_place = (number,) if number else ()
        self.optimizer, self.schedule = schedule.setup.optimizer, schedule
        self.strategy = build_strategy(config)
        session.check_strategy(self.strategy)
        self.scaler = LossScaler(session.precision, self.strategy.averaged_over)
        self.strategy.scaler = self.scaler
        self.step_module = StepModule(
            session.task,
            logbook,
            train_metrics,
            state,
            averaged_over=self.strategy.averaged_over,
            seed=config.seed,
            needs_every_parameter=not self.strategy.may_miss_gradients,
            loss_name=self.key("loss"),
        ).to(session.device)
        self._task, self._device = session.task, session.device
        self._clip_norm = config.gradient_clip_norm
        self._statistics: Statistics | None = None
        if config.statistics:
            self._statistics = Statistics(
                session.task, self.optimizer, config, state, logbook, self.name
            )
        self._others: list[nn.Parameter] = []  # trained, but not in this turn

    def key(self, what: str) -> str:
        """Return what to call something that every turn has."""
        return what if self.name is None else f"{what}/{self.name}"

    @property
    def is_idle(self) -> bool:
        """Whether all of its parameters are frozen, while other turns train theirs."""
        return self.name is not None and not any(p.requires_grad for p in self.parameters())

    def wrap(self) -> None:
        """Wrap the step module for the parameters that are trained now."""
        self.strategy.teardown()
        if self.name is not None:
            own = {id(p) for p in self.parameters()}
            trained = (p for p in self._task.parameters() if p.requires_grad)
            self._others = [p for p in trained if id(p) not in own]
        self.module = self.step_module  # lets go of the old wrapper
        with self.taken():
            self.module = self.strategy.setup(self.step_module, self._device)
            may_miss = self.strategy.may_miss_gradients
            self.gradients = Gradients(
                self.step_module, self.optimizer, self._clip_norm, may_miss, self._statistics
            )

    def taken(self) -> AbstractContextManager[None]:
        """Return the context in which it is this optimizer's turn."""
        return nullcontext() if self.name is None else self._alone()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        watch.enter(Phase.FORWARD)
        task, run = self._task, self._task.run
        task.run = replace(run, turn=self.name)
        for parameter in self._others:
            parameter.requires_grad = False
        try:
            yield
        finally:
            for parameter in self._others:
                parameter.requires_grad = True
            task.run = run

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the optimizer's parameters."""
        return (p for group in self.optimizer.param_groups for p in group["params"])


class Turns:
    """The turns of a step, in their order.

    Attributes:
        all: One for each optimizer.
        at_work: Those that have something to train, from `wrap`; none where the task optimizes
            itself.
    """

    def __init__(
        self,
        session: Session,
        state: TrainState,
        logbook: Logbook,
        train_metrics: metrics.MetricSet,
        validates: bool,
    ) -> None:
        """Ask the task for its optimizers, and build a turn for each.

        Args:
            session: The task on its device; it has opened the training data.
            state: The clock.
            logbook: Gets the losses.
            train_metrics: Are updated in every turn.
            validates: Whether there will be metrics of a validation.

        Raises:
            ValueError: For a mistake in what ``configure_optimizers`` returns, or a strategy that
                does not allow the way global batches are cut.
        """
        if session.task.optimizes_itself:
            session.check_undivided()
            check_optimizes_itself(session.task, session.config)
        scaling = LRScaling.of(session.config, session.plan.global_batch_size)
        schedules = configure_optimizers(session.task, scaling)
        self.all = tuple(
            Turn(name, number, schedule, session, state, logbook, train_metrics)
            for number, (name, schedule) in enumerate(schedules.items())
        )
        if session.config.find_unused_parameters:
            _refuse_shared(session.task, self.all)
        self.at_work: Sequence[Turn] = ()
        logbook.losses = tuple(turn.key("loss") for turn in self.all)
        for turn in self.all:
            turn.schedule.check_monitor(validates)
        self._session = session
        self._trained: tuple[str, ...] | None = None

    def wrap(self) -> None:
        """Wrap for each turn, anew if other parameters are trained than before, on any rank."""
        task = self._session.task
        trained = trained_names(task)
        has_changed = torch.tensor(int(trained != self._trained))
        if not int(distributed.all_reduce_sum(has_changed)):
            return
        self._trained = trained
        if task.optimizes_itself:
            check_same_tensors(task)
            self._session.share_weights()
            return
        self.teardown()  # also of those that now sit out
        self.at_work = [turn for turn in self.all if not turn.is_idle]
        if not self.at_work:
            raise ValueError(
                f"in epoch {task.run.epoch} all parameters of all optimizers are frozen "
                f"({listed([str(turn.name) for turn in self.all])}), so there is nothing to step "
                "on; check requires_grad in on_epoch_start"
            )
        for turn in self.at_work:
            turn.wrap()

    def wrap_if_wanted(self) -> None:
        """Wrap anew where a strategy asks for it."""
        for turn in self.at_work:
            if turn.strategy.wants_setup:
                turn.wrap()

    def teardown(self) -> None:
        """Let go of all wrappers."""
        for turn in self.all:
            turn.strategy.teardown()

    def after_epoch(self) -> None:
        """Advance schedules by epochs."""
        for turn in self.all:
            turn.schedule.after_epoch()

    def after_validation(self, values: Mapping[str, float]) -> None:
        """Advance schedules that follow a metric."""
        for turn in self.all:
            turn.schedule.after_validation(values)

    def learning_rates(self) -> dict[str, float]:
        """Return the rates that were used last: ``train/lr``, ``train/lr/<turn>/<group>``, ..."""
        return {
            name: rate
            for turn in self.all
            for name, rate in turn.schedule.named_rates(turn.key("train/lr")).items()
        }

    def take_comm_times(self) -> CommTimes | None:
        """Return what communication takes in a step, of all turns; None where one does not know."""
        found = [turn.strategy.take_comm_times() for turn in self.at_work]
        known = [times for times in found if times is not None]
        if not known or len(known) < len(found):
            return None
        totals, hidden, steps_ago = zip(*known, strict=True)
        return CommTimes(sum(totals), sum(hidden), steps_ago[0])

    def strategy_states(self) -> dict[str, Any]:
        """Return what the strategies need to go on; a collective."""
        return {turn.key("strategy"): turn.strategy.state_dict() for turn in self.all}

    def load_strategy_states(self, states: Mapping[str, Any]) -> None:
        """Take back what ``strategy_states`` returned, from whatever it is part of."""
        for turn in self.all:
            turn.strategy.load_state_dict(states.get(turn.key("strategy"), {}))


def check_optimizes_itself(task: TaskModule, config: TrainerConfig) -> None:
    """Refuse options that act on gradients, of a task that runs backward and steps itself.

    Raises:
        ValueError: Naming the first of them.
    """
    default = TrainerConfig()
    for name in _ON_GRADIENTS:
        value = getattr(config, name)
        # bf16 needs no loss scale, so it is only a matter of the forward.
        if value != getattr(default, name) and (name, value) != ("precision", "bf16"):
            raise ValueError(
                f"{name}={show(value)} with {type(task).__name__}, which optimizes itself (with "
                "Lightning: automatic_optimization = False), would do nothing; leave it out, or do "
                "that in the task's own step"
            )


def _refuse_shared(task: TaskModule, turns: Sequence[Turn]) -> None:
    """Refuse parameters of several optimizers where DDP looks for unused ones."""
    count = Counter(id(p) for turn in turns for p in turn.parameters())
    shared = [name for name, p in task.named_parameters() if count[id(p)] > 1]
    if shared:
        raise ValueError(
            f"find_unused_parameters=true, and {listed(shared)} belong to several optimizers: a "
            "turn that leaves them unused would be taken for another's; set "
            "find_unused_parameters=false, as each turn only waits for its own parameters, or give "
            "each parameter one optimizer"
        )
