"""What a user writes: a `TaskModule`, and what it may return and read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from trainer.state import OnTheClock, TrainState

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

    from trainer.logbook import Logbook
    from trainer.loggers import Logger


class WeightedLoss(NamedTuple):
    """A loss that weighs its micro-batch by something other than the number of samples.

    The step uses the gradient of ``sum(total) / sum(weight)`` over all micro-batches and ranks of
    the global batch. Where the weight is 0 the total is ignored, NaN included.

    Attributes:
        total: Scalar tensor: the *sum* of the loss over what is counted (tokens, say).
        weight: How many were counted, a number or a scalar tensor. A tensor on an accelerator
            costs a host synchronisation per micro-batch; a number or a CPU tensor costs none.
    """

    total: torch.Tensor
    weight: torch.Tensor | float


@dataclass(frozen=True)
class OptimizerSetup:
    """An optimizer with its learning rate schedule.

    Attributes:
        optimizer: Any ``torch.optim.Optimizer`` over parameters of the task.
        scheduler: A ``torch.optim.lr_scheduler`` object, or None.
        interval: When the scheduler steps: ``"step"`` (after every optimizer step) or ``"epoch"``.
            None means ``"step"``, or after each validation if there is a ``monitor``.
        monitor: Name of the metric handed to ``scheduler.step(value)``, as for
            ``ReduceLROnPlateau``; it then steps after each validation that reports this metric.
    """

    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    interval: str | None = None
    monitor: str | None = None


@dataclass(frozen=True)
class RunFacts(OnTheClock):
    """What a task may know about the run it is part of; read-only.

    Attributes:
        total_steps: Optimizer steps of the whole run; None if only the data's end tells.
        steps_per_epoch: Optimizer steps in one epoch; None if only the data's end tells.
        rank: This process's number, 0 to ``world_size - 1``.
        world_size: Number of ranks.
        device: Where the task's parameters and batches are.
        split: ``train``, ``val``, ``test`` or ``predict``: what is being run now.
        run_dir: The folder of the run; None outside of a fit.
        evaluated_set: Of several validation or test sets, the name of the one that is run now;
            else None.
        turn: Of a task with several optimizers, the name of the one whose turn it is in this step;
            else None.
    """

    total_steps: int | None = 0
    steps_per_epoch: int | None = 0
    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    split: str = "train"
    run_dir: Path | None = None
    evaluated_set: str | None = None
    turn: str | None = None
    _state: TrainState = field(default_factory=TrainState, repr=False)
    _logbook: Logbook | None = field(default=None, repr=False)
    _loggers: Sequence[Logger] = field(default=(), repr=False)


class TaskModule(nn.Module):
    """A model with its loss: an ordinary ``nn.Module`` that also trains without a `Trainer`.

    Subclasses define ``forward``, ``loss`` and ``configure_optimizers``; everything else has a
    default. Methods whose names stand here must not be hidden by attributes
    (``self.loss = nn.CrossEntropyLoss()``): the Trainer refuses such a task.

    Attributes:
        run: The facts of the run.
        global_loss: Whether ``loss`` compares samples of a batch with each other (a contrastive
            loss), and so gets the outputs and the batch of the whole global batch, of all ranks,
            in order and with gradients. Every rank then calls it with the same values. Set it in
            the class or in ``__init__``. A rank can have one micro-batch per step only.
        optimizes_itself: Whether ``optimize`` does all that a step does, in place of the loop.
    """

    run: RunFacts = RunFacts()
    global_loss: bool = False
    optimizes_itself: bool = False

    def forward(self, batch: Any) -> Any:
        """Return the outputs for one micro-batch."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(batch)")

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor | WeightedLoss | None:
        """Return the loss of one micro-batch.

        Args:
            outputs: What ``forward`` (or ``eval_forward``) returned.
            batch: The micro-batch. With ``global_loss`` both are of the whole global batch.

        Returns:
            A scalar tensor, the mean over the batch's samples; or a `WeightedLoss`; or None
            to leave this micro-batch out of the step (weight 0).
        """
        raise NotImplementedError(f"{type(self).__name__} must define loss(outputs, batch)")

    def configure_optimizers(
        self,
    ) -> (
        torch.optim.Optimizer
        | OptimizerSetup
        | Mapping[str, torch.optim.Optimizer | OptimizerSetup]
    ):
        """Return the optimizer, with a schedule if there is one; or several, by name.

        Called once per ``fit``, on every rank, with the parameters on their device.

        Several take turns in every step, in this order: forward, loss (logged as
        ``train/loss/<name>``), backward, clip and update, each with only its own parameters
        requiring gradients, and its name in ``self.run.turn``. One whose parameters are all frozen
        has no turn.
        """
        raise NotImplementedError(f"{type(self).__name__} must define configure_optimizers()")

    def optimize(self, batch: Any, num_samples: int, global_size: int) -> None:
        """Do one step: forward, backward, reduction of gradients, update of every optimizer.

        Only called where ``optimizes_itself`` is set. Weights are equal on all ranks before, and
        must be so afterwards. It runs under autocast; clipping is up to it, too. A schedule that
        ``configure_optimizers`` returns advances by itself, as in any other task.

        Args:
            batch: What this rank has of a global batch.
            num_samples: Samples in it.
            global_size: Samples in the global batch.
        """
        raise NotImplementedError(f"{type(self).__name__} must define optimize")

    def build_metrics(self, split: str) -> Mapping[str, Metric | MetricCollection]:
        """Return the torchmetrics of ``split`` (``train``, ``val`` or ``test``), by name."""
        return {}

    def update_metrics(
        self, metrics: Mapping[str, Metric | MetricCollection], outputs: Any, batch: Any
    ) -> None:
        """Update what ``build_metrics`` returned with one micro-batch; not under autocast."""

    def eval_forward(self, batch: Any) -> Any:
        """Return the outputs for one micro-batch of validation or test."""
        return self(batch)

    def predict(self, batch: Any) -> Any:
        """Return the predictions for one micro-batch: tensors whose first dimension is samples."""
        return self(batch)

    def batch_size(self, batch: Any) -> int:
        """Return the samples in a batch of which only the task knows how many it holds.

        Used where a dataset yields ready-made batches. The default is the first dimension of the
        first tensor found in ``batch``.
        """
        return first_dimension(batch)

    def log(self, name: str, value: torch.Tensor | float, weight: float | None = None) -> None:
        """Record a value to be averaged over micro-batches and ranks and logged as split/name.

        Call it from ``forward`` or ``loss``. Without a `Trainer` it does nothing.

        Args:
            name: The metric's name; the split is put in front (``train/<name>``), unless it starts
                with a slash (``/<name>``).
            value: A number or a scalar tensor; it is detached, not read.
            weight: Its weight in the mean; None means this micro-batch's number of samples.
        """
        if self.run._logbook is not None:
            self.run._logbook.add(name, value, weight)

    def on_fit_start(self) -> None:
        """Run on every rank once the optimizer exists and before the first step.

        A run that resumes, or starts from old weights, takes these after it.
        """

    def on_epoch_start(self) -> None:
        """Run on every rank before each epoch; the only place to change ``requires_grad``.

        It runs again when a run resumes in mid-epoch, so what it does should follow from
        ``self.run.epoch`` and not add to what it did before.
        """

    def before_optimizer_step(self) -> None:
        """Run on every rank when gradients are final: reduced, unscaled, not clipped yet."""

    def after_optimizer_step(self) -> None:
        """Run on every rank after the optimizer's step."""

    def on_validation_end(self, metrics: Mapping[str, float]) -> None:
        """Run on every rank after each validation, with its metrics (``val/loss``, ...)."""

    def on_epoch_end(self) -> Mapping[str, float] | None:
        """Run on every rank after each epoch, once it has been validated; before it is saved.

        Returns:
            What it has measured, the same on every rank, to be logged under these names.
        """

    def on_fit_end(self) -> Mapping[str, float] | None:
        """Run on every rank at the end of a run, once it is saved; not after a signal.

        Returns:
            As for ``on_epoch_end``.
        """

    # For tasks that run somebody else's module.
    _speaks_for_another = False
    _shown: Sequence[str] = ()  # values that a progress line tells beside the loss

    @property
    def _acts_in_update(self) -> bool:
        """Whether something of the task runs between backward and the end of an update."""
        hooks = ("before_optimizer_step", "after_optimizer_step")
        return any(getattr(type(self), hook) is not getattr(TaskModule, hook) for hook in hooks)

    def _config(self) -> dict[str, Any]:
        """Return what belongs into the config of a run, in plain values."""
        return {}

    def _start(self, device: torch.device) -> None:
        """Get ready on a rank, for one job."""
        self.to(device)

    def _end(self, error: BaseException | None) -> None:
        """Clean up after the job, or after the error that ended it."""

    def _begin_evaluation(self, split: str) -> None:
        """Get ready to evaluate ``val`` or ``test``, or to predict."""

    def _end_evaluation(self, split: str, values: Mapping[str, float]) -> Mapping[str, float]:
        """Return what there is to tell beside the values of an evaluation."""
        return {}

    def _state(self) -> dict[str, Any]:
        """Return what belongs into a checkpoint beside weights; called on every rank."""
        return {}

    def _load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what ``_state`` returned on rank 0; called on every rank."""


def first_dimension(batch: Any) -> int:
    """Return the first dimension of the first tensor in ``batch``, searched depth first.

    Raises:
        ValueError: If there is no tensor with a dimension.
    """
    found = _first_tensor(batch)
    if found is None:
        raise ValueError(
            f"cannot tell how many samples a batch of type {type(batch).__name__} holds: it has no "
            "tensor with a first dimension; define batch_size(self, batch) in the task"
        )
    return int(found.shape[0])


def _first_tensor(batch: Any) -> torch.Tensor | None:
    if isinstance(batch, torch.Tensor):
        return batch if batch.dim() else None
    if isinstance(batch, Mapping):
        parts: Any = batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch
    else:
        parts = vars(batch).values() if hasattr(batch, "__dict__") else ()
    return next((t for t in map(_first_tensor, parts) if t is not None), None)
