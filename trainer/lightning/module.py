"""A LightningModule as a `TaskModule`.

The task shares the registries of the user's module (parameters, buffers, submodules), so all names
are the module's own: in checkpoints, in messages and under DDP. What the Trainer calls on the task
becomes the hooks and steps of the module, in Lightning's order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from trainer import metrics
from trainer.config import TrainerConfig
from trainer.lightning import kept
from trainer.lightning.calls import Calls
from trainer.lightning.collectives import check_all_call
from trainer.lightning.data import LightningData
from trainer.lightning.evaluations import WORDS, Evaluations
from trainer.lightning.facts import TrainerFacts
from trainer.lightning.hooks import check_module
from trainer.lightning.logs import Log
from trainer.lightning.manual import ManualOptimization
from trainer.lightning.optimizers import Optimization
from trainer.task import TaskModule

# Hooks between the last backward and the next step; without them the loop's update is a plain one.
_UPDATE = (
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "on_before_zero_grad",
    "on_train_batch_end",
)


class LightningTask(TaskModule):
    """Runs a LightningModule.

    Attributes:
        module: The user's module.
        data: Where its samples come from.
        stage: What the Trainer was asked for: ``fit``, ``validate``, ``test`` or ``predict``.
        config: The options.
        facts: What the module finds in ``self.trainer``.
        calls: Calls its steps and hooks.
        evaluations: Runs it in validation, test and prediction.
        log_book: Its ``self.log``.
        optimization: Its optimizers, once they are configured.
        manual: What it steps them with, if it does so itself.
        in_epoch: Whether an epoch of training has begun whose end it has not been told.
    """

    module: Any
    facts: TrainerFacts
    _speaks_for_another = True

    def __init__(
        self, module: Any, base: type, data: LightningData, stage: str, config: TrainerConfig
    ) -> None:
        object.__setattr__(self, "module", module)  # no submodule: names have no prefix
        mode = module.training
        super().__init__()  # which sets it
        self.training = mode
        for registry in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            object.__setattr__(self, registry, vars(module)[registry])
        self.data = data
        self._package = base.__module__.rpartition(".core.")[0]
        self.stage = stage
        self.config = config
        self.calls = Calls(module, base)
        self.evaluations = Evaluations(self)
        self.log_book = Log(self)
        self.optimization: Optimization | None = None
        self.manual: ManualOptimization | None = None
        self._transfer_hooks = data.transfer_hooks()
        self._open_batch: tuple[Any, Any, int] | None = None
        self._let_go_of_metrics: Callable[[], None] = lambda: None
        self.in_epoch = False

    @property
    def training(self) -> bool:
        """The mode of the user's module."""
        mode: bool = self.module.training
        return mode

    @training.setter
    def training(self, mode: bool) -> None:
        self.module.training = mode

    def train(self, mode: bool = True) -> LightningTask:
        """Set the mode as the user's module does."""
        self.module.train(mode)
        return self

    def to(self, *args: Any, **kwargs: Any) -> LightningTask:
        """Move the user's module, which notes its device."""
        self.module.to(*args, **kwargs)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return that of the user's module."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load into the user's module; one that makes its layers late makes them now."""
        if self.calls.defines("configure_model") and not self.is_attached:
            self.module.configure_model()
        if self.module.strict_loading:
            return self.module.load_state_dict(state_dict, *args, **kwargs)
        found = self.module.load_state_dict(state_dict, strict=False)
        return type(found)([], [])  # whatever is missing is meant to be

    @property
    def is_attached(self) -> bool:
        """Whether the module has a ``self.trainer`` now."""
        return "facts" in vars(self)

    def forward(self, batch: Any) -> Any:
        """Return what ``training_step`` returns for one micro-batch."""
        self._close_batch()
        number = self.run.step_in_epoch
        batch = self.transferred(batch)
        if self.calls.hook("on_train_batch_start", batch, number) == -1:
            raise ValueError(
                f"{type(self.module).__name__}.on_train_batch_start returned -1 to skip the rest "
                "of the epoch, which is not possible here: set limit_train_batches, or return None "
                "from training_step to leave a batch out"
            )
        if self.run._logbook is not None:
            self.log_book.epoch.num_samples += self.run._logbook.num_samples
        outputs = self.calls.step("training_step", batch, number)
        if self.calls.defines("on_train_batch_end"):
            self._open_batch = (_as_dict(outputs), batch, number)
        return outputs

    def loss(self, outputs: Any, batch: Any) -> Any:
        """Return the loss that ``training_step`` returned; nothing in an evaluation."""
        if self.run.split != "train":
            return None
        loss = outputs
        if isinstance(outputs, Mapping):
            if "loss" not in outputs:
                raise ValueError(
                    f"{type(self.module).__name__}.training_step returned a dict without 'loss', "
                    f"only {', '.join(map(str, outputs)) or 'nothing'}; it must hold the loss"
                )
            loss = outputs["loss"]
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            loss = loss.reshape(())
            self.calls.hook("on_before_backward", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Return the optimizer that the module has configured, with its schedules."""
        self.optimization = found = Optimization(self, self.calls.step("configure_optimizers"))
        self.facts.optimizers = found.optimizers
        self.facts.lr_scheduler_configs = found.schedulers
        wrapper = sys.modules[f"{self._package}.core.optimizer"].LightningOptimizer
        strategy = self.facts.strategy
        strategy._lightning_optimizers = [
            wrapper._to_lightning_optimizer(optimizer, strategy) for optimizer in found.optimizers
        ]
        if not self.optimizes_itself:
            return found.setup()
        self.manual = ManualOptimization(self)
        return found.manual_setup()

    @property
    def optimizes_itself(self) -> bool:  # type: ignore[override]
        """Whether the module steps its optimizers itself."""
        return not self.module.automatic_optimization

    def optimize(self, batch: Any, num_samples: int, global_size: int) -> None:
        """Run a training step that does all by itself."""
        assert self.manual is not None
        self.manual.share = num_samples * self.run.world_size / global_size
        outputs = self(batch)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        book = self.run._logbook
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and book is not None:
            book.add_loss(loss.reshape(()), num_samples, is_total=False)
        with self._step_over():
            self._close_batch()

    def eval_forward(self, batch: Any) -> Any:
        """Return what ``validation_step`` or ``test_step`` returns for one micro-batch."""
        return self.evaluations.run(batch, f"{WORDS[self.run.split]}_step")

    def predict(self, batch: Any) -> Any:
        """Return what ``predict_step`` returns for one micro-batch."""
        return self.evaluations.run(batch, "predict_step")

    def on_fit_start(self) -> None:
        """Run the module's hook."""
        self.calls.hook("on_fit_start")

    def on_epoch_start(self) -> None:
        """Run the module's hooks at the start of training and of an epoch."""
        if not self.run.step_in_epoch:  # else this goes on with an epoch that has begun
            self._end_epoch()
        if not self.facts.is_started:
            self.facts.is_started = True
            self.calls.hook("on_train_start")
        self.facts.current_epoch = self.run.epoch
        if self.optimizes_itself != (self.manual is not None):
            raise ValueError(
                f"automatic_optimization of {type(self.module).__name__} has changed since its "
                "optimizers were configured; set it in __init__, for good"
            )
        self.in_epoch = True
        self.calls.hook("on_train_epoch_start")

    def before_optimizer_step(self) -> None:
        """Run the module's hooks between backward and update."""
        (optimizer,) = self.facts.optimizers
        self.calls.hook("on_after_backward")
        self.calls.hook("on_before_optimizer_step", optimizer)
        self.calls.hook("configure_gradient_clipping", optimizer, None, None)

    def after_optimizer_step(self) -> None:
        """Run the module's hooks after the update."""
        (optimizer,) = self.facts.optimizers
        with self._step_over():
            self.calls.hook("on_before_zero_grad", optimizer)
            self._close_batch()

    def on_validation_end(self, metrics: Mapping[str, float]) -> None:
        """Note the metrics, for ``self.trainer.callback_metrics``."""
        self.facts.note(metrics)

    def on_epoch_end(self) -> Mapping[str, float]:
        """Run the module's hook and return the metrics of the epoch."""
        return self._end_epoch()

    def on_fit_end(self) -> Mapping[str, float]:
        """Run the module's last hooks and return the metrics of an epoch that was cut short."""
        values = self._end_epoch()
        self.facts.current_epoch = self.run.epoch
        self.calls.hook("on_train_end")
        self.calls.hook("on_fit_end")
        return values

    def transferred(self, batch: Any) -> Any:
        """Run the hooks of a batch's way to the device, on which its tensors are already."""
        number = self.evaluations.dataloader_idx
        for name, hook in self._transfer_hooks.items():
            place = (self.run.device,) if name == "transfer_batch_to_device" else ()
            batch = hook(batch, *place, number)
        return batch

    @property
    def _acts_in_update(self) -> bool:
        return self.calls.defines(*_UPDATE)

    def _config(self) -> dict[str, Any]:
        return kept.config_of(self)

    def _start(self, device: torch.device) -> None:
        self.facts = TrainerFacts(self, device)
        module = self.module
        module.trainer = self.facts
        if self.data.datamodule is not None:
            self.data.datamodule.trainer = self.facts
        vars(module)["log"] = self.log_book.log
        self.data.set_up()
        self.calls.hook("configure_model")
        module.to(device)
        if self.run.world_size > 1:
            self._let_go_of_metrics = metrics.gather_here(
                kept.metrics_of(module), lambda what: check_all_call(self, what)
            )

    def _end(self, error: BaseException | None) -> None:
        if not self.is_attached:
            return
        self._let_go_of_metrics()
        if self.manual is not None:
            self.manual.close()
        vars(self.module).pop("log", None)
        self.module.trainer = None
        del self.facts

    def _state(self) -> dict[str, Any]:
        return kept.state_of(self)

    def _load_state(self, state: Mapping[str, Any]) -> None:
        if state:
            kept.restore(self, state)

    def _begin_evaluation(self, split: str) -> None:
        self._close_batch()
        self.evaluations.begin(split)

    def _end_evaluation(self, split: str, values: Mapping[str, float]) -> Mapping[str, float]:
        return self.evaluations.end(split, values)

    def _close_batch(self) -> None:
        """Run the hook at the end of a batch, if it has not run yet."""
        if self._open_batch is not None:
            place, self._open_batch = self._open_batch, None
            self.calls.hook("on_train_batch_end", *place)

    def _end_epoch(self) -> dict[str, float]:
        """Run the hook at the end of an epoch, if it has not run yet."""
        self._close_batch()
        if not self.in_epoch:
            return {}
        self.in_epoch = False
        logs = self.log_book
        values = logs.told(logs.epoch, "on_train_epoch_end", beside=logs.latest.reduce())
        if self.optimization is not None:
            self.optimization.end_epoch(self.facts.callback_metrics)
        return values

    @contextmanager
    def _step_over(self) -> Iterator[None]:
        """Count this step, which the clock will do in a moment."""
        self.facts.step_is_over = True
        try:
            yield
        finally:
            self.facts.step_is_over = False


def lightning_task(
    module: Any, base: type, data: LightningData, stage: str, config: TrainerConfig
) -> LightningTask:
    """Return the task that runs ``module``.

    Args:
        module: A LightningModule.
        base: Lightning's class of it.
        data: Where its samples come from.
        stage: ``fit``, ``validate``, ``test`` or ``predict``.
        config: The options.

    Raises:
        ValueError: If it lacks a step, or relies on something that is not supported.
    """
    check_module(module, base, stage, config)
    named = type(type(module).__name__, (LightningTask,), {})  # messages tell its name
    task: LightningTask = named(module, base, data, stage, config)
    return task


def _as_dict(outputs: Any) -> Any:
    """Return the outputs of a training step as ``on_train_batch_end`` gets them."""
    if outputs is None:
        return {}
    if isinstance(outputs, torch.Tensor):
        return {"loss": outputs.detach()}
    if isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), torch.Tensor):
        return {**outputs, "loss": outputs["loss"].detach()}
    return outputs
