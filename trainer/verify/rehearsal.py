"""A fit of a few steps that writes down what it does, on one rank."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from trainer import distributed
from trainer.config import TrainerConfig
from trainer.data.batches import IndexedBatches
from trainer.data.fetching import Request
from trainer.data.loading import Batches, MicroBatch, length
from trainer.data.module import DataModule
from trainer.data.shards import ShardedStreamBatches
from trainer.notes import print_notes
from trainer.run import FitResult
from trainer.seeding import Stream, seed_generators, stream_key
from trainer.session import Session
from trainer.speed.memory import peak_bytes
from trainer.state import TrainState
from trainer.task import TaskModule
from trainer.trainer import Training
from trainer.trees import rows, to_device
from trainer.verify.collectives import CollectiveCounter, expected_collectives, gradient_bytes
from trainer.verify.dry_run import Trial, batch_dependence, layers_used
from trainer.verify.order import order_of, requested
from trainer.verify.record import (
    Forward,
    Record,
    digest,
    digests,
    generator_states,
    tensors_of,
)


@dataclass
class RankJob:
    """What every rank of a run does.

    Attributes:
        config: The options, without anything that would leave files behind.
        folder: Where the ranks leave their records.
        steps: After how many to stop.
        state: How far this rank has come.
    """

    config: TrainerConfig
    folder: Path
    steps: int
    state: TrainState = field(default_factory=TrainState)

    def __call__(self, task: TaskModule, data: DataModule) -> None:
        """Run, and leave a record of how far it came."""
        record = Record(distributed.rank())
        try:
            with silent_if_alone():
                session = Session(self.config, task, data)
                rehearsal = Rehearsal(session, data, self.state, record, self.folder, self.steps)
                # The other run is cut like this one, so a micro-batch has a fixed size here.
                micro = rehearsal.view.micro_batch_size
                print_notes(task, replace(rehearsal.plan, micro_batch_size=micro), self.config)
                with rehearsal.open():
                    rehearsal.run()
        finally:
            record.save(self.folder)

    def where(self) -> str:
        """How far this rank has come."""
        return f"step {self.state.step}"


@contextmanager
def silent_if_alone() -> Iterator[None]:
    """Print nothing on a single process: it would say again what the ranks have said."""
    if distributed.world_size() > 1:
        yield
        return
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        yield


class Rehearsal(Training):
    """`Training` that stops after a few steps, saves and validates nothing, and keeps a record."""

    def __init__(
        self,
        session: Session,
        data: DataModule,
        state: TrainState,
        record: Record,
        folder: Path,
        steps: int,
    ) -> None:
        """Build what a fit needs, and note what the ranks would load.

        Args:
            session: The task on its device, and the data.
            data: The user's, whose training data it is.
            state: The clock.
            record: Is filled.
            folder: Where it is written, and rank 0's weights.
            steps: After how many to stop.
        """
        if session.task.optimizes_itself:
            raise ValueError(
                f"{type(session.task).__name__} optimizes itself, so there is no step of the "
                "Trainer's to verify; compare fits of it on one and on several processes"
            )
        super().__init__(session, state, (), (), folder, {}, test_best=False)
        self.record = record
        self._folder, self._steps = folder, steps
        self._counter = CollectiveCounter()
        self._data = self.batches
        self._micro: MicroBatch | None = None
        self.batches = _Noted(self.batches, self._note, self._counter.paused)
        # Every turn of a step sees the same samples, so the first one stands for all of them.
        self.turns.all[0].step_module.register_forward_pre_hook(self._before_forward)
        self.turns.all[0].step_module.register_forward_hook(self._after_forward)
        view = self.view
        record.facts = {
            "global_batch_size": view.global_batch_size,
            "micro_batch_size": view.micro_batch_size,
            "accumulation_steps": view.accumulation_steps,
            "is_stream": not isinstance(self._data, IndexedBatches),
            "is_sharded": isinstance(self._data, ShardedStreamBatches),
            "global_loss": self.task.global_loss,
            "num_turns": len(self.turns.all),
        }
        if isinstance(self._data, IndexedBatches):
            source = self._data.source
            order, changes = order_of(source, data, self.config)
            record.facts |= {"order": order, "order_changes": changes}
            record.facts["num_samples"] = length(source.dataset)
            record.epochs = requested(self._data)
        record.phase = "start"
        record.save(folder)

    def run(self) -> FitResult:
        """Train for the steps asked for."""
        with self._counter:
            return super().run()

    def wrap(self) -> None:
        """Note what the ranks have before they are made equal, and wrap."""
        with self._counter.paused():
            if not self.record.initial:
                self.record.initial = digests(tensors_of(self.task))
                self._save_weights("initial")
            super().wrap()

    def after_step(self) -> None:
        """Note the step, and stop after the last one."""
        with self._counter.paused():
            super().after_step()
        record, step = self.record, self.state.step
        if len(record.losses) < step:  # else only the end of the data told that the epoch is over
            record.losses.append(self._loss())
            record.hyperparameters.append(self._hyperparameters())
            record.collectives.append(self._counter.take())
            record.peak_bytes = peak_bytes(self.session.device)
        if step >= self._steps:
            self.stop_reason = self.stop_reason or "all steps verified"

    def finish(self) -> FitResult:
        """Note what the steps have led to."""
        with self._counter.paused():
            result = super().finish()
            self.record.final = digests(dict(self.task.named_parameters()))
            self._save_weights("final")
        found = [expected_collectives(turn.module, self.config) for turn in self.turns.at_work]
        known = list(chain.from_iterable(each for each in found if each is not None))
        self.record.facts["gradient_bytes"] = sum(
            gradient_bytes(turn.step_module) for turn in self.turns.at_work
        )
        self.record.facts["collectives"] = None if None in found else known
        self.record.phase = "end"
        return result

    def validate(self) -> None:
        """Validate nothing."""

    def save(self) -> None:
        """Save nothing."""

    def _note(self, micro: MicroBatch) -> None:
        """Note what was loaded; before the first step, see what it uses of the task."""
        self._micro = micro
        if self.record.phase == "steps":
            return
        self._dry_run(micro)
        self.record.phase = "steps"
        self.record.save(self._folder)
        if self.session.device.type == "cuda":  # the copies were no part of the run
            torch.cuda.reset_peak_memory_stats(self.session.device)

    def _dry_run(self, micro: MicroBatch) -> None:
        session, record = self.session, self.record
        try:
            task = copy.deepcopy(self.task)
        except Exception as error:  # a fit needs no copy, so this is no fault
            record.facts["not_copied"] = f"{type(error).__name__}: {error}"
            return
        task.run = replace(task.run, turn=self.turns.at_work[0].name)

        def seed() -> None:
            seed_generators(
                stream_key(session.config.seed, Stream.FORWARD, 0, micro.number), session.device
            )

        seed()
        whole = self._trial(micro, micro.batch, micro.num_samples)
        record.layers = layers_used(task, whole, session.precision)
        if whole.num_samples > 1 and not task.global_loss:
            found = [
                batch_dependence(task, [whole, *halves], session.precision, seed)
                for halves in self._halves(micro)
            ]
            told = [each for each in found if each is not None]
            record.batch_dependence = min(told, key=lambda each: each.difference, default=None)

    def _halves(self, micro: MicroBatch) -> Iterator[list[Trial]]:
        """Yield a micro-batch as two smaller ones, in each way that there is.

        No way is right for all: cutting keeps what belongs to the batch as a whole (the number of
        its tokens), and loading anew draws other numbers where they are drawn for a whole batch.
        """
        size = micro.num_samples
        ranges = [range(size // 2), range(size // 2, size)]
        with suppress(ValueError):
            yield [
                self._trial(micro, rows(micro.batch, size, r.start, r.stop), len(r)) for r in ranges
            ]
        if isinstance(self._data, IndexedBatches):
            place = (micro.number, micro.global_size, True, 0)
            requests = [
                Request(micro.indices[r.start : r.stop], micro.position + r.start, *place)
                for r in ranges
            ]
            loaded = [self._data.fetch(request) for request in requests]
            yield [self._trial(micro, half.batch, half.num_samples) for half in loaded]

    def _trial(self, micro: MicroBatch, batch: Any, num_samples: int) -> Trial:
        return Trial(to_device(batch, self.session.device), num_samples, micro.global_size)

    def _before_forward(self, *_: Any) -> None:
        self._before = generator_states(self.session.device)
        self._counter.in_forward = True

    def _after_forward(self, *_: Any) -> None:
        self._counter.in_forward = False
        micro = self._micro
        assert micro is not None
        if micro.batch is None:
            return
        size = micro.num_samples
        parts = [micro.batch]
        if self.record.facts["is_stream"]:
            with suppress(ValueError):  # else it is compared as a whole
                parts = [rows(micro.batch, size, i, i + 1) for i in range(size)]
        self.record.forwards.append(
            Forward(
                step=self.state.step + 1,
                number=micro.number,
                position=micro.position,
                num_samples=size,
                global_size=micro.global_size,
                content=tuple(map(digest, parts)),
                before=self._before,
                after=generator_states(self.session.device),
            )
        )

    def _hyperparameters(self) -> list[dict[str, Any]]:
        """Return what each parameter group was stepped with."""
        return [
            {key: value for key, value in group.items() if isinstance(value, int | float | tuple)}
            | {"lr": float(rate)}
            for turn in self.turns.all
            for group, rate in zip(turn.optimizer.param_groups, turn.schedule.rates, strict=True)
        ]

    def _loss(self) -> float | None:
        """Return the loss of this step, of all turns together; None if it has no weight."""
        found = [self.view.measured_now(f"train/{turn.key('loss')}") for turn in self.turns.all]
        known = [loss for loss in found if loss is not None]
        return sum(known) if known else None

    def _save_weights(self, name: str) -> None:
        if distributed.rank() == 0:
            weights = {name: p.detach() for name, p in self.task.named_parameters()}
            torch.save(weights, self._folder / name)


class _Noted(Batches):
    """Shows what is loaded to somebody else first."""

    def __init__(
        self,
        batches: Batches,
        note: Callable[[MicroBatch], None],
        loading: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._batches, self._note, self._loading = batches, note, loading
        self.steps_per_epoch = batches.steps_per_epoch

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[MicroBatch]:
        found = self._batches.epoch(epoch, start_step)
        while True:
            with self._loading():
                micro = next(found, None)
                if micro is None:
                    return
                self._note(micro)
            yield micro

    def close(self) -> None:
        self._batches.close()
