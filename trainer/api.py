"""The `Trainer`: from options to ranks, and from ranks to results.

What a rank then does is in ``trainer.py``.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from trainer import distributed, startup, stopping
from trainer.callbacks import Callback, default_callbacks
from trainer.compiling import compiled
from trainer.config import TrainerConfig
from trainer.contract import check_contract
from trainer.data.module import DataModule
from trainer.exact.determinism import deterministic_algorithms
from trainer.guard import no_collectives
from trainer.instantiate import instantiate_all
from trainer.launching.launcher import launch, starts_ranks, this_machine
from trainer.launching.rank import in_child
from trainer.lightning.adapting import LOADERS, adapted
from trainer.loggers import Logger, default_loggers
from trainer.loggers.lightning import adopt
from trainer.notes import print_notes
from trainer.options import from_options
from trainer.run import FitResult
from trainer.run_dir import choose_run_dir
from trainer.seeding import seed_everything
from trainer.session import Session
from trainer.state import TrainState
from trainer.task import RunFacts, TaskModule
from trainer.trainer import Training

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from trainer.finding.lr_report import LRReport
    from trainer.finding.micro_batch_report import MicroBatchReport
    from trainer.planning.report import PlanReport
    from trainer.verify.report import VerifyReport

    AnyTask: TypeAlias = TaskModule | LightningModule


class Trainer:
    """Trains a `TaskModule` over one or many processes; the world size is an execution detail.

    Example:
        ``result = Trainer(devices=4, max_epochs=2).fit(task, train=dataset, val=other)``
    """

    def __init__(self, *, callbacks: Any = None, logger: Any = None, **options: Any) -> None:
        """Check the options and seed the random generators.

        Args:
            callbacks: A `Callback` (or a config node), or a sequence of them, to add to the default
                ones (learning rate, throughput, progress); one of the same class takes the place of
                a default. False for none at all; a mapping by name is the whole set.
            logger: Likewise of `Logger` objects, the default ones being metrics.jsonl and
                TensorBoard.
            options: Any option of `TrainerConfig`.

        Raises:
            ValueError: For an unknown option or a value that is not allowed.
        """
        self.config = TrainerConfig.from_options(options)
        self.run_config: Mapping[str, Any] = {"trainer": asdict(self.config)}
        self._callbacks = callbacks
        self._logger = adopt(logger)
        self._state = TrainState()
        self._run_dir: Path | None = None
        if self.config.fast_dev_run:
            self.config = replace(
                self.config, max_steps=1, limit_val_batches=1, limit_test_batches=1
            )
        seed_everything(self.config.seed)

    def fit(
        self,
        task: AnyTask,
        data: Any = None,
        val_dataloaders: Any = None,
        *,
        train: Any = None,
        val: Any = None,
        test: Any = None,
        test_best: bool = False,
        **spelled: Any,
    ) -> FitResult:
        """Train ``task``; it has the last weights afterwards.

        Args:
            task: What to train: a `TaskModule`, or a LightningModule as it is.
            data: Where the samples come from: a `DataModule` or LightningDataModule; or give
                datasets or loaders by name instead. For a LightningModule also its loader.
            val_dataloaders: The validation data, as Lightning's Trainer takes it.
            train: The training data.
            val: The validation data, or a dict of several.
            test: The test data.
            test_best: Whether to test the best checkpoint at the end, in the same launch.
            spelled: Data as Lightning's Trainer takes it: ``datamodule``, ``train_dataloaders``.

        Returns:
            The result; None on ranks other than 0 if a launcher such as torchrun started them,
            and on machines other than the first if each starts its own ranks.

        Raises:
            ValueError: For a mistake in the task, the data or the options.
            NotFiniteError: A ValueError: the loss or a weight became NaN or infinite.
            SystemExit: With code 143, after SIGTERM or SIGUSR1, when the run is saved.
            KeyboardInterrupt: After Ctrl-C, when the run is saved; after a second one at once.
        """
        self.config.check_limits()
        given = {"train": train, "val": val, "test": test}
        spelled["val_dataloaders"] = val_dataloaders
        task, module = adapted(task, data, "fit", self.config, given, spelled)
        result: FitResult = self._launch(self._fit, True, task, module, test_best)
        if result is not None:
            self._run_dir = result.run_dir
            # A signal may have come too late to stop the run; it ends this process all the same.
            number = stopping.received() or result.signal
            if number is not None:
                tells = self._is_first_machine()
                stopping.end_process(number, result.step, result.last_checkpoint, tells)
        return result if self._is_first_machine() else None  # type: ignore[return-value]

    def validate(
        self,
        task: AnyTask,
        data: Any = None,
        *,
        val: Any = None,
        ckpt_path: str | Path | None = None,
        **spelled: Any,
    ) -> dict[str, float]:
        """Return the validation metrics (``val/loss``, ...) of ``task``.

        Args:
            task: What to evaluate; it gets the checkpoint's weights if one is named.
            data: Where the samples come from; or give ``val`` instead.
            val: The validation data, or a dict of several.
            ckpt_path: ``best``, ``last`` or a path; None for the weights as they are.
            spelled: Data as Lightning's Trainer takes it: ``datamodule``, ``dataloaders``.

        Returns:
            Each metric over all samples, by name; None on ranks other than 0 if a launcher started
            them.

        Raises:
            ValueError: If the task or the data is incomplete, or the checkpoint is missing,
                damaged or of another task.
        """
        given = {"val": val}
        task, module = adapted(task, data, "validate", self.config, given, spelled)
        found: dict[str, float] = self._launch(
            self._evaluate, ckpt_path is not None, task, module, "val", ckpt_path
        )
        return found

    def test(
        self,
        task: AnyTask,
        data: Any = None,
        *,
        test: Any = None,
        ckpt_path: str | Path | None = None,
        **spelled: Any,
    ) -> dict[str, float]:
        """Return the test metrics (``test/loss``, ...) of ``task``.

        Args:
            task: What to evaluate; it gets the checkpoint's weights if one is named.
            data: Where the samples come from; or give ``test`` instead.
            test: The test data, or a dict of several.
            ckpt_path: ``best``, ``last`` or a path; None for the weights as they are.
            spelled: Data as Lightning's Trainer takes it: ``datamodule``, ``dataloaders``.

        Returns:
            Each metric over all samples, by name; None on ranks other than 0 if a launcher started
            them.

        Raises:
            ValueError: If the task or the data is incomplete, or the checkpoint is missing,
                damaged or of another task.
        """
        given = {"test": test}
        task, module = adapted(task, data, "test", self.config, given, spelled)
        found: dict[str, float] = self._launch(
            self._evaluate, ckpt_path is not None, task, module, "test", ckpt_path
        )
        return found

    def predict(
        self,
        task: AnyTask,
        data: Any = None,
        *,
        predict: Any = None,
        ckpt_path: str | Path | None = None,
        output_dir: str | Path | None = None,
        **spelled: Any,
    ) -> Any:
        """Return ``task.predict`` of every sample, in dataset order.

        Args:
            task: What predicts; it gets the checkpoint's weights if one is named.
            data: Where the samples come from; or give ``predict`` instead.
            predict: The data to predict for.
            ckpt_path: ``best``, ``last`` or a path; None for the weights as they are.
            output_dir: Write one file per micro-batch there instead, named by position, and
                return the folder: for predictions that do not fit into memory. What
                `load_predictions` reads.
            spelled: Data as Lightning's Trainer takes it: ``datamodule``, ``dataloaders``.

        Returns:
            Tensors with a row, or lists with an entry, for each sample, or dicts and tuples of
            these, on the CPU; with ``output_dir`` that. None on ranks other than 0 if a launcher
            started them.

        Raises:
            ValueError: If the task or the data is incomplete, or the checkpoint is missing,
                damaged or of another task; if what is predicted cannot be told apart by sample, or
                ``output_dir`` holds predictions already.
        """
        given = {"predict": predict}
        task, module = adapted(task, data, "predict", self.config, given, spelled)
        return self._launch(
            self._predict, ckpt_path is not None, task, module, ckpt_path, output_dir
        )

    def verify(
        self,
        task: AnyTask,
        data: Any = None,
        *,
        train: Any = None,
        val: Any = None,
        steps: int = 20,
    ) -> VerifyReport:
        """Compare a few training steps on one process with the same on ``devices`` (at least 2).

        Everything runs in processes of its own: ``task`` and the random generators here stay as
        they are, nothing is validated, logged or saved. The report is also written to
        ``verify.json`` and ``verify.png`` in the run's folder.

        Args:
            task: What a fit would train.
            data: Where the samples come from; or give ``train`` instead.
            train: The training data.
            val: The validation data of that fit. It is not used, so a schedule that follows a
                metric stays where it starts.
            steps: How many steps to compare, at most ``max_steps``.

        Returns:
            What was found, also where the runs failed: ``passed``, ``checks``, and as text.

        Raises:
            ValueError: If the task is incomplete, or ranks cannot be started from here.
        """
        from trainer.verify.verification import verify

        given = {"train": train, "val": val}
        task, module = adapted(task, data, "fit", self.config, given, {})
        check_contract(task, to_fit=True)
        return verify(self.config, self._on_rank, task, module, steps)

    def plan(
        self,
        task: AnyTask,
        data: Any = None,
        *,
        train: Any = None,
        val: Any = None,
        **options: Any,
    ) -> PlanReport | None:
        """Measure a few steps on the ranks there are, and simulate more of them, up to thousands.

        ``task`` has its own weights afterwards. The report is also written to ``plan.json`` and
        ``plan.png`` in the run's folder.

        Args:
            task: What a fit would train.
            data: Where the samples come from; or give ``train`` instead.
            train: The training data.
            val: The validation data of that fit; it is not used.
            options: Any option of `PlanConfig` (``max_ranks``, ``bandwidth_gbps``, ...).

        Returns:
            The tables, also as text; None on ranks other than 0 if a launcher started them.

        Raises:
            ValueError: If the task is incomplete, or a step of it cannot be simulated.
        """
        from trainer.planning.measuring import measure
        from trainer.planning.options import PlanConfig
        from trainer.planning.planning import plan

        spelled = _taken_out(options)
        config = from_options(PlanConfig, options)
        given = {"train": train, "val": val}
        task, module = adapted(task, data, "fit", self.config, given, spelled)
        check_contract(task, to_fit=True)
        measured = self._launch(measure, False, task, module, self.config, config.steps)
        return None if measured is None else plan(measured, self.config, config)

    def find_lr(
        self, task: AnyTask, data: Any = None, *, train: Any = None, val: Any = None, **options: Any
    ) -> LRReport | None:
        """Train a few steps with a learning rate that rises, to see where the loss falls fastest.

        ``task`` has its own weights afterwards. The report is also written to ``find_lr.json`` and
        ``find_lr.png`` in the run's folder.

        Args:
            task: What a fit would train.
            data: Where the samples come from; or give ``train`` instead.
            train: The training data.
            val: The validation data of that fit; it is not used.
            options: Any option of `FindLRConfig` (``min_lr``, ``max_lr``, ``steps``, ...).

        Returns:
            The curve and the ``suggestion``, also as text; None on ranks other than 0 if a
            launcher started them.

        Raises:
            ValueError: If the task is incomplete, or has no learning rate to sweep.
        """
        from trainer.finding.learning_rate import find_lr
        from trainer.finding.options import FindLRConfig

        given = {"train": train, "val": val}, _taken_out(options)
        config = from_options(FindLRConfig, options)
        report: LRReport | None = self._find(find_lr, task, data, *given, config)
        return report

    def find_micro_batch_size(
        self, task: AnyTask, data: Any = None, *, train: Any = None, val: Any = None, **options: Any
    ) -> MicroBatchReport | None:
        """Try how many samples a rank can take at once, on all ranks: the smallest one decides.

        ``task`` has its own weights afterwards. The report is also written to
        ``find_micro_batch_size.json`` in the run's folder.

        Args:
            task: What a fit would train.
            data: Where the samples come from; or give ``train`` instead.
            train: The training data.
            val: The validation data of that fit; it is not used.
            options: Any option of `FindMicroBatchSizeConfig` (``memory_limit_mb``).

        Returns:
            What to write in the config, also as text; None on ranks other than 0 if a launcher
            started them.

        Raises:
            ValueError: If the task is incomplete, if its micro-batches cannot be tried apart from
                other ranks, or if there is no limit to find.
        """
        from trainer.finding.micro_batch import find_micro_batch_size
        from trainer.finding.options import FindMicroBatchSizeConfig

        given = {"train": train, "val": val}, _taken_out(options)
        config = from_options(FindMicroBatchSizeConfig, options)
        report: MicroBatchReport | None = self._find(
            find_micro_batch_size, task, data, *given, config
        )
        return report

    def _find(
        self,
        job: Callable[..., Any],
        task: AnyTask,
        data: Any,
        given: dict[str, Any],
        spelled: dict[str, Any],
        options: Any,
    ) -> Any:
        """Return the report of a finder, which is written where the results are this process's."""
        task, module = adapted(task, data, "fit", self.config, given, spelled)
        check_contract(task, to_fit=True)
        report: Any = self._launch(job, False, task, module, self.config, options)
        if report is not None:
            report.write()
        return report

    def _launch(
        self, job: Callable[..., Any], changes_weights: bool, task: TaskModule, *args: Any
    ) -> Any:
        """Run ``job(task, *args)`` on all ranks; afterwards ``task`` is as the ranks left it."""
        startup.note("script")
        is_fit = job == self._fit
        check_contract(task, to_fit=is_fit)
        if is_fit and starts_ranks(self.config):
            # Here, so that ranks which are started again write to the same folder.
            args = (*args, choose_run_dir(self.config))
        outcome = launch(
            self._on_rank,
            job,
            changes_weights,
            task,
            *args,
            config=self.config,
            where=self._where,
            can_stop=is_fit,
        )
        startup.begin()  # of the next one
        if outcome is None:
            return None
        result, weights = outcome
        if weights is not None:
            task.load_state_dict(weights)
        return result if is_fit or self._is_first_machine() else None

    def _on_rank(
        self,
        job: Callable[..., Any],
        changes_weights: bool,
        task: TaskModule,
        data: DataModule,
        *args: Any,
    ) -> tuple[Any, dict[str, Any] | None]:
        """Run a job on a rank; return the weights too if the caller has another process."""
        matmul_precision = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision(self.config.matmul_precision or matmul_precision)
            exact = deterministic_algorithms() if self.config.reproducible else nullcontext()
            with exact, compiled(task, self.config):
                result = job(task, data, *args)
        except BaseException as error:
            data._end(error)
            task._end(error)
            raise
        finally:
            torch.set_float32_matmul_precision(matmul_precision)
            task.run = RunFacts()
        data._end(None)
        task._end(None)
        travels = changes_weights and in_child() and distributed.local_rank() == 0
        return result, task.state_dict() if travels else None

    def _is_first_machine(self) -> bool:
        """Whether the results are this process's: rank 0 is on its machine, or it is a rank."""
        machine = None if in_child() else this_machine(self.config)
        return machine is None or machine.rank == 0

    def _where(self) -> str:
        return f"step {self._state.step}"

    def _fit(
        self, task: TaskModule, data: DataModule, test_best: bool, run_dir: Path | None = None
    ) -> FitResult:
        # Built here, so that a logger knows nothing of ranks: only rank 0 has any.
        is_first = distributed.rank() == 0
        callback = self._callbacks if is_first else False
        logger = self._logger if is_first and not self.config.fast_dev_run else False
        with no_collectives("the making of callbacks and loggers"):
            callbacks = instantiate_all(callback, Callback, "callbacks", default_callbacks)
            loggers = instantiate_all(logger, Logger, "logger", default_loggers, adopt)
        run_config = {**self.run_config, **task._config()}
        session = Session(self.config, task, data)
        startup.note("prepare")
        self._state = TrainState()
        training = Training(
            session,
            self._state,
            callbacks,
            loggers,
            run_dir or choose_run_dir(self.config),
            run_config,
            test_best,
        )
        training.view.run_config = run_config
        hosts = distributed.gather_object(socket.gethostname())
        training.view.hosts = list(dict.fromkeys(hosts or ()))
        startup.note("set up")
        print_notes(task, training.plan, self.config)
        # A rank that was started here has noted signals from its start.
        with nullcontext() if in_child() else stopping.noted(), training.open():
            result = training.run()
        if not in_child():
            distributed.wait_for_first_rank()  # which may still write the last checkpoint
            number = stopping.received() or result.signal
            if number is not None and distributed.rank():  # only rank 0 has a result
                stopping.end_process(number, result.step, result.last_checkpoint)
        return result

    def _evaluate(
        self, task: TaskModule, data: DataModule, split: str, ckpt_path: str | Path | None
    ) -> dict[str, float]:
        return self._session(task, data, ckpt_path).evaluate_once(split)

    def _predict(
        self,
        task: TaskModule,
        data: DataModule,
        ckpt_path: str | Path | None,
        output_dir: str | Path | None,
    ) -> Any:
        folder = None if output_dir is None else Path(output_dir)
        return self._session(task, data, ckpt_path).predict(folder)

    def _session(self, task: TaskModule, data: DataModule, ckpt_path: str | Path | None) -> Session:
        session = Session(self.config, task, data)
        if ckpt_path is not None:
            session.load(self._run_dir or Path(self.config.run_dir or "."), ckpt_path)
        return session


def _taken_out(options: dict[str, Any]) -> dict[str, Any]:
    """Take data by the names of Lightning's Trainer out of ``options``."""
    return {n: options.pop(n) for n in ("datamodule", *LOADERS["fit"]) if n in options}
