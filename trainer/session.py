"""What fit, validate, test and predict set up alike on every rank: device, precision, data."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler

from trainer import distributed, metrics
from trainer.checkpoint.changes import describe_data
from trainer.checkpoint.finding import find, run_place
from trainer.checkpoint.past import Past
from trainer.checkpoint.weights import load_weights
from trainer.config import DEFAULT_GLOBAL_BATCH_SIZE, TrainerConfig
from trainer.data.advice import faster_loading
from trainer.data.batches import evaluation_batches, train_batches
from trainer.data.loading import Batches, LoaderOptions, Source, length, open_source
from trainer.data.module import DataModule, evaluation_sets, prepare
from trainer.data.plan import GlobalBatchPlan
from trainer.evaluation import EvaluationSet, evaluate, predict
from trainer.global_loss import check_plan
from trainer.loggers import Logger
from trainer.precision import Precision
from trainer.run import Run
from trainer.seeding import seed_everything
from trainer.state import TrainState
from trainer.strategies import Strategy
from trainer.task import RunFacts, TaskModule


class Session:
    """A rank that is ready to compute: the task on its device, and the data at hand.

    Attributes:
        config: The options.
        task: The user's module, on ``device``.
        device: This rank's device.
        precision: Autocast.
        data_order: What the order of the training samples follows from, in plain values.
        faster_loading: What to try where training waits for its data.
        plan: How global batches are cut, once the training data is open.
        can_stop: Whether a signal may cut an evaluation short; a fit makes up for it later.
    """

    def __init__(self, config: TrainerConfig, task: TaskModule, data: DataModule) -> None:
        self.config = config
        self.task = task
        self.device = distributed.device(distributed.accelerator(config.accelerator))
        if self.device.type == "cuda":  # also where a script has set up the group
            torch.cuda.set_device(self.device)
        self.precision = Precision(config.precision, self.device)
        self._data = data
        self.data_order: dict[str, Any] = {}
        self.faster_loading: tuple[str, ...] = ()
        self.can_stop = False
        self._found: dict[str, dict[str, Any]] = {}  # evaluation data by split, asked for once
        self._train_batch_size: int | None = None
        self.plan: GlobalBatchPlan
        self._options = LoaderOptions(
            num_workers=config.num_workers,
            pin_memory=self.device.type == "cuda"
            if config.pin_memory == "auto"
            else bool(config.pin_memory),
            seed=config.seed,
            count=task.batch_size,
            reproducible=config.reproducible,
        )
        distributed.run_once_per_machine(lambda: prepare(data), data.prepare_timeout_s)
        # The ranks build their datasets from the same random numbers, however they were started.
        seed_everything(config.seed)
        task.run = RunFacts(
            rank=distributed.rank(), world_size=distributed.world_size(), device=self.device
        )
        task._start(self.device)

    def train_batches(self) -> tuple[Batches, GlobalBatchPlan]:
        """Return this rank's training data and how its global batches are cut.

        Raises:
            ValueError: If the data or the sizes do not allow it.
        """
        config = self.config
        source = self._open(self._data.train_dataset(), "train")
        plan = GlobalBatchPlan(
            self._global_batch_size(source), config.micro_batch_size, halving=config.reproducible
        )
        world_size = distributed.world_size()
        size = self._train_batch_size = plan.global_batch_size
        if size is not None and size < world_size:
            raise ValueError(
                f"global_batch_size={size} is smaller than the world size of {world_size}, so some "
                f"ranks would never have a sample; raise it to at least {world_size} or lower "
                f"devices to at most {size}"
            )
        batches = train_batches(
            source,
            plan,
            self._options,
            shuffle=config.shuffle,
            drop_last=config.drop_last,
            limit=config.limit_train_batches,
            overfit=config.overfit_batches,
            indices=self._data.train_indices if self._data.orders_epochs else None,
        )
        check_plan(self.task, plan, world_size)
        self.plan, self._always_full = plan, self._is_always_full(source, plan)
        by_indices = self._data.orders_epochs
        self.data_order = describe_data(config, source, size, by_indices) | batches.order_facts()
        self.faster_loading = faster_loading(source, config.num_workers)
        return batches, plan

    def check_strategy(self, strategy: Strategy) -> None:
        """Refuse a strategy that does not allow the way in which global batches are cut."""
        strategy.check(self.plan, self.device, self._always_full)

    def check_undivided(self) -> None:
        """Refuse global batches of which a rank has no sample, or more than one micro-batch.

        Raises:
            ValueError: Saying which options to change.
        """
        plan, world_size, name = self.plan, distributed.world_size(), type(self.task).__name__
        size = plan.global_batch_size
        if size is not None and plan.accumulation_steps(size, world_size) > 1:
            raise ValueError(
                f"{name} optimizes itself, so it accumulates gradients itself too; set "
                f"micro_batch_size=null (now {plan.micro_batch_size}), and give it smaller global "
                "batches"
            )
        if world_size > 1 and not self._always_full:
            raise ValueError(
                f"{name} optimizes itself, so every rank needs a sample in every step; on "
                f"{world_size} ranks set drop_last=true (a DataLoader has its own)"
            )

    def evaluation_sets(
        self, split: str, limit: int | None = None, required: bool = False
    ) -> dict[str, EvaluationSet]:
        """Return this rank's part of every ``val`` or ``test`` set, by metric prefix.

        Args:
            split: ``val`` or ``test``.
            limit: At most so many global batches; None for ``limit_<split>_batches``.
            required: Whether to refuse to go on without any.

        Raises:
            ValueError: If there is no such data, and it is required.
        """
        limit = limit or getattr(self.config, f"limit_{split}_batches")
        if split not in self._found:
            self._found[split] = evaluation_sets(self._data, split)
        if required and not self._found[split]:
            raise ValueError(
                f"there is no {split} data: {type(self._data).__name__}.{split}_dataset() returned "
                "None"
            )
        return {
            prefix: EvaluationSet(
                self._evaluation_batches(found, prefix, limit, together=self.task.global_loss),
                metrics.place(
                    self.task.build_metrics(split), self.device, self.config.reproducible
                ),
            )
            for prefix, found in self._found[split].items()
        }

    def predict_batches(self) -> Batches:
        """Return this rank's part of the data to predict for."""
        found = self._data.predict_dataset()
        if found is None:
            raise ValueError(
                f"there is no data to predict for: {type(self._data).__name__}.predict_dataset() "
                "returned None; define it, or call predict(task, predict=dataset)"
            )
        return self._evaluation_batches(found, "predict", None)

    def train_metrics(self) -> metrics.MetricSet:
        """Return the metrics that are updated while training."""
        config = self.config
        return metrics.place(self.task.build_metrics("train"), self.device, config.reproducible)

    def run_view(
        self,
        run_dir: Path,
        steps_per_epoch: int | None,
        plan: GlobalBatchPlan,
        state: TrainState,
        loggers: Sequence[Logger],
        past: Past | None,
    ) -> Run:
        """Return what callbacks and loggers see of the run."""
        config, world_size = self.config, distributed.world_size()
        size = plan.global_batch_size
        total = config.max_steps
        if steps_per_epoch is not None and config.max_epochs is not None:
            steps = steps_per_epoch * config.max_epochs
            if past is not None:
                steps = past.steps_until(config.max_epochs, steps_per_epoch, size)
            total = steps if total is None else min(total, steps)
        return Run(
            task=self.task,
            config=config,
            run_dir=run_dir,
            world_size=world_size,
            global_batch_size=size,
            micro_batch_size=None if size is None else min(plan.micro(size, world_size), size),
            accumulation_steps=None if size is None else plan.accumulation_steps(size, world_size),
            total_steps=total,
            steps_per_epoch=steps_per_epoch,
            device=str(self.device),
            faster_loading=self.faster_loading,
            _loggers=loggers,
            _state=state,
        )

    def evaluate(self, split: str, sets: Mapping[str, EvaluationSet]) -> dict[str, float]:
        """Return the metrics of ``val`` or ``test``, on every rank.

        Args:
            split: ``val`` or ``test``.
            sets: What `evaluation_sets` returned.
        """
        return evaluate(
            self.task,
            sets,
            split,
            self.precision,
            self.device,
            self.config.seed,
            can_stop=self.can_stop,
        )

    def evaluate_with(
        self, which: Path | None, run_dir: Path, split: str, sets: Mapping[str, EvaluationSet]
    ) -> dict[str, float]:
        """Return the metrics that a checkpoint's weights have; the task keeps its own.

        Args:
            which: The checkpoint; None for the weights as they are.
            run_dir: The folder of the run.
            split: As for `evaluate`.
            sets: Likewise.
        """
        last = copy.deepcopy(self.task.state_dict())
        try:
            if which is not None:
                self.load(run_dir, which)
            return self.evaluate(split, sets)
        finally:
            self.task.load_state_dict(last)

    def evaluate_once(self, split: str, limit: int | None = None) -> dict[str, float]:
        """Return the metrics of ``val`` or ``test``, on every rank; the data is let go afterwards.

        Args:
            split: ``val`` or ``test``.
            limit: As for `evaluation_sets`.

        Raises:
            ValueError: If there is no such data.
        """
        sets = self.evaluation_sets(split, limit, required=True)
        with ExitStack() as stack:
            for found in sets.values():
                stack.callback(found.batches.close)
            return self.evaluate(split, sets)

    def predict(self, output_dir: Path | None) -> Any:
        """Return the predictions of every sample on rank 0, or write them to ``output_dir``."""
        seed = self.config.seed
        with closing(self.predict_batches()) as batches:
            return predict(self.task, batches, self.precision, self.device, seed, output_dir)

    def load(self, run_dir: Path, which: str | Path) -> None:
        """Load a checkpoint's weights on rank 0 and share them with every rank."""
        run = run_place(self.config, run_dir)
        distributed.on_first_rank(lambda: load_weights(self.task, find(run, which)))
        self.share_weights()

    def share_weights(self) -> None:
        """Make every rank's weights, buffers and other state of the task those of rank 0."""
        state = self.task.state_dict()
        for value in state.values():
            if isinstance(value, torch.Tensor):
                distributed.broadcast_tensor(value)
        extra = {name: v for name, v in state.items() if not isinstance(v, torch.Tensor)}
        if extra:  # a module's get_extra_state
            self.task.load_state_dict(distributed.broadcast_object(extra), strict=False)
        distributed.share_buffers(self.task)  # those that are in no checkpoint, too

    def _open(self, found: Any, name: str) -> Source:
        source = open_source(found, self._data.collate_fn, name)
        lengths = distributed.all_gather_object(length(source.dataset))
        if len(set(lengths)) > 1:
            raise ValueError(
                f"the {name} data has {', '.join(map(str, lengths))} samples on the ranks; it must "
                "be the same on every rank: the Trainer divides it"
            )
        return source

    def _evaluation_batches(
        self, found: Any, name: str, limit: int | None, together: bool = False
    ) -> Batches:
        config = self.config
        source = self._open(found, name)
        own = None if source.loader is None else source.batch_size
        in_training = self._train_batch_size or config.global_batch_size
        size = own or in_training or DEFAULT_GLOBAL_BATCH_SIZE
        plan = GlobalBatchPlan(size, config.eval_batch_size or config.micro_batch_size)
        return evaluation_batches(source, plan, self._options, limit=limit, together=together)

    def _global_batch_size(self, source: Source) -> int | None:
        given = self.config.global_batch_size
        if source.loader is None:
            return given or DEFAULT_GLOBAL_BATCH_SIZE
        if given is not None:
            raise ValueError(
                f"global_batch_size={given} is given, and the training data is a DataLoader, whose "
                "batches are the global batches; leave global_batch_size out, or give the dataset "
                "instead of the loader"
            )
        return source.batch_size

    def _is_always_full(self, source: Source, plan: GlobalBatchPlan) -> bool:
        """Whether every global batch has the size that the plan says."""
        if plan.global_batch_size is None or source.is_stream:
            return False
        if source.loader is not None:
            batches = source.loader.batch_sampler
            # A sampler of another class may ignore what it has inherited.
            return type(batches) is BatchSampler and batches.drop_last
        if self.config.drop_last:
            return True
        is_whole = len(source.dataset) % plan.global_batch_size == 0
        return is_whole and not self._data.orders_epochs
