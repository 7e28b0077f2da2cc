"""A `TaskModule` as a LightningModule, for Lightning's Trainer."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainer.contract import check_contract, weigh
from trainer.lightning.adapting import PACKAGES
from trainer.state import TrainState
from trainer.task import OptimizerSetup, TaskModule, WeightedLoss

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


def as_lightning(task: TaskModule) -> LightningModule:
    """Return a LightningModule that trains ``task``, which has its weights afterwards.

    Checkpoints that Lightning writes have the task's own names, so ``init_from`` takes them.
    Several ranks under Lightning average the means of their batches, so there a `WeightedLoss` is
    only right on one rank or for equal weights. What ``on_fit_end`` returns goes to the loggers.

    Args:
        task: A complete task, with a loss and an optimizer.

    Raises:
        ValueError: If it is incomplete, or needs what only our Trainer has: several optimizers by
            turns, a loss over the global batch, or steps of its own.
        ModuleNotFoundError: If Lightning is not installed.
    """
    if task.global_loss:
        raise ValueError(
            f"{type(task).__name__} has global_loss=True: Lightning's Trainer shows a loss the "
            "batch of one rank only"
        )
    if task.optimizes_itself:
        raise ValueError(
            f"{type(task).__name__} has optimizes_itself=True: Lightning's Trainer would train it "
            "by its loss, and never call optimize"
        )
    check_contract(task, to_fit=True)
    module: LightningModule = _module_class()(task)
    return module


class _Values:
    """Takes what a task logs to ``self.log`` of the LightningModule."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.num_samples = 1

    def add(self, name: str, value: Any, weight: float | None = None) -> None:
        size = self.num_samples if weight is None else weight
        self._module.report(name, value, size)


def _module_class() -> Any:
    package = next((name for name in PACKAGES if name in sys.modules), PACKAGES[0])
    lightning: Any = import_module(package)

    class TaskAsLightning(lightning.LightningModule):  # type: ignore[misc]
        """Runs a task."""

        def __init__(self, task: TaskModule) -> None:
            super().__init__()
            self.task = task
            self.values: Any = _Values(self)
            self.clock = TrainState()
            self.samples = 0  # those of the batch that is at work included
            self.first_step: int | None = None  # of the epoch; unknown before the first one
            self.split = "train"
            # By split and name; not part of a checkpoint.
            self.metrics: dict[str, dict[str, Any]] = {
                split: {name: metric.clone() for name, metric in found.items()}
                for split in ("train", "val", "test")
                if (found := task.build_metrics(split))
            }
            # They go to the device with the module; no name of theirs can be one of its methods.
            self.moved = nn.ModuleList(m for own in self.metrics.values() for m in own.values())

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return self.task.state_dict(*args, **kwargs)

        def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            return self.task.load_state_dict(state_dict, *args, **kwargs)

        def forward(self, batch: Any) -> Any:
            return self.task(batch)

        def report(self, name: str, value: Any, size: float) -> None:
            self.log(
                name[1:] if name.startswith("/") else f"{self.split}/{name}",
                value,
                on_step=self.split == "train",
                on_epoch=self.split != "train",
                batch_size=int(size) or 1,
                sync_dist=True,
            )

        def configure_optimizers(self) -> Any:
            self._tell("train")
            found = self.task.configure_optimizers()
            if isinstance(found, Mapping):
                raise ValueError(
                    f"{type(self.task).__name__} names its optimizers ({', '.join(found)}), "
                    "which take turns under trainer.Trainer only; return one without a name"
                )
            setup = found if isinstance(found, OptimizerSetup) else OptimizerSetup(found)
            if setup.scheduler is None:
                return setup.optimizer
            interval = "epoch" if setup.monitor else setup.interval or "step"
            schedule = {"scheduler": setup.scheduler, "interval": interval}
            if setup.monitor is not None:
                schedule["monitor"] = setup.monitor
                schedule["reduce_on_plateau"] = isinstance(setup.scheduler, ReduceLROnPlateau)
            return {"optimizer": setup.optimizer, "lr_scheduler": schedule}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self._computed(batch, "train", self.task)
            self.samples += self.values.num_samples * self.trainer.world_size
            return loss

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self._computed(batch, "val", self.task.eval_forward)

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self._computed(batch, "test", self.task.eval_forward)

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            self._tell("predict")
            return self.task.predict(batch)

        def on_fit_start(self) -> None:
            self._tell("train")
            self.task.on_fit_start()

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["samples"] = self.samples

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.clock.samples = self.samples = checkpoint.get("samples", 0)

        def on_train_epoch_start(self) -> None:
            is_resumed = self.first_step is None and self._steps_per_epoch() is not None
            self.first_step = self.global_step
            if is_resumed:  # perhaps in mid-epoch
                self.first_step = self.current_epoch * (self._steps_per_epoch() or 0)
            self._tell("train")
            self.task.on_epoch_start()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.task.before_optimizer_step()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_step > self.clock.step:  # not where gradients accumulate further
                self.task.after_optimizer_step()
            self.clock.samples = self.samples

        def on_validation_end(self) -> None:
            if not self.trainer.sanity_checking:
                self._tell("train")
                known = self.trainer.callback_metrics
                values = {n: float(v) for n, v in known.items() if n.startswith("val/")}
                self.task.on_validation_end(values)

        def on_train_epoch_end(self) -> None:
            self._tell("train", is_over=True)
            for name, value in (self.task.on_epoch_end() or {}).items():
                self.log(name, value)

        def on_train_end(self) -> None:
            values = dict(self.task.on_fit_end() or {})
            for logger in self.loggers if values else ():  # Lightning's self.log is over by now
                logger.log_metrics(values, self.global_step)
            self.first_step = None
            self.task.run = type(self.task.run)()

        def _computed(self, batch: Any, split: str, forward: Any) -> Any:
            self._tell(split)
            size = self.values.num_samples = self.task.batch_size(batch)
            outputs = forward(batch)
            loss = self.task.loss(outputs, batch)
            value, weight = weigh(loss, size, needs_grad=split == "train")
            for name, metric in self.metrics[split].items() if split in self.metrics else ():
                self.log(f"{split}/{name}", metric, on_step=False, on_epoch=True)
            if split in self.metrics:
                with torch.no_grad():
                    self.task.update_metrics(self.metrics[split], outputs, batch)
            if value is None:
                return None
            mean = value / weight if isinstance(loss, WeightedLoss) else value
            self.report("loss", mean.detach(), weight)
            return mean

        def _steps_per_epoch(self) -> int | None:
            batches = self.trainer.num_training_batches
            if batches == float("inf"):
                return None
            return int(-(-batches // self.trainer.accumulate_grad_batches))

        def _tell(self, split: str, is_over: bool = False) -> None:
            """Have the task know where the run is; ``is_over`` if an epoch is."""
            trainer, clock, per_epoch = self.trainer, self.clock, self._steps_per_epoch()
            clock.step, clock.epoch = self.global_step, self.current_epoch
            clock.step_in_epoch = clock.step - (self.first_step or 0)
            if is_over or clock.step_in_epoch == per_epoch:
                clock.epoch, clock.step_in_epoch = clock.epoch + 1, 0
            self.split = split
            total = trainer.estimated_stepping_batches if split == "train" else None
            self.task.run = replace(
                self.task.run,
                total_steps=int(total) if total not in (None, float("inf")) else None,
                steps_per_epoch=per_epoch,
                rank=self.global_rank,
                world_size=trainer.world_size,
                device=self.device,
                split=split,
                _state=clock,
                _logbook=self.values,
            )

    return TaskAsLightning
