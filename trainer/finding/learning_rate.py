"""`Trainer.find_lr`: train with a learning rate that rises in every step, and watch the loss.

The range test is Smith's (2017, arXiv:1506.01186), with a rate that rises exponentially. The steps
are those of a fit: of whole global batches, on all ranks, so the curve is the same on any number
of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from trainer.config import TrainerConfig
from trainer.data.loading import MicroBatch
from trainer.data.module import DataModule
from trainer.finding.curve import is_beyond, smoothed
from trainer.finding.lr_report import LRReport
from trainer.finding.options import FindLRConfig
from trainer.messages import counted
from trainer.optimizing.lr_scaling import LRScaling
from trainer.optimizing.optimization import Schedule
from trainer.optimizing.turns import Turn
from trainer.planning.trial import optimizers_unchanged, quiet, unchanged
from trainer.run import FitResult
from trainer.run_dir import choose_run_dir
from trainer.session import Session
from trainer.state import TrainState
from trainer.task import OptimizerSetup, TaskModule
from trainer.trainer import Training
from trainer.watch import Phase, watch


def find_lr(
    task: TaskModule, data: DataModule, config: TrainerConfig, options: FindLRConfig
) -> LRReport:
    """Sweep the learning rate on every rank; the task has its own weights afterwards.

    Args:
        task: What a fit would train.
        data: Where the samples come from.
        config: The options of that fit.
        options: How far to look.

    Raises:
        ValueError: If the task has no learning rate to sweep, or several to choose from.
    """
    run_dir = choose_run_dir(config)
    # Without limits, what the task is told of the length of the run is the sweep's.
    is_endless = config.max_steps is None and config.max_epochs is None
    trial = quiet(
        config,
        max_steps=options.steps if is_endless else config.max_steps,
        lr_warmup_steps=0,
        run_dir=str(run_dir),
    )
    with unchanged(task):
        sweep = Sweep(Session(trial, task, data), options)
        with optimizers_unchanged(sweep.turns.all), sweep.open():
            sweep.run()
    size = sweep.plan.global_batch_size
    of = "" if size is None else f" of {counted(size, 'sample')}"
    return LRReport.of(
        title=f"{type(task).__name__}: {counted(len(sweep.losses), 'step')}{of}",
        rates=sweep.rates,
        losses=sweep.losses,
        groups=sweep.groups,
        has_diverged=sweep.has_diverged,
        run_dir=run_dir,
    )


class Sweep(Training):
    """`Training` whose learning rate rises from step to step, until the loss diverges.

    Attributes:
        rates: The rate of each step: that of the parameter group that has the highest.
        losses: The loss of each step, over the whole global batch.
        has_diverged: Whether that has ended the sweep.
        groups: By the name of a parameter group, its share of that rate.
    """

    def __init__(self, session: Session, options: FindLRConfig) -> None:
        """Note what to sweep.

        Args:
            session: The task on its device, and the data.
            options: How far.
        """
        run_dir = choose_run_dir(session.config)
        super().__init__(session, TrainState(), (), (), run_dir, {}, test_best=False)
        self._options = options
        self._swept = self._choose()
        scaling = LRScaling.of(session.config, self.plan.global_batch_size)
        for turn in self.turns.all:  # no scheduler has a say, or could come to its end
            turn.schedule = Schedule(OptimizerSetup(turn.optimizer), scaling, self.task.run)
        self._shares = _shares(self._swept.optimizer)
        groups = self._swept.optimizer.param_groups
        self.groups = {
            str(group.get("name", number)): share
            for number, (group, share) in enumerate(zip(groups, self._shares, strict=True))
        }
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.has_diverged = False

    def update(self, turn: Turn, micros: Iterable[MicroBatch]) -> None:
        """Step with the rate that it is the turn of."""
        if turn is self._swept:
            for group, share in zip(turn.optimizer.param_groups, self._shares, strict=True):
                rate = self._rate() * share
                if isinstance(group["lr"], torch.Tensor):  # of a captured graph, say
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
        super().update(turn, micros)

    def after_step(self) -> None:
        """Note the loss, and stop after the last step or where it has diverged."""
        self.turns.wrap_if_wanted()
        watch.enter(Phase.LOGGING)
        loss = self.logbook.reduce(finite_loss=False).get(self._swept.key("loss"))
        if loss is not None:  # else the global batch had no weight, or it is the end of an epoch
            self.has_diverged = not math.isfinite(loss)
            if not self.has_diverged:
                self.rates.append(self._rate(self.state.step - 1))
                self.losses.append(loss)
                self.has_diverged = is_beyond(smoothed(self.losses))
        if self.has_diverged:
            self.stop_reason = "the loss has diverged"
        elif self.state.step >= self._options.steps:
            self.stop_reason = "all rates tried"

    def finish(self) -> FitResult:
        """Save nothing."""
        return FitResult.of(self.view, self.stop_reason, None)

    def _rate(self, step: int | None = None) -> float:
        low, high = math.log(self._options.min_lr), math.log(self._options.max_lr)
        step = self.state.step if step is None else step
        return math.exp(low + (high - low) * step / (self._options.steps - 1))

    def _choose(self) -> Turn:
        """Return the turn of the optimizer to sweep."""
        task, wanted = type(self.task).__name__, self._options.optimizer
        if self.task.optimizes_itself:
            raise ValueError(
                f"{task} optimizes itself, and find_lr sweeps a rate that the Trainer steps with; "
                "try rates by hand, or let a sweeper do so"
            )
        names = [turn.name for turn in self.turns.all]
        if names == [None]:
            if wanted is not None:
                raise ValueError(
                    f"find_lr.optimizer={wanted}, but {task} has one optimizer, which has no name; "
                    "leave it out"
                )
            return self.turns.all[0]
        for turn in self.turns.all:
            if turn.name == wanted:
                return turn
        listed = ", ".join(map(str, names))
        raise ValueError(
            f"{task} has the optimizers {listed}: find_lr.optimizer names the one whose rate to "
            f"look for (the others keep theirs)"
            + ("" if wanted is None else f", and {wanted} is none of them")
        )


def _shares(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the rate of each parameter group, as a share of the highest one.

    With a schedule, the rate that it was built around counts.
    """
    names = ("max_lr", "initial_lr", "lr")
    found = [
        next((float(group[name]) for name in names if group.get(name) is not None), None)
        for group in optimizer.param_groups
    ]
    rates = [rate for rate in found if rate is not None]
    if len(rates) < len(found):
        raise ValueError(
            f"a parameter group of the {type(optimizer).__name__} has no lr, so there is none to "
            "find"
        )
    highest = max(rates)
    if highest <= 0:
        raise ValueError(
            f"the learning rate of every parameter group of the {type(optimizer).__name__} is 0; "
            "find_lr scales them together, so at least one must be above 0"
        )
    return [rate / highest for rate in rates]
