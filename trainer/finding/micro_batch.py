"""`Trainer.find_micro_batch_size`: how many samples a rank can take at once.

Every rank tries by itself, as the loop would do it but without communication: so a rank that runs
out of memory leaves nobody waiting in a collective. After each try the ranks tell each other, and
the smallest one decides.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from trainer import distributed, metrics
from trainer.config import TrainerConfig
from trainer.data.module import DataModule
from trainer.data.plan import ceil_div
from trainer.finding.memory import Memory, is_out_of_memory
from trainer.finding.micro_batch_report import MicroBatchReport, Trial
from trainer.finding.options import FindMicroBatchSizeConfig
from trainer.guard import no_collectives
from trainer.optimizing.turns import Turn
from trainer.planning.measuring import first_step, whole_batch
from trainer.planning.trial import optimizers_unchanged, quiet, unchanged
from trainer.run_dir import choose_run_dir
from trainer.session import Session
from trainer.state import TrainState
from trainer.task import TaskModule
from trainer.trainer import Training
from trainer.watch import Phase, watch

_CLOSE = 30  # sizes that differ by less than this part are as good
_LATE = 10**9  # an epoch in which weights are averaged, whatever the first one is


def find_micro_batch_size(
    task: TaskModule, data: DataModule, config: TrainerConfig, options: FindMicroBatchSizeConfig
) -> MicroBatchReport:
    """Try micro-batches on every rank; the task has its own weights afterwards.

    Args:
        task: What a fit would train.
        data: Where the samples come from.
        config: The options of that fit.
        options: The limit.

    Raises:
        ValueError: If micro-batches of this task cannot be tried on each rank by itself.
    """
    run_dir = choose_run_dir(config)
    _refuse(task, config)
    with unchanged(task), ExitStack() as stack:
        trial = quiet(
            config,
            micro_batch_size=None,  # all that a rank gets is one micro-batch, to be cut
            reproducible=False,
            static_graph=False,
            run_dir=str(run_dir),
        )
        session = Session(trial, task, data)
        memory = Memory(session.device, options.memory_limit_mb)
        training = Training(session, TrainState(), (), (), run_dir, {}, test_best=False)
        stack.enter_context(optimizers_unchanged(training.turns.all))
        stack.enter_context(memory.limited())
        stack.enter_context(training.open())
        trials = _Trials(training, memory)
        largest = search(trials.fit, trials.most)
        return MicroBatchReport.of(
            title=f"{type(task).__name__} on {session.device.type}, {config.precision}",
            global_batch_size=trials.global_batch_size,
            largest=largest,
            trials=trials.done,
            limit_mb=memory.limit_mb,
            reproducible=config.reproducible,
            run_dir=run_dir,
        )


def search(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest size that fits, by doubling and then bisecting; 0 if none does.

    To a thirtieth: what is found is a size that was tried, and the next one is not much larger.

    Args:
        fits: Tries a size.
        most: Larger ones are of no use.
    """
    good, size = 0, min(2, most)  # a single sample may be too few, for BatchNorm say
    while fits(size):
        good = size
        if size == most:
            return good
        size = min(2 * size, most)
    bad = size
    while bad - good > max(1, good // _CLOSE):
        size = (good + bad) // 2
        if fits(size):
            good = size
        else:
            bad = size
    return good


class _Trials:
    """Tries micro-batches on this rank.

    Attributes:
        most: Samples of a global batch that are one rank's.
        global_batch_size: Samples of the first global batch.
        done: What was tried.
    """

    def __init__(self, training: Training, memory: Memory) -> None:
        self._training, self._memory = training, memory
        self._device = training.session.device
        training.task.on_epoch_start()
        micros = first_step(training)
        self._cut, here = whole_batch(training, micros)
        self._here = here
        self.global_batch_size = micros[0].global_size
        self.most = ceil_div(self.global_batch_size, distributed.world_size())
        for turn in training.turns.all:
            # Else the first forward would share it.
            training.state.sample_weights[turn.key("loss")] = 1.0
            for group in turn.optimizer.param_groups:
                _stand_still(group)
        training.average.after_step(_LATE)  # it has copies of its own
        training.average.after_epoch(_LATE)
        training.wrap()
        self.done: list[Trial] = []

    def fit(self, size: int) -> bool:
        """Whether ``size`` samples fit on every rank; called on every rank."""
        self._memory.begin()
        with no_collectives("the trial of a micro-batch"):
            is_out = self._runs_out(min(size, self._here))
        peak_mb = self._memory.peak_mb()
        is_out |= peak_mb > self._memory.limit_mb
        watch.enter(Phase.WAITING)
        outs, peaks = zip(*distributed.all_gather_object((is_out, peak_mb)), strict=True)
        self.done.append(Trial(size, [rank for rank, out in enumerate(outs) if out], list(peaks)))
        return not any(outs)

    def _runs_out(self, size: int) -> bool:
        """Whether memory runs out in the steps of a micro-batch."""
        turns = self._training.turns.at_work
        try:
            watch.enter(Phase.LOADING)
            batch = self._cut(size)
            for turn in turns:
                with turn.taken():
                    self._step(turn, batch, size)
            is_out = False
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            is_out = True
        for turn in turns:
            if is_out:
                turn.optimizer.state.clear()  # of some parameters it may have half of it
            turn.gradients.clear()
        metrics.reset(self._training.train_metrics)
        return is_out

    def _step(self, turn: Turn, batch: Any, size: int) -> None:
        """Accumulate, with an optimizer that has its state."""
        training = self._training
        for _ in range(2):
            watch.enter(Phase.FORWARD)
            training.logbook.begin(1, 0, size)
            with turn.strategy.no_sync():
                with training.session.precision.autocast():
                    loss = turn.module(batch, size, size)
                watch.enter(Phase.BACKWARD)
                turn.scaler.scale(loss).backward()
            watch.enter(Phase.OPTIMIZER)
            turn.gradients.clip()
            turn.optimizer.step()


def _refuse(task: TaskModule, config: TrainerConfig) -> None:
    name = type(task).__name__
    if task.optimizes_itself:
        raise ValueError(
            f"{name} optimizes itself, so the Trainer cuts nothing into micro-batches for it: "
            "there is no size to find"
        )
    if task.global_loss:
        raise ValueError(
            f"{name} has global_loss=True: its forward exchanges outputs with the other ranks, so "
            "no rank can try a micro-batch by itself, and a rank can have one per step only"
        )
    if config.sync_batchnorm:
        raise ValueError(
            "sync_batchnorm=true runs collectives inside forward, so no rank can try a micro-batch "
            "by itself; try with sync_batchnorm=false, which needs about as much memory"
        )


def _stand_still(group: dict[str, Any]) -> None:
    """Let no weight change, which could become NaN after many trials."""
    rate = group.get("lr")
    if isinstance(rate, torch.Tensor):
        rate.zero_()
    elif rate is not None:
        group["lr"] = 0.0
