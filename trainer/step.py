"""The module that DDP wraps: forward, then loss, for one micro-batch.

Whatever the loss uses has gone through DDP's ``forward``, so no way of writing a task goes around
the gradient reduction.

The step must use the gradient of ``sum(loss * weight) / sum(weight)`` over the whole global batch,
but the true sum of the weights is known only after all ranks have computed their losses. So each
micro-batch is scaled by the *planned* weight, which is the number of samples in the global batch,
and the difference between true and planned weight travels to the other ranks as the gradient of
one extra scalar parameter, ``extra_weight``, in the same all-reduce. Where every weight is as
planned the difference is exactly 0 and gradients stay as they are, to the last bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainer import distributed, metrics
from trainer.contract import weigh
from trainer.global_loss import GlobalLoss, Part
from trainer.logbook import Logbook
from trainer.seeding import Stream, seed_stream
from trainer.task import TaskModule, WeightedLoss
from trainer.trees import detached


class StepModule(nn.Module):
    """Computes the scalar on which one micro-batch's ``backward`` is called.

    Attributes:
        task: The user's module.
        extra_weight: Its gradient is (true weight - planned weight) / planned weight of the global
            batch, once all micro-batches are through and the ranks have averaged.
    """

    def __init__(
        self,
        task: TaskModule,
        logbook: Logbook,
        metrics: metrics.MetricSet,
        *,
        averaged_over: int,
        seed: int = 0,
        needs_every_parameter: bool = True,
    ) -> None:
        """Note what every micro-batch goes through.

        Args:
            task: The user's module.
            logbook: Gets the losses.
            metrics: Are updated with the outputs, by name.
            averaged_over: What the strategy's reduction divides by: the world size where gradients
                are averaged over the ranks, 1 where they are added up.
            seed: Seed of the run.
            needs_every_parameter: Whether a micro-batch without weight must give every parameter a
                gradient of zeros. Not where parameters may be unused: these would count as used.
        """
        super().__init__()
        self.task = task
        self.extra_weight = nn.Parameter(torch.zeros(()))
        self._logbook = logbook
        self._metrics = metrics
        self._averaged_over = averaged_over
        self._seed = seed
        self._global_loss = GlobalLoss(task, logbook)
        self._needs_every_parameter = needs_every_parameter

    def forward(self, batch: Any, num_samples: int, global_size: int) -> torch.Tensor:
        """Run the task's forward and loss and scale the result for the step.

        Args:
            batch: One micro-batch on the task's device, or None if this rank has no sample.
            num_samples: Samples in ``batch``.
            global_size: Samples in the global batch: the planned weight.

        Returns:
            A scalar. It is scaled up by what the reduction of its gradients divides by.

        Raises:
            ValueError: If ``loss`` returns something that cannot be trained on.
        """
        task = self.task
        scale: float = self._averaged_over
        loss = None
        extra: torch.Tensor | float
        has_samples = batch is not None
        outputs = task(batch) if has_samples else None
        if task.global_loss:
            seed_stream(task.run.device, self._seed, task.run.step, 0, Stream.GLOBAL_LOSS)
            parts = [Part(outputs, batch, num_samples)] if has_samples else []
            loss = self._global_loss(parts, global_size)
            # Every rank has the loss of all samples, and contributes an equal share of it.
            num_samples, scale = global_size, scale / distributed.world_size()
        elif has_samples:
            loss = task.loss(outputs, batch)
        if has_samples and self._metrics:
            with torch.no_grad():
                task.update_metrics(self._metrics, detached(outputs), batch)
            metrics.after_update(self._metrics, self._logbook.place)
        value, weight = weigh(loss, num_samples, needs_grad=has_samples)
        if value is None:
            value = self._zero()
            extra = -num_samples * scale / global_size
        elif isinstance(loss, WeightedLoss) and not task.global_loss:
            self._logbook.add_loss(value, weight, is_total=True)
            extra = (weight - num_samples) * scale / global_size
            value = value * (scale / global_size)
        else:
            if isinstance(loss, WeightedLoss):  # of the whole global batch: its true weight
                value = value / (weight.double() if isinstance(weight, torch.Tensor) else weight)
            self._logbook.add_loss(value, weight, is_total=False)
            extra = 0.0
            share = num_samples * scale / global_size
            value = value if share == 1 else value * share
        if task.global_loss and not has_samples:  # a loss, but no forward
            value = value + self._zero()
        if isinstance(extra, torch.Tensor):
            # Not in the loss's own format: a half has too few digits for a weight.
            return torch.addcmul(value, self.extra_weight, extra.to(self.extra_weight))
        if extra == 0 and distributed.world_size() == 1:
            return value
        return torch.add(value, self.extra_weight, alpha=extra)

    @property
    def has_weight(self) -> bool:
        """Whether this rank has had a micro-batch with weight in this step."""
        return self._logbook.has_weight

    def _zero(self) -> torch.Tensor:
        if not self._needs_every_parameter:
            return self.extra_weight.new_zeros(())
        # Zero gradients for everything, so that DDP's reducer sees the same on every rank. A dummy
        # sample would crash BatchNorm, and its loss times 0 is NaN where the loss is infinite.
        parts = [(p * 0).sum() for p in self.task.parameters() if p.requires_grad]
        return torch.stack([part.to(torch.float32) for part in parts]).sum()
