"""The Trainer, and the training loop: what happens in a run, from top to bottom.

`Trainer` is what a user calls; it starts the ranks. `Training` is one ``fit`` on one rank, and
`Training.run` is the loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trainer import checkpoint, distributed, metrics
from trainer.callbacks import Callback, default_callbacks
from trainer.checkpoint import CheckpointWriter, Snapshot
from trainer.config import TrainerConfig
from trainer.data import DataModule, as_data_module
from trainer.evaluation import evaluate, evaluating, predict, share_buffers
from trainer.gradients import Gradients, trained_names
from trainer.instantiate import instantiate_all
from trainer.launcher import in_child, launch
from trainer.logbook import Logbook
from trainer.loggers import Logger, default_loggers
from trainer.optimization import configure_optimizer
from trainer.run_dir import choose_run_dir
from trainer.seeding import seed_everything, seed_stream
from trainer.session import Session
from trainer.state import FitResult, TrainState
from trainer.step import StepModule
from trainer.task import RunFacts, TaskModule, check_contract
from trainer.trees import to_device


class Trainer:
    """Trains a `TaskModule` over one or many processes; the world size is an execution detail.

    Example:
        ``result = Trainer(devices=4, max_epochs=2).fit(task, train=dataset, val=other)``
    """

    def __init__(self, *, callbacks: Any = None, logger: Any = None, **options: Any) -> None:
        """Check the options and seed the random generators.

        Args:
            callbacks: A sequence of `Callback` objects (or config nodes), or a mapping of them by
                name; None for the default ones (learning rate, throughput, progress).
            logger: Likewise of `Logger` objects; None for metrics.jsonl and TensorBoard.
            options: Any option of `TrainerConfig`.

        Raises:
            ValueError: For an unknown option or a value that is not allowed.
        """
        self.config = TrainerConfig.from_options(options)
        self.run_config: Mapping[str, Any] = {"trainer": asdict(self.config)}
        self._callbacks = callbacks
        self._logger = logger
        self._state = TrainState()
        self._run_dir: Path | None = None
        seed_everything(self.config.seed)

    def fit(
        self,
        task: TaskModule,
        data: DataModule | None = None,
        *,
        train: Any = None,
        val: Any = None,
        test: Any = None,
        test_best: bool = False,
    ) -> FitResult:
        """Train ``task``; it has the last weights afterwards.

        Args:
            task: What to train.
            data: Where the samples come from; or give datasets or loaders by name instead.
            train: The training data.
            val: The validation data, or a dict of several.
            test: The test data.
            test_best: Whether to test the best checkpoint at the end, in the same launch.

        Returns:
            The result; None on ranks other than 0 if a launcher such as torchrun started them.

        Raises:
            ValueError: For a mistake in the task, the data or the options.
            FloatingPointError: If the loss becomes NaN or infinite.
        """
        self.config.check_limits()
        module = as_data_module(data, train=train, val=val, test=test)
        result: FitResult = self._launch(self._fit, task, module, test_best)
        if result is not None:
            self._run_dir = result.run_dir
        return result

    def validate(
        self,
        task: TaskModule,
        data: DataModule | None = None,
        *,
        val: Any = None,
        ckpt_path: str | Path | None = None,
    ) -> dict[str, float]:
        """Return the validation metrics (``val/loss``, ...) of ``task``.

        Args:
            task: What to evaluate; it gets the checkpoint's weights if one is named.
            data: Where the samples come from; or give ``val`` instead.
            val: The validation data, or a dict of several.
            ckpt_path: ``best``, ``last`` or a path; None for the weights as they are.
        """
        module = as_data_module(data, val=val)
        found: dict[str, float] = self._launch(self._evaluate, task, module, "val", ckpt_path)
        return found

    def test(
        self,
        task: TaskModule,
        data: DataModule | None = None,
        *,
        test: Any = None,
        ckpt_path: str | Path | None = None,
    ) -> dict[str, float]:
        """Return the test metrics (``test/loss``, ...); arguments as for `validate`."""
        module = as_data_module(data, test=test)
        found: dict[str, float] = self._launch(self._evaluate, task, module, "test", ckpt_path)
        return found

    def predict(
        self,
        task: TaskModule,
        data: DataModule | None = None,
        *,
        predict: Any = None,
        ckpt_path: str | Path | None = None,
        output_dir: str | Path | None = None,
    ) -> Any:
        """Return ``task.predict`` of every sample, in dataset order.

        Args:
            task: What predicts; it gets the checkpoint's weights if one is named.
            data: Where the samples come from; or give ``predict`` instead.
            predict: The data to predict for.
            ckpt_path: ``best``, ``last`` or a path; None for the weights as they are.
            output_dir: Write one file per micro-batch there instead, named by position, and
                return the folder: for predictions that do not fit into memory.
        """
        module = as_data_module(data, predict=predict)
        return self._launch(self._predict, task, module, ckpt_path, output_dir)

    def _launch(self, job: Callable[..., Any], task: TaskModule, *args: Any) -> Any:
        check_contract(task)
        outcome = launch(_run_job, job, task, *args, config=self.config, where=self._where)
        if outcome is None:
            return None
        result, weights = outcome
        if weights is not None:  # the ranks were processes of their own
            task.load_state_dict(weights)
        return result

    def _where(self) -> str:
        return f"step {self._state.step}"

    def _fit(self, task: TaskModule, data: DataModule, test_best: bool) -> FitResult:
        self._state = TrainState()
        is_first = distributed.rank() == 0
        callbacks = instantiate_all(
            self._callbacks if is_first else (), Callback, "callbacks", default_callbacks
        )
        loggers = instantiate_all(
            self._logger if is_first else (), Logger, "logger", default_loggers
        )
        session = Session(self.config, task, data)
        training = Training(session, self._state, callbacks, loggers, self.run_config)
        with training.open():
            return training.run(test_best)

    def _evaluate(
        self, task: TaskModule, data: DataModule, split: str, ckpt_path: str | Path | None
    ) -> dict[str, float]:
        session = self._evaluation_session(task, data, ckpt_path)
        sets = session.evaluation_sets(split)
        if not sets:
            raise ValueError(
                f"there is no {split} data: {type(data).__name__}.{split}_dataset() returned None"
            )
        return evaluate(task, sets, split, session.precision, session.device)

    def _predict(
        self,
        task: TaskModule,
        data: DataModule,
        ckpt_path: str | Path | None,
        output_dir: str | Path | None,
    ) -> Any:
        session = self._evaluation_session(task, data, ckpt_path)
        folder = None if output_dir is None else Path(output_dir)
        return predict(task, session.predict_batches(), session.precision, session.device, folder)

    def _evaluation_session(
        self, task: TaskModule, data: DataModule, ckpt_path: str | Path | None
    ) -> Session:
        session = Session(self.config, task, data)
        task.run = RunFacts(
            rank=distributed.rank(), world_size=distributed.world_size(), device=session.device
        )
        if ckpt_path is not None:
            session.load(self._run_dir or Path(self.config.run_dir or "."), ckpt_path)
        return session


def _run_job(job: Callable[..., Any], task: TaskModule, *args: Any) -> tuple[Any, Any]:
    """Run one of the Trainer's jobs on a rank; its weights go back if the caller needs them."""
    result = job(task, *args)
    task.run = RunFacts()
    return result, task.state_dict() if in_child() and distributed.rank() == 0 else None


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
        run_config: Mapping[str, Any],
    ) -> None:
        config, task = session.config, session.task
        self.session, self.config, self.task, self.state = session, config, task, state
        self.callbacks, self.loggers, self.run_config = callbacks, loggers, run_config
        self.run_dir = choose_run_dir(config)
        self.batches, plan = session.train_batches()
        self.val_sets = session.evaluation_sets("val")
        self.train_metrics = session.train_metrics()
        self.logbook = Logbook()
        self.view = session.run_view(self.run_dir, self.batches.steps_per_epoch, plan, state)
        self.view.loggers = loggers
        task.run = session.facts(self.view, state, self.logbook)
        self.optimizer, self.schedule = configure_optimizer(task)
        self.strategy = session.strategy()
        self.step_module = StepModule(task, self.logbook, self.train_metrics).to(session.device)
        self.trained: tuple[str, ...] | None = None
        self.writer: CheckpointWriter | None = None
        self.stop_reason: str | None = None
        # The steps at which things were done last, so that nothing is done twice at one step.
        self.logged = self.validated = self.saved = -1
        self.measured: dict[str, int] = {}
        self.started = time.monotonic()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Resume if asked to; open what rank 0 writes, and close it whatever happens."""
        self.resume()
        with ExitStack() as stack:
            stack.callback(self.strategy.teardown)
            if distributed.rank() == 0 and not self.config.fast_dev_run:
                self.writer = CheckpointWriter(
                    self.run_dir / checkpoint.FOLDER, self.config.checkpoint, self.state.step
                )
                stack.callback(self.writer.close)
            for logger in self.loggers:
                stack.callback(logger.close)
                logger.open(self.view)
            for callback in self.callbacks:
                stack.callback(callback.close)
            if self.config.detect_anomaly:
                stack.enter_context(torch.autograd.set_detect_anomaly(True))
            yield

    def run(self, test_best: bool) -> FitResult:
        """Train to the end.

        What happens, in order, on every rank::

        TaskModule.on_fit_start, Callback.on_fit_start
        each epoch:
            TaskModule.on_epoch_start              (wrap again if requires_grad changed)
            each global batch:
                each micro-batch of this rank:
                    forward, loss, backward        (gradients are reduced in the last one)
                gradients: unscale, correct by the true weight
                TaskModule.before_optimizer_step
                clip, optimizer.step
                TaskModule.after_optimizer_step
                scheduler.step                     (interval "step")
                if due: log                        Callback.on_log, loggers
                if due: validate                   TaskModule.on_validation_end,
                                                   Callback.on_validation_end, loggers
                if due: save                       Callback.on_save
                if requested by a callback: save, stop
            scheduler.step                         (interval "epoch", before validation)
        validate and save once more, unless just done; test the best
        Callback.on_fit_end
        """
        task, state, config, device = self.task, self.state, self.config, self.session.device
        precision, scaler = self.session.precision, self.session.precision.scaler
        task.on_fit_start()
        with self.observed():
            for callback in self.callbacks:
                callback.on_fit_start(self.view)
        if config.num_sanity_val_steps:
            sanity = self.session.evaluation_sets("val", limit=config.num_sanity_val_steps)
            evaluate(task, sanity, "val", precision, device)

        while self.stop_reason is None:
            task.on_epoch_start()
            self.wrap()
            metrics.reset(self.train_metrics)
            for micro in self.batches.epoch(state.epoch, state.step_in_epoch):
                is_accumulating = not micro.is_last
                batch = to_device(micro.batch, device)
                self.logbook.begin(state.step + 1, micro.position, micro.num_samples)
                seed_stream(device, config.seed, state.step, micro.number)
                with self.strategy.no_sync() if is_accumulating else nullcontext():
                    with precision.autocast():
                        loss = self.module(batch, micro.num_samples, micro.global_size)
                    scaler.scale(loss).backward()
                if is_accumulating:
                    continue

                self.gradients.check()
                scaler.unscale_(self.optimizer)
                if self.gradients.correct(scaler.get_scale()):
                    task.before_optimizer_step()
                    self.gradients.clip(config.gradient_clip_norm)
                    if scaler.is_enabled():
                        scaler.step(self.optimizer)
                    else:
                        self.optimizer.step()
                    task.after_optimizer_step()
                scaler.update()
                self.gradients.clear()
                self.schedule.after_step()

                state.step += 1
                state.step_in_epoch += 1
                state.samples += micro.global_size
                self.after_step(state.step_in_epoch == self.batches.steps_per_epoch)
                if self.stop_reason is not None:
                    break
            else:
                if state.step_in_epoch:  # only the end of the data told that the epoch is over
                    self.after_step(is_epoch_end=True)
                elif state.step == 0:
                    raise ValueError("the training set is empty: its stream yields no sample")

        return self.finish(test_best)

    def wrap(self) -> None:
        """Wrap the step module, anew if other parameters are trained than before."""
        trained = trained_names(self.task)
        if trained != self.trained:
            self.strategy.teardown()
            self.module = self.strategy.setup(self.step_module, self.session.device)
            self.gradients = Gradients(self.step_module, self.config.find_unused_parameters)
            self.trained = trained

    def after_step(self, is_epoch_end: bool) -> None:
        """Do what is due at this step, and obey what callbacks asked for."""
        config, state = self.config, self.state
        if is_epoch_end or _due(config.log_every_n_steps, state.step):
            self.log()
        if is_epoch_end:
            state.epoch += 1
            state.step_in_epoch = 0
            self.schedule.after_epoch()
        if _due(config.validate_every_n_steps, state.step) or (
            is_epoch_end and _due(config.validate_every_n_epochs, state.epoch)
        ):
            self.validate()
        if _due(config.checkpoint.every_n_steps, state.step) or (
            is_epoch_end and _due(config.checkpoint.every_n_epochs, state.epoch)
        ):
            self.save()
        if state.step in (self.logged, self.validated, self.saved):
            self.obey()
        if state.step == config.max_steps:
            self.stop_reason = f"max_steps={config.max_steps} reached"
        elif state.epoch == config.max_epochs:
            self.stop_reason = f"max_epochs={config.max_epochs} reached"

    def log(self) -> None:
        """Reduce what was logged since the last time and hand it to callbacks and loggers."""
        if self.logged == self.state.step:
            return
        self.logged = self.state.step
        means = {**self.logbook.reduce(), **metrics.compute(self.train_metrics)}
        values = {f"train/{name}": value for name, value in means.items()}
        self.view.learning_rates = self.schedule.named_rates()
        with self.observed():
            for callback in self.callbacks:
                callback.on_log(self.view, values)
        self.record(values)

    def validate(self) -> None:
        """Evaluate the validation sets, and let schedule, task, callbacks and loggers know."""
        if not self.val_sets or self.validated == self.state.step:
            return
        self.validated = self.state.step
        values = evaluate(
            self.task, self.val_sets, "val", self.session.precision, self.session.device
        )
        self.schedule.after_validation(values)
        self.task.on_validation_end(values)
        self.view.metrics.update(values)
        with self.observed():
            for callback in self.callbacks:
                callback.on_validation_end(self.view, values)
        self.record(values)

    def save(self) -> None:
        """Start writing a checkpoint; a loss that is not finite stops the run before."""
        if self.saved == self.state.step or self.config.fast_dev_run:
            return
        self.saved = self.state.step
        self.logbook.check_finite()
        share_buffers(self.task)
        if self.writer is not None:
            self.writer.save(self.snapshot())

    def record(self, values: Mapping[str, float]) -> None:
        """Write one event to the loggers, and tell callbacks of checkpoints completed since."""
        self.view.metrics.update(values)
        for name in values:
            self.measured[name] = self.state.step
        for logger in self.loggers:
            logger.log(self.view, values)

    def obey(self) -> None:
        """Share rank 0's requests and do as they say, on all ranks at the same step."""
        self.announce_saved()
        reason, save = distributed.broadcast_object(self.view.take_requests())
        if save:
            self.save()
        if reason is not None:
            self.stop_reason = reason

    def resume(self) -> None:
        """Take everything back from the checkpoint that ``resume`` names, if there is one."""
        path, state = None, None
        if distributed.rank() == 0 and self.config.resume is not None:
            if self.config.resume == "auto":
                path = checkpoint.newest_valid(self.run_dir)
            else:
                path = checkpoint.find(self.run_dir, self.config.resume)
            if path is not None:
                print(f"resuming from {path}", flush=True)
                state = checkpoint.read_state(path)
        state = distributed.broadcast_object(state)
        if state is None:
            return
        self.session.load(self.run_dir, path)
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.session.precision.scaler.load_state_dict(state["scaler"])
        self.state.load_state_dict(state["train_state"])
        for name, callback in self.named_callbacks():
            if name in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][name])
        self.started = time.monotonic() - self.state.time_s

    def snapshot(self) -> Snapshot:
        """Return everything that a resume needs."""
        self.state.time_s = time.monotonic() - self.started
        return Snapshot(
            step=self.state.step,
            weights=self.task.state_dict(),
            state={
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                "scaler": self.session.precision.scaler.state_dict(),
                "train_state": self.state.state_dict(),
                "callbacks": {name: c.state_dict() for name, c in self.named_callbacks()},
            },
            config=self.run_config,
            world_size=distributed.world_size(),
            metric=self.monitored(),
        )

    def monitored(self) -> float | None:
        """Return the metric that decides which checkpoint is best, if it was measured just now.

        Raises:
            ValueError: If nobody logs it.
        """
        monitor = self.config.checkpoint.monitor
        name = monitor or "val/loss"
        if self.measured.get(name) == self.state.step:
            return self.view.metrics[name]
        if monitor is not None and name not in self.measured and self.state.epoch > 0:
            raise ValueError(
                f"checkpoint.monitor={monitor} is logged by nobody after a whole epoch; there are: "
                f"{', '.join(sorted(self.measured))}"
            )
        return None

    def named_callbacks(self) -> list[tuple[str, Callback]]:
        """Name the callbacks by class and, where one class comes twice, by number."""
        return [(f"{type(c).__name__}-{i}", c) for i, c in enumerate(self.callbacks)]

    def announce_saved(self) -> None:
        """Tell callbacks of the checkpoints that were completed since the last time."""
        if self.writer is None:
            return
        finished = self.writer.finished()
        self.view.last_checkpoint, self.view.best_checkpoint = self.writer.last, self.writer.best
        with self.observed():
            for path in finished:
                for callback in self.callbacks:
                    callback.on_save(self.view, path)

    def finish(self, test_best: bool) -> FitResult:
        """Measure and save the end, test the best weights if asked to, and sum up."""
        if self.config.validate_every_n_epochs or self.config.validate_every_n_steps:
            self.validate()
        self.save()
        if self.writer is not None:
            self.writer.close()
        self.announce_saved()
        if test_best:
            self.test_best()
        with self.observed():
            for callback in self.callbacks:
                callback.on_fit_end(self.view)
        assert self.stop_reason is not None
        state, view = self.state, self.view
        return FitResult(
            state.step,
            state.epoch,
            state.samples,
            view.metrics,
            self.run_dir,
            view.last_checkpoint,
            view.best_checkpoint,
            self.stop_reason,
        )

    def test_best(self) -> None:
        """Test the best checkpoint; the task has its last weights again afterwards."""
        sets = self.session.evaluation_sets("test")
        if not sets:
            raise ValueError("a test after fit was asked for, but test_dataset() returned None")
        best = distributed.broadcast_object(self.view.best_checkpoint)
        last = {name: value.clone() for name, value in self.task.state_dict().items()}
        if best is not None:
            self.session.load(self.run_dir, best)
        self.record(evaluate(self.task, sets, "test", self.session.precision, self.session.device))
        self.task.load_state_dict(last)

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Show callbacks the task in eval mode and without gradients."""
        if not self.callbacks:
            yield
            return
        with evaluating(self.task, "train", None):
            yield


def _due(every: int | None, count: int) -> bool:
    return every is not None and count % every == 0
