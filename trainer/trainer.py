"""The training loop: what happens in a fit, from top to bottom.

The `Trainer` that a user calls is in ``api.py``. Before the code here runs, ``launching/`` has
started the ranks and they have joined a process group; every rank runs this same code, on its own
part of each global batch. `Training` is one fit on one rank, and `Training.run` is the loop.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trainer import distributed, metrics, startup, stopping
from trainer.callbacks import Callback
from trainer.checkpoint.past import shared_past
from trainer.checkpoint.saving import Saver, named
from trainer.data.loading import MicroBatch, by_step
from trainer.data.streams import empty_stream
from trainer.due import due, limit_reached
from trainer.logbook import Logbook, full_names
from trainer.loggers import Logger
from trainer.notes import note_untrained
from trainer.observers import Observers
from trainer.optimizing.turns import Turn, Turns
from trainer.optimizing.weight_average import WeightAverage
from trainer.run import FitResult
from trainer.seeding import Stream, seed_generators, stream_key
from trainer.session import Session
from trainer.speed import profiling
from trainer.speed.pace import Pace
from trainer.state import TrainState
from trainer.trees import to_device
from trainer.watch import Phase, watch


class Training:
    """One fit on one rank.

    Ranks other than 0 have no callbacks, no loggers and no checkpoint writer. Apart from that all
    ranks do the same, so their collectives match.
    """

    def __init__(
        self,
        session: Session,
        state: TrainState,
        callbacks: Sequence[Callback],
        loggers: Sequence[Logger],
        run_dir: Path,
        run_config: Mapping[str, Any],
        test_best: bool,
    ) -> None:
        """Build everything that the loop needs.

        Args:
            session: The task on its device, and the data.
            state: The clock, at 0; a resume sets it.
            callbacks: On rank 0; elsewhere none.
            loggers: On rank 0; elsewhere none.
            run_dir: Where the run writes; the same on every rank.
            run_config: Goes into every checkpoint.
            test_best: Whether to test the best checkpoint at the end.
        """
        config, task = session.config, session.task
        self.session, self.config, self.task, self.state = session, config, task, state
        session.can_stop = True
        self.run_dir = run_dir
        self.batches, self.plan = session.train_batches()
        self.val_sets = session.evaluation_sets("val")
        self.test_sets = session.evaluation_sets("test", required=True) if test_best else {}
        self.train_metrics = session.train_metrics()
        self.logbook = Logbook()
        self.pace = Pace(session.device)
        past = shared_past(config, self.run_dir)
        steps_per_epoch = self.batches.steps_per_epoch
        self.view = session.run_view(self.run_dir, steps_per_epoch, self.plan, state, loggers, past)
        task.run = replace(
            task.run,
            total_steps=self.view.total_steps,
            steps_per_epoch=steps_per_epoch,
            _state=state,
            _logbook=self.logbook,
            run_dir=run_dir,
            _loggers=loggers,
        )
        self.observers = Observers(self.view, callbacks, loggers, config.checkpoint.on_error)
        validates = bool(self.val_sets) and config.validates
        self.turns = Turns(session, state, self.logbook, self.train_metrics, validates)
        parts = {"train_state": state, **named("callbacks", callbacks), **named("loggers", loggers)}
        self.average = WeightAverage(task, config)
        self.saver = Saver(
            session, self.view, self.turns.all, self.average, parts, run_config, past
        )
        self.stop_reason: str | None = None
        self.signal: signal.Signals | None = None  # that asked to stop
        self.started = time.monotonic()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Resume if asked to; open what rank 0 writes, and close it whatever happens."""
        self.seed_hook(Stream.FIT_START)
        self.task.on_fit_start()  # it may set weights, so before those of a checkpoint
        shared = self.saver.start()
        self.logbook.restore(shared.get("logbook", {}))
        metrics.restore(self.train_metrics, shared.get("metrics", {}))
        self.batches.load_state_dict(shared.get("batches", {}))
        self.task._load_state(shared.get("task", {}))
        self.turns.load_strategy_states(shared)
        watch.step = self.state.step
        self.agreement = stopping.Agreement(self.state.step)
        self.started = time.monotonic() - self.state.time_s
        with ExitStack() as stack:
            stack.callback(self.turns.teardown)
            stack.callback(self.batches.close)
            for evaluated in (*self.val_sets.values(), *self.test_sets.values()):
                stack.callback(evaluated.batches.close)
            stack.enter_context(self.saver.open())
            stack.enter_context(self.observers.open())
            if self.config.detect_anomaly:
                stack.enter_context(torch.autograd.set_detect_anomaly(True))
            stack.enter_context(profiling.traced(self.config, self.run_dir))
            yield

    def run(self) -> FitResult:
        """Train to the end.

        What happens, in order, on every rank::

            TaskModule.on_fit_start                (then a checkpoint's state, to go on from it)
            Callback.on_fit_start
            each epoch:
                TaskModule.on_epoch_start          (wrap again if requires_grad changed)
                each global batch:
                    each optimizer's turn:         (mostly there is one)
                        each micro-batch of this rank:
                            forward, loss, backward (gradients are reduced in the last one)
                        gradients: unscale, correct by the true weight
                        TaskModule.before_optimizer_step
                        clip, optimizer.step
                        TaskModule.after_optimizer_step
                        scheduler.step             (interval "step"; "epoch" at an epoch's end)
                    weights are averaged           (weight_average)
                    if due: log                    Callback.on_log, loggers
                    if due: validate               scheduler.step (with a monitor),
                                                   TaskModule.on_validation_end,
                                                   Callback.on_validation_end, loggers
                    at an epoch's end              TaskModule.on_epoch_end
                    if due: save                   Callback.on_save, when it is on disk
                    if requested by a callback or a signal: save, stop
            validate and save once more, unless just done; test the best
            TaskModule.on_fit_end, Callback.on_fit_end
        """
        task, state, config, device = self.task, self.state, self.config, self.session.device
        startup.note("open")
        self.observers.tell("on_fit_start")
        self.obey()
        if config.num_sanity_val_steps:
            with stopping.cut_short(self.obey):
                self.session.evaluate_once("val", config.num_sanity_val_steps)
        if state.step and self.stop_reason is None:
            self.after_step()  # resumed: what a signal has kept from being done at this step
        while self.stop_reason is None:
            watch.enter(Phase.EPOCH_START)
            self.seed_hook(Stream.EPOCH_START)
            task.on_epoch_start()
            startup.note("epoch start")
            self.wrap()
            if not state.step_in_epoch:  # else resumed in its middle
                metrics.reset(self.train_metrics)
            first_step = state.step
            epoch = self.batches.epoch(state.epoch, state.step_in_epoch)
            micro_batches = watch.loading(epoch, then=Phase.FORWARD)
            for global_size, micros in by_step(micro_batches, len(self.turns.at_work), device):
                for turn in self.turns.at_work:  # mostly there is one
                    with turn.taken():
                        self.update(turn, micros)
                if task.optimizes_itself:
                    self.let_optimize(micros)

                self.average.after_step(state.epoch)
                state.step += 1
                state.step_in_epoch += 1
                state.samples += global_size
                watch.step = state.step
                if state.step_in_epoch == self.batches.steps_per_epoch:
                    self.end_epoch()
                self.after_step()
                distributed.shorten_timeouts()  # the first step may have taken long
                startup.end(config)
                if self.stop_reason is not None:
                    break
            else:
                if state.step_in_epoch:  # only the end of the data told that the epoch is over
                    self.end_epoch()
                    self.after_step()
                elif state.step == first_step:
                    raise empty_stream(state.epoch)

        return self.finish()

    def update(self, turn: Turn, micros: Iterable[MicroBatch]) -> None:
        """Give one optimizer its turn: the gradients of a global batch, and a step on them."""
        task, scaler = self.task, turn.scaler
        for micro in micros:
            batch = self.begin(micro, *turn.stream_place)
            with nullcontext() if micro.is_last else turn.strategy.no_sync():
                with self.session.precision.autocast():
                    # This micro-batch's share of the global batch's loss (see step.py).
                    loss = turn.module(batch, micro.num_samples, micro.global_size)
                watch.enter(Phase.BACKWARD)
                scaler.scale(loss).backward()
            turn.strategy.after_backward(micro)  # reproducible: add up in a fixed order

        watch.enter(Phase.OPTIMIZER)
        turn.gradients.check()
        has_weight = turn.gradients.correct(scaler)
        if has_weight:  # else there is nothing to step on
            if not turn.gradients.update_is_plain:  # then it may draw random numbers
                self.seed_hook(Stream.UPDATE, *turn.stream_place)
            task.before_optimizer_step()
            turn.gradients.clip()
            with turn.schedule.scaled():  # the learning rate follows the global batch
                scaler.step(turn.optimizer)  # optimizer.step(), unless fp16 overflowed
            task.after_optimizer_step()
            scaler.update()
        turn.gradients.clear()
        turn.schedule.after_step()

    def let_optimize(self, micros: Iterable[MicroBatch]) -> None:
        """Let a task that wants to do so run backward and step its optimizers itself."""
        for micro in micros:
            batch = self.begin(micro)
            with self.session.precision.autocast():
                self.task.optimize(batch, micro.num_samples, micro.global_size)
        for turn in self.turns.all:
            turn.schedule.after_step()

    def begin(self, micro: MicroBatch, *place: int) -> Any:
        """Return a micro-batch on the device; what is logged and drawn belongs to it from now."""
        self.logbook.begin(self.state.step + 1, micro.position, micro.num_samples)
        number = (self.state.step, micro.number, *place)
        device = self.session.device
        seed_generators(stream_key(self.config.seed, Stream.FORWARD, *number), device)
        return to_device(micro.batch, device)

    def seed_hook(self, stream: Stream, *place: int) -> None:
        """Have the task's hooks and the optimizer draw the same random numbers on every rank.

        The generators are where a rank's last micro-batch left them, which is not the same place.
        """
        key = stream_key(self.config.seed, stream, self.state.step, *place)
        seed_generators(key, self.session.device)

    def wrap(self) -> None:
        """Wrap the task in DDP, anew if other parameters are trained than in the last epoch."""
        self.turns.wrap()
        startup.note("wrap")

    def end_epoch(self) -> None:
        """Go on to the next epoch."""
        self.average.after_epoch(self.state.epoch)
        self.state.epoch += 1
        self.state.step_in_epoch = 0
        self.turns.after_epoch()

    def after_step(self) -> None:
        """Log, validate and save where this step calls for it, and obey what is asked for."""
        state = self.state
        self.turns.wrap_if_wanted()
        self.stop_reason = limit_reached(self.config, state)
        log, validate, save = due(self.config, state)
        if log:
            self.log()
        if validate:
            self.validate()
        if state.ended_epoch < state.epoch:
            state.ended_epoch = state.epoch
            self.end_with(self.task.on_epoch_end, Stream.EPOCH_END)
        if save:
            self.save()
        if log or validate or save or self.agreement.is_due(state.step):
            self.obey()
        elif self.saver.failed:
            self.announce_saved()

    def log(self) -> None:
        """Reduce what was logged since the last time and hand it to callbacks and loggers."""
        if self.state.logged_step == self.state.step:
            return
        watch.enter(Phase.LOGGING)
        self.state.time_s = time.monotonic() - self.started
        is_first = self.state.logged_step == 0
        self.state.logged_step = self.state.step
        pace = self.pace.table(self.turns.take_comm_times)
        logged = self.logbook.reduce(beside=pace)
        means = metrics.merged(logged, metrics.compute(self.train_metrics))
        values = full_names("train", means) | self.pace.measured(pace)
        self.view.learning_rates = self.turns.learning_rates()
        self.view.memory_mb = self.pace.memory_mb
        if is_first and means.keys().isdisjoint(self.logbook.losses):
            note_untrained(self.task, self.state.step)
        self.view.record(values)
        self.observers.tell("on_log", values)
        self.write(values)

    def validate(self) -> None:
        """Evaluate the validation sets, unless a signal cuts it short."""
        if not self.val_sets or self.state.validated_step == self.state.step:
            return
        with stopping.cut_short(self.obey), self.average.applied():
            values = self.session.evaluate("val", self.val_sets)
            self.state.validated_step = self.state.step
            self.turns.after_validation(values)
            self.seed_hook(Stream.VALIDATION_END)
            self.task.on_validation_end(values)
            self.view.record(values)
            self.observers.tell("on_validation_end", values)
            self.write(values)

    def save(self) -> None:
        """Start writing a checkpoint, unless a loss since the last log is not finite."""
        watch.enter(Phase.SAVING)
        self.logbook.check_finite()
        self.state.time_s = time.monotonic() - self.started
        shared = {
            "logbook": self.logbook.state(),
            "metrics": metrics.state(self.train_metrics) if self.state.step_in_epoch else {},
            "batches": self.batches.state_dict(),
            "task": self.task._state(),
            **self.turns.strategy_states(),
        }
        self.saver.save(shared)

    def end_with(self, hook: Callable[[], Mapping[str, float] | None], stream: Stream) -> None:
        """Call a hook of the task, and write what it has measured, if anything."""
        self.seed_hook(stream)
        values = hook()
        if values:
            self.write(values)

    def write(self, values: Mapping[str, float]) -> None:
        """Write one event to the loggers."""
        self.state.time_s = time.monotonic() - self.started
        self.view.record(values)  # once more: callbacks may have added some
        self.observers.write(values)

    def obey(self) -> None:
        """Do what rank 0's callbacks and signals ask for, on all ranks at the same step."""
        self.announce_saved()
        reason, save = self.view.take_requests()
        watch.enter(Phase.WAITING)
        decision = self.agreement.reach(self.state.step, stop=reason is not None, save=save)
        if decision.save:
            self.save()
        if decision.stop:
            self.stop_reason = distributed.broadcast_object(reason)
        if decision.signal is not None:
            self.signal, self.stop_reason = decision.signal, decision.signal.name
            self.view.request_stop(self.stop_reason)

    def announce_saved(self) -> None:
        """Tell callbacks of the checkpoints that were completed since the last time."""
        for path in self.saver.completed():
            self.observers.tell("on_save", path)

    def finish(self) -> FitResult:
        """Measure and save the end, test the best weights if asked to, and sum up.

        After a signal only save: the run will go on from here.
        """
        if self.signal is None:
            self.log()
            if self.config.validates:
                self.validate()
        self.save()
        if self.signal is None:
            self.saver.check_monitor()
            self.end_with(self.task.on_fit_end, Stream.FIT_END)
        self.saver.close()
        self.average.keep()
        watch.enter(Phase.FINISHING)
        self.announce_saved()
        if self.test_sets and self.signal is None:
            with stopping.cut_short(self.obey):
                best = distributed.broadcast_object(self.view.best_checkpoint)
                self.write(self.session.evaluate_with(best, self.run_dir, "test", self.test_sets))
        self.observers.tell("on_fit_end")
        return FitResult.of(self.view, self.stop_reason, self.signal)
