"""DDP that adds gradients up in one fixed order: the same bits at any power-of-two world size."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from trainer import distributed
from trainer.comm_hooks import Hook
from trainer.data.loading import MicroBatch
from trainer.data.plan import GlobalBatchPlan, ceil_div
from trainer.exact.tree_reduction import TreeReduction
from trainer.exact.tree_sum import TreeSum, completed_sums
from trainer.messages import listed
from trainer.step import StepModule
from trainer.strategies.ddp import DDPStrategy, refuse_unusual_gradients


class FixedOrderDDP(DDPStrategy):
    """DDP whose gradients are sums along a tree of micro-batches, which no number of ranks changes.

    An all-reduce adds up in an order that follows the number of ranks and the layout of buckets,
    and ``no_sync`` in the order in which this rank happens to compute.
    """

    _reduction: TreeReduction | None = None  # one rank alone needs none

    @property
    def averaged_over(self) -> int:
        """Gradients are sums: a factor that follows the world size would round tiny numbers."""
        return 1

    def check(self, plan: GlobalBatchPlan, device: torch.device, always_full: bool) -> None:
        """Refuse world sizes that do not divide the tree, and what DDP refuses."""
        super().check(plan, device, always_full)
        self._plan = plan
        world_size, size = distributed.world_size(), plan.global_batch_size
        if world_size & (world_size - 1):
            lower = 1 << (world_size.bit_length() - 1)
            raise ValueError(
                f"reproducible=true on {world_size} ranks: gradients are added up along a binary "
                f"tree, which only a power of two divides; use {lower} or {2 * lower} ranks, or "
                "reproducible=false"
            )
        if size is not None and (count := ceil_div(size, plan.micro(size, 1))) < world_size:
            raise ValueError(
                f"reproducible=true on {world_size} ranks: global_batch_size={size} and "
                f"micro_batch_size={plan.micro_batch_size} make {count} micro-batches, too few to "
                f"give one to every rank; use at most {count} ranks, or lower micro_batch_size to "
                f"{size // world_size}"
            )

    def setup(self, step: StepModule, device: torch.device) -> nn.Module:
        """Wrap ``step``.

        Raises:
            ValueError: If the task has layers whose state depends on who computes what, or
                parameters whose gradients are sparse or complex.
        """
        size = self._plan.global_batch_size
        refuse_unusual_gradients(step.task, "reproducible=true cannot add up", "reproducible=false")
        self._task = step.task
        self._before: dict[str, torch.Tensor] = {}  # buffers, until the first step has been done
        if size is None or self._plan.accumulation_steps(size, 1) > 1:
            _refuse_batch_norm(step.task)
            self._before = {name: buffer.clone() for name, buffer in step.task.named_buffers()}
        self._sums = TreeSum([p for p in step.parameters() if p.requires_grad])
        if distributed.world_size() > 1:
            self._reduction = TreeReduction(self._sums, device)
        return super().setup(step, device)

    def after_backward(self, micro: MicroBatch) -> None:
        """Put the gradients of a micro-batch aside, to add them up in order with the last one's."""
        if not micro.is_last:
            rank, world_size = distributed.rank(), distributed.world_size()
            block = self._plan.block(micro.global_size, rank, world_size)
            # DDP wants to see a gradient of what was used within no_sync but not in the last one.
            self._sums.push(
                completed_sums(micro.number, block), leave_zeros=self.may_miss_gradients
            )
            return
        super().after_backward(micro)
        if self._reduction is None:
            self._sums.finish()
        self._sums.clear()
        self._check_buffers()

    def teardown(self) -> None:
        """Drop the wrapper, and what it sends with."""
        super().teardown()
        if self._reduction is not None:
            self._reduction.close()
            self._reduction = None

    def _hook(self, step: StepModule, device: torch.device) -> Hook | None:
        assert self._reduction is not None
        return self._reduction.reduce

    def _check_buffers(self) -> None:
        """Refuse a forward that changes buffers: each rank's are those of its own micro-batches."""
        if not self._before:
            return
        after = dict(self._task.named_buffers())
        changed = [name for name, old in self._before.items() if not _same(old, after.get(name))]
        self._before = {}
        if changed:
            raise ValueError(
                f"reproducible=true, but training changes {listed(changed)}: buffers follow from "
                "the micro-batches that a rank computes, and so depend on the world size. Use a "
                "layer without such a state, micro_batch_size = global_batch_size on one rank, or "
                "reproducible=false"
            )


def _refuse_batch_norm(task: nn.Module) -> None:
    layers = [
        name
        for name, module in task.named_modules()
        if isinstance(module, _NormBase) and module.track_running_stats and module.training
    ]
    if layers:
        raise ValueError(
            f"reproducible=true with {listed(layers)}: statistics of BatchNorm follow from the "
            "micro-batches that a rank computes, and so depend on the world size. Use GroupNorm or "
            "LayerNorm, freeze it by eval(), or reproducible=false"
        )


def _same(old: torch.Tensor, new: torch.Tensor | None) -> bool:
    if new is None or new.shape != old.shape:
        return False
    return bool(((old == new) | ((old != old) & (new != new))).all())  # NaN is the same as NaN
