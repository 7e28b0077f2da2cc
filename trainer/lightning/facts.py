"""What a LightningModule finds in ``self.trainer``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer import distributed
from trainer.lightning.collectives import Strategy
from trainer.lightning.manual import Clipping
from trainer.lightning.shown_loggers import NotAFactError, Silent, shown_loggers

if TYPE_CHECKING:
    from trainer.lightning.module import LightningTask

PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class TrainerFacts:
    """The facts of a run under the names of Lightning's Trainer; read-only.

    What stands nowhere here raises an error that says so.
    """

    barebones = False
    progress_bar_callback = None
    min_epochs = None
    min_steps = None
    accumulate_grad_batches = 1  # a batch of the loader is a global batch, and so a step
    val_check_interval = 1.0

    def __init__(self, task: LightningTask, device: torch.device) -> None:
        self._task = task
        self._device = device
        self.optimizers: list[torch.optim.Optimizer] = []
        self.lr_scheduler_configs: list[Any] = []
        self.callback_metrics: dict[str, torch.Tensor] = {}
        self.current_epoch = 0
        self.step_is_over = False
        self.is_started = False
        self.datamodule = task.data.datamodule
        self.strategy = Strategy(task, device)
        self.precision_plugin = Clipping()
        config = task.config
        self.precision = PRECISIONS[config.precision]
        self.max_epochs = -1 if config.max_epochs is None else config.max_epochs
        self.max_steps = -1 if config.max_steps is None else config.max_steps
        self.log_every_n_steps = config.log_every_n_steps
        self.check_val_every_n_epoch = config.validate_every_n_epochs
        self.gradient_clip_val = config.gradient_clip_norm
        self.gradient_clip_algorithm = None
        self.fast_dev_run = config.fast_dev_run
        self.overfit_batches = config.overfit_batches

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python itself asks, for a copy say
            raise AttributeError(name)
        known = {*vars(self), *vars(type(self))}
        raise NotAFactError(
            f"self.trainer.{name} is not known here. A LightningModule finds these in "
            f"self.trainer: {', '.join(sorted(n for n in known if not n.startswith('_')))}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "should_stop":
            raise ValueError(
                "self.trainer.should_stop = ... does not stop a run here, where all ranks have to "
                "agree; use the callback trainer.callbacks.EarlyStopping, or max_steps"
            )
        super().__setattr__(name, value)

    @property
    def lightning_module(self) -> Any:
        """The user's module."""
        return self._task.module

    model = lightning_module

    @property
    def global_step(self) -> int:
        """Optimizer steps done; one per global batch, however many optimizers there are."""
        return self._task.run.step + self.step_is_over

    @property
    def global_rank(self) -> int:
        """This rank's number."""
        return distributed.rank()

    @property
    def local_rank(self) -> int:
        """This rank's number on its machine."""
        return distributed.local_rank()

    @property
    def node_rank(self) -> int:
        """The number of this rank's machine."""
        return distributed.node_rank()

    @property
    def num_nodes(self) -> int:
        """The number of machines."""
        return distributed.num_nodes()

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return distributed.world_size()

    @property
    def num_devices(self) -> int:
        """The number of ranks on this machine."""
        return distributed.local_world_size()

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return distributed.rank() == 0

    @property
    def num_training_batches(self) -> int | float:
        """Global batches in an epoch; infinite if only the data's end tells."""
        steps = self._known(self._task.run.steps_per_epoch, "num_training_batches")
        return float("inf") if steps is None else steps

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole run; infinite if only the data's end tells."""
        steps = self._known(self._task.run.total_steps, "estimated_stepping_batches")
        return float("inf") if steps is None else steps

    @property
    def train_dataloader(self) -> Any:
        """What the training data comes from; None before it is open."""
        return self._task.data.loaders.get("train")

    @property
    def val_dataloaders(self) -> Any:
        """What the validation data comes from, likewise."""
        return self._task.data.loaders.get("val")

    @property
    def is_last_batch(self) -> bool:
        """Whether this is the last global batch of the epoch."""
        return self._task.run.step_in_epoch + 1 == self._task.run.steps_per_epoch

    @property
    def training(self) -> bool:
        """Whether a training step or a hook around it runs."""
        return self._task.run.split == "train"

    @property
    def sanity_checking(self) -> bool:
        """Whether the validation before the first step runs."""
        return self._task.stage == "fit" and self._task.run.split == "val" and not self.is_started

    @property
    def validating(self) -> bool:
        """Whether validation runs."""
        return self._task.run.split == "val" and not self.sanity_checking

    @property
    def testing(self) -> bool:
        """Whether a test runs."""
        return self._task.run.split == "test"

    @property
    def predicting(self) -> bool:
        """Whether predictions are made."""
        return self._task.run.split == "predict"

    @property
    def evaluating(self) -> bool:
        """Whether validation or a test runs."""
        return self._task.run.split in ("val", "test")

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """The latest value of everything that was logged."""
        return self.callback_metrics

    progress_bar_metrics = logged_metrics

    @property
    def loggers(self) -> list[Any]:
        """The loggers of the run, those with an ``experiment`` first; silent ones elsewhere."""
        if not self.is_global_zero:
            return [Silent()]
        return shown_loggers(self._task.run._loggers)

    @property
    def logger(self) -> Any:
        """The first logger; None where there is none."""
        return self.loggers[0] if self.loggers else None

    @property
    def default_root_dir(self) -> str:
        """The folder of the run; where there is none, the current one unless ``run_dir`` is set."""
        if self._task.run.run_dir is not None:
            return str(self._task.run.run_dir)
        if self._task.stage == "fit":
            raise ValueError(
                "self.trainer.default_root_dir and log_dir are not known yet: read them in "
                "configure_optimizers or later"
            )
        return str(self._task.config.run_dir or Path.cwd())

    log_dir = default_root_dir

    def note(self, values: Mapping[str, float]) -> None:
        """Have the module find these in ``callback_metrics``."""
        for name, value in values.items():
            self.callback_metrics[name] = torch.tensor(value)
            if name.endswith("_epoch"):
                self.callback_metrics[name.removesuffix("_epoch")] = torch.tensor(value)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0."""
        if self.is_global_zero:
            print(*args, **kwargs)

    def _known(self, steps: int | None, name: str) -> int | None:
        if steps == 0:  # no run has so few
            raise ValueError(
                f"self.trainer.{name} is not known yet: read it in configure_optimizers or later"
            )
        return steps
