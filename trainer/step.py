"""The module that DDP wraps: forward, then loss, for one micro-batch.

Whatever the loss uses has gone through DDP's ``forward``, so no way of writing a task goes around
the gradient reduction.

The step must use the gradient of ``sum(loss * weight) / sum(weight)`` over the whole global batch,
but the true sum of the weights is known only after all ranks have computed their losses. So each
micro-batch is scaled by the *planned* weight, and the difference between true and planned weight
travels to the other ranks as the gradient of one extra scalar parameter, ``extra_weight``, in the
same all-reduce. Where every weight is as planned the difference is exactly 0 and gradients stay as
they are, to the last bit.

The planned weight is the number of samples times the weight of a sample in the first micro-batch of
the run, as a power of two: 1 for a mean. So gradients have about their final size from the start,
which half precision needs, and the factor rounds nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from trainer import distributed, metrics
from trainer.contract import weigh
from trainer.global_loss import TaskLoss
from trainer.logbook import Logbook
from trainer.seeding import Stream, seed_generators, stream_key
from trainer.state import TrainState
from trainer.task import TaskModule, WeightedLoss


class StepModule(nn.Module):
    """Computes the scalar on which one micro-batch's ``backward`` is called.

    The first ``forward`` of a run is a collective: rank 0 decides the planned weight of a sample.

    Attributes:
        task: The user's module.
        has_weight: Whether this rank has had a micro-batch with weight in this step.
        extra_weight: Its gradient is (true weight - planned weight) / planned weight of the global
            batch, once all micro-batches are through and the ranks have averaged.
    """

    def __init__(
        self,
        task: TaskModule,
        logbook: Logbook,
        metrics: metrics.MetricSet,
        state: TrainState,
        *,
        averaged_over: int,
        seed: int,
        needs_every_parameter: bool,
        loss_name: str = "loss",
    ) -> None:
        """Note what every micro-batch goes through.

        Args:
            task: The user's module.
            logbook: Gets the losses.
            metrics: Are updated with the outputs, by name.
            state: Keeps the planned weight of a sample.
            averaged_over: What the strategy's reduction divides by: the world size where gradients
                are averaged over the ranks, 1 where they are added up.
            seed: Seed of the run.
            needs_every_parameter: Whether a micro-batch without weight must give every parameter a
                gradient of zeros. Not where parameters may be unused: these would count as used.
            loss_name: What the loss is called in the logbook.
        """
        super().__init__()
        self.task = task
        self.extra_weight = nn.Parameter(torch.zeros(()))
        self._logbook = logbook
        self._metrics = metrics
        self._state = state
        self._averaged_over = averaged_over
        self._seed = seed
        self._task_loss = TaskLoss(task, logbook)
        self._needs_every_parameter = needs_every_parameter
        self._loss_name = loss_name
        self.has_weight = False

    def suspect(self, cause: str | None) -> None:
        """Have an error that a loss is not finite name this cause first."""
        self._logbook.suspect = cause

    def forward(self, batch: Any, num_samples: int, global_size: int) -> torch.Tensor:
        """Run the task's forward and loss and scale the result for the step.

        Args:
            batch: One micro-batch on the task's device, or None if this rank has no sample.
            num_samples: Samples in ``batch``.
            global_size: Samples in the global batch.

        Returns:
            A scalar. It is scaled up by what the reduction of its gradients divides by.

        Raises:
            ValueError: If ``loss`` returns something that cannot be trained on.
        """
        task, scale = self.task, float(self._averaged_over)
        loss = self._loss(task, batch, num_samples, global_size)
        if task.global_loss:
            # Every rank has the loss of all samples, and contributes an equal share of it.
            num_samples, scale = global_size, scale / distributed.world_size()
        value, weight = weigh(loss, num_samples, needs_grad=batch is not None)
        is_total = isinstance(loss, WeightedLoss)
        if value is None:
            value, is_total = self._zero(), False
        else:
            self.has_weight = True
            self._logbook.add_loss(value, weight, is_total=is_total, name=self._loss_name)
            if is_total and task.global_loss:  # its true weight is known on every rank
                value, weight, is_total = value / weight, float(num_samples), False
        unit = self._unit(weight, num_samples)
        planned = unit * global_size
        extra = (weight - unit * num_samples) * scale / planned
        share = (1 if is_total else num_samples) * scale / planned
        value = value if share == 1 else value * share
        if batch is None and loss is not None:  # a global loss, but no forward
            value = value + self._zero()
        if extra == 0 and distributed.world_size() == 1:
            return value
        # Not in the loss's own format: a half has too few digits for a weight.
        return torch.add(value, self.extra_weight, alpha=extra)

    def _loss(self, task: TaskModule, batch: Any, num_samples: int, global_size: int) -> Any:
        """Return what ``loss`` returned; None without a sample, unless it is a global one."""
        outputs = None if batch is None else task(batch)
        if task.global_loss:
            key = stream_key(self._seed, Stream.GLOBAL_LOSS, task.run.step)
            seed_generators(key, task.run.device)  # alike on every rank
        loss = self._task_loss(outputs, batch, num_samples, global_size)
        if batch is not None:
            metrics.update(task, self._metrics, outputs, batch, self._logbook.place)
        return loss

    def _unit(self, weight: float, num_samples: int) -> float:
        """Return the planned weight of a sample, which rank 0's first micro-batch decides."""
        weights = self._state.sample_weights
        if self._loss_name not in weights:
            per_sample = weight / max(num_samples, 1)
            unit = 2.0 ** round(math.log2(per_sample)) if per_sample else 1.0
            weights[self._loss_name] = float(
                distributed.broadcast_tensor(torch.tensor(unit, dtype=torch.float64))
            )
        return weights[self._loss_name]

    def _zero(self) -> torch.Tensor:
        if not self._needs_every_parameter:
            return self.extra_weight.new_zeros(())
        # Zero gradients for everything, so that DDP's reducer sees the same on every rank. A dummy
        # sample would crash BatchNorm, and its loss times 0 is NaN where the loss is infinite.
        parts = [(p * 0).sum() for p in self.task.parameters() if p.requires_grad]
        return torch.stack([part.to(torch.float32) for part in parts]).sum()
