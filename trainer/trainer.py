"""The training loop: what happens in a fit, from top to bottom.

The `Trainer` that a user calls is in ``api.py``. Before the code here runs, ``launcher.py`` has
started the ranks and they have joined a process group; every rank runs this same code, on its own
part of each global batch. `Training` is one fit on one rank, and `Training.run` is the loop.
"""

from __future__ import annotations

import copy
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trainer import distributed, metrics, startup, stopping
from trainer.callbacks import Callback
from trainer.checkpoint.past import read_past
from trainer.checkpoint.saving import Saver, Stateful, named
from trainer.data.streams import empty_stream
from trainer.due import due, limit_reached
from trainer.gradients import Gradients, trained_names
from trainer.logbook import Logbook
from trainer.loggers import Logger
from trainer.lr_scaling import LRScaling
from trainer.notes import note_untrained
from trainer.observers import Observers
from trainer.optimization import configure_optimizer
from trainer.pace import Pace
from trainer.precision import LossScaler
from trainer.run import FitResult
from trainer.seeding import Stream, seed_generators, stream_key
from trainer.session import Session
from trainer.state import TrainState
from trainer.step import StepModule
from trainer.strategies import build_strategy
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
        self.strategy = build_strategy(config)
        self.batches, self.plan = session.train_batches(self.strategy)
        self.val_sets = session.evaluation_sets("val")
        self.test_sets = session.evaluation_sets("test", required=True) if test_best else {}
        self.train_metrics = session.train_metrics()
        self.logbook = Logbook()
        self.pace = Pace(session.device)
        past = distributed.on_first_rank(lambda: read_past(config, self.run_dir))
        steps_per_epoch = self.batches.steps_per_epoch
        self.view = session.run_view(self.run_dir, steps_per_epoch, self.plan, state, loggers, past)
        task.run = replace(
            task.run,
            total_steps=self.view.total_steps,
            steps_per_epoch=steps_per_epoch,
            _state=state,
            _logbook=self.logbook,
        )
        self.observers = Observers(self.view, callbacks, loggers, config.checkpoint.on_error)
        scaling = LRScaling.of(config, self.plan.global_batch_size)
        self.optimizer, self.schedule = configure_optimizer(task, scaling)
        self.schedule.check_monitor(bool(self.val_sets) and config.validates)
        self.step_module = StepModule(
            task,
            self.logbook,
            self.train_metrics,
            state,
            averaged_over=self.strategy.averaged_over,
            seed=config.seed,
            needs_every_parameter=not self.strategy.may_miss_gradients,
        ).to(session.device)
        self.scaler = LossScaler(session.precision, self.strategy.averaged_over)
        self.strategy.scaler = self.scaler
        parts: dict[str, Stateful] = {
            "scaler": self.scaler,
            "train_state": state,
            **named("callbacks", callbacks),
            **named("loggers", loggers),
        }
        self.saver = Saver(
            session, self.view, self.optimizer, self.schedule, parts, run_config, past
        )
        self.trained: tuple[str, ...] | None = None
        self.module: torch.nn.Module  # what the loop calls; it and its gradients come from `wrap`
        self.gradients: Gradients
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
        self.strategy.load_state_dict(shared.get("strategy", {}))
        watch.step = self.state.step
        self.agreement = stopping.Agreement(self.state.step)
        self.started = time.monotonic() - self.state.time_s
        with ExitStack() as stack:
            stack.callback(self.strategy.teardown)
            stack.callback(self.batches.close)
            for evaluated in (*self.val_sets.values(), *self.test_sets.values()):
                stack.callback(evaluated.batches.close)
            stack.enter_context(self.saver.open())
            stack.enter_context(self.observers.open())
            if self.config.detect_anomaly:
                stack.enter_context(torch.autograd.set_detect_anomaly(True))
            yield

    def run(self) -> FitResult:
        """Train to the end.

        What happens, in order, on every rank::

            TaskModule.on_fit_start                (then a checkpoint's state, to go on from it)
            Callback.on_fit_start
            each epoch:
                TaskModule.on_epoch_start          (wrap again if requires_grad changed)
                each global batch:
                    each micro-batch of this rank:
                        forward, loss, backward    (gradients are reduced in the last one)
                    gradients: unscale, correct by the true weight
                    TaskModule.before_optimizer_step
                    clip, optimizer.step
                    TaskModule.after_optimizer_step
                    scheduler.step                 (interval "step"; "epoch" at an epoch's end)
                    if due: log                    Callback.on_log, loggers
                    if due: validate               scheduler.step (with a monitor),
                                                   TaskModule.on_validation_end,
                                                   Callback.on_validation_end, loggers
                    if due: save                   Callback.on_save, when it is on disk
                    if requested by a callback or a signal: save, stop
            validate and save once more, unless just done; test the best
            Callback.on_fit_end
        """
        task, state, config, device = self.task, self.state, self.config, self.session.device
        precision, scaler = self.session.precision, self.scaler
        startup.note("open")
        self.observers.tell("on_fit_start")
        self.obey()
        if config.num_sanity_val_steps:
            with self.cut_short():
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
            micros = self.batches.epoch(state.epoch, state.step_in_epoch)
            for micro in watch.loading(micros, then=Phase.FORWARD):
                batch = to_device(micro.batch, device)
                self.logbook.begin(state.step + 1, micro.position, micro.num_samples)
                key = stream_key(config.seed, Stream.FORWARD, state.step, micro.number)
                seed_generators(key, device)
                with nullcontext() if micro.is_last else self.strategy.no_sync():
                    with precision.autocast():
                        # This micro-batch's share of the global batch's loss (see step.py).
                        loss = self.module(batch, micro.num_samples, micro.global_size)
                    watch.enter(Phase.BACKWARD)
                    scaler.scale(loss).backward()
                self.strategy.after_backward(micro)  # reproducible: add up in a fixed order
                if not micro.is_last:
                    continue

                watch.enter(Phase.OPTIMIZER)
                self.gradients.check()
                has_weight = self.gradients.correct(scaler)
                if has_weight:  # else there is nothing to step on
                    if not self.gradients.update_is_plain:  # then it may draw random numbers
                        self.seed_hook(Stream.UPDATE)
                    task.before_optimizer_step()
                    self.gradients.clip()
                    with self.schedule.scaled():  # the learning rate follows the global batch
                        scaler.step(self.optimizer)  # optimizer.step(), unless fp16 overflowed
                    task.after_optimizer_step()
                    scaler.update()
                self.gradients.clear()
                self.schedule.after_step()

                state.step += 1
                state.step_in_epoch += 1
                state.samples += micro.global_size
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

    def seed_hook(self, stream: Stream) -> None:
        """Have the task's hooks and the optimizer draw the same random numbers on every rank.

        The generators are where a rank's last micro-batch left them, which is not the same place.
        """
        seed_generators(stream_key(self.config.seed, stream, self.state.step), self.session.device)

    def wrap(self) -> None:
        """Wrap the step module, anew if other parameters are trained than before, on any rank."""
        trained = trained_names(self.task)
        changed = torch.tensor(int(trained != self.trained or self.strategy.wants_setup))
        if int(distributed.all_reduce_sum(changed)):
            self.strategy.teardown()
            self.module = self.step_module  # lets go of the old wrapper
            self.module = self.strategy.setup(self.step_module, self.session.device)
            clip_norm, may_miss = self.config.gradient_clip_norm, self.strategy.may_miss_gradients
            self.gradients = Gradients(self.step_module, self.optimizer, clip_norm, may_miss)
            self.trained = trained
            startup.note("wrap")

    def end_epoch(self) -> None:
        """Go on to the next epoch."""
        self.state.epoch += 1
        self.state.step_in_epoch = 0
        self.schedule.after_epoch()

    def after_step(self) -> None:
        """Log, validate and save where this step calls for it, and obey what is asked for."""
        state = self.state
        if self.strategy.wants_setup:
            self.wrap()
        self.stop_reason = limit_reached(self.config, state)
        log, validate, save = due(self.config, state)
        if log:
            self.log()
        if validate:
            self.validate()
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
        is_first = self.state.logged_step == 0
        self.state.logged_step = self.state.step
        pace = self.pace.table(self.strategy.take_comm_times)
        logged = self.logbook.reduce(beside=pace)
        means = metrics.merged(logged, metrics.compute(self.train_metrics))
        values = {f"train/{name}": v for name, v in means.items()} | self.pace.measured(pace)
        self.view.learning_rates = self.schedule.named_rates()
        if is_first and "loss" not in means:
            note_untrained(self.state.step)
        self.view.record(values)
        self.observers.tell("on_log", values)
        self.write(values)

    def validate(self) -> None:
        """Evaluate the validation sets, unless a signal cuts it short."""
        if not self.val_sets or self.state.validated_step == self.state.step:
            return
        with self.cut_short():
            values = self.session.evaluate("val", self.val_sets)
            self.state.validated_step = self.state.step
            self.schedule.after_validation(values)
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
            "strategy": self.strategy.state_dict(),
        }
        self.saver.save(shared)

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

    @contextmanager
    def cut_short(self) -> Iterator[None]:
        """Let a signal end an evaluation early, on all ranks."""
        try:
            yield
        except stopping.Stop:
            self.obey()

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
        self.saver.close()
        watch.enter(Phase.FINISHING)
        self.announce_saved()
        if self.test_sets and self.signal is None:
            with self.cut_short():
                self.test_best()
        self.observers.tell("on_fit_end")
        return FitResult.of(self.view, self.stop_reason, self.signal)

    def test_best(self) -> None:
        """Test the best checkpoint; the task has its last weights again afterwards."""
        best = distributed.broadcast_object(self.view.best_checkpoint)
        last = copy.deepcopy(self.task.state_dict())
        try:
            if best is not None:
                self.session.load(self.run_dir, best)
            self.write(self.session.evaluate("test", self.test_sets))
        finally:
            self.task.load_state_dict(last)
