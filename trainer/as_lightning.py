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
from trainer.lightning import PACKAGES
from trainer.state import TrainState
from trainer.task import OptimizerSetup, TaskModule, WeightedLoss

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


def as_lightning(task: TaskModule) -> LightningModule:
    """Return a LightningModule that trains ``task``, which has its weights afterwards.

    Checkpoints that Lightning writes have the task's own names, so ``init_from`` takes them.
    Several ranks under Lightning average the means of their batches, so there a `WeightedLoss` is
    only right on one rank or for equal weights.

    Args:
        task: A complete task, with a loss and an optimizer.

    Raises:
        ValueError: If it is incomplete, or needs what only our Trainer has: several optimizers by
            turns, or a loss over the global batch.
        ModuleNotFoundError: If Lightning is not installed.
    """
    check_contract(task, to_fit=True)
    if task.global_loss:
        raise ValueError(
            f"{type(task).__name__} has global_loss=True: Lightning's Trainer shows a loss the "
            "batch of one rank only"
        )
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
            self.split = "train"
            # By split and name; not part of a checkpoint.
            self.metrics: Any = nn.ModuleDict(
                {
                    split: nn.ModuleDict({n: m.clone() for n, m in found.items()})
                    for split in ("train", "val", "test")
                    if (found := task.build_metrics(split))
                }
            )

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
                    f"{type(self.task).__name__} has several optimizers ({', '.join(found)}), "
                    "which take turns under trainer.Trainer only"
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
            return self._computed(batch, "train", self.task)

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

        def on_train_epoch_start(self) -> None:
            self._tell("train")
            self.task.on_epoch_start()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.task.before_optimizer_step()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.task.after_optimizer_step()

        def on_validation_end(self) -> None:
            if not self.trainer.sanity_checking:
                known = self.trainer.callback_metrics
                values = {n: float(v) for n, v in known.items() if n.startswith("val/")}
                self.task.on_validation_end(values)

        def on_train_epoch_end(self) -> None:
            self._log_own(self.task.on_epoch_end())

        def on_train_end(self) -> None:
            self.task.on_fit_end()
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
                    self.task.update_metrics(dict(self.metrics[split].items()), outputs, batch)
            if value is None:
                return None
            mean = value / weight if isinstance(loss, WeightedLoss) else value
            self.report("loss", mean.detach(), weight)
            return mean

        def _log_own(self, values: Mapping[str, float] | None) -> None:
            for name, value in (values or {}).items():
                self.log(name, value)

        def _tell(self, split: str) -> None:
            """Have the task know where the run is."""
            trainer, clock = self.trainer, self.clock
            clock.step, clock.epoch = self.global_step, self.current_epoch
            self.split = split
            total = trainer.estimated_stepping_batches if split == "train" else None
            per_epoch = trainer.num_training_batches
            self.task.run = replace(
                self.task.run,
                total_steps=int(total) if total not in (None, float("inf")) else None,
                steps_per_epoch=int(per_epoch) if per_epoch != float("inf") else None,
                rank=self.global_rank,
                world_size=trainer.world_size,
                device=self.device,
                split=split,
                _state=clock,
                _logbook=self.values,
            )

    return TaskAsLightning
