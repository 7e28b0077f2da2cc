"""Distributed data parallel: every rank holds the whole model, gradients are averaged."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from trainer import distributed
from trainer.comm_hooks import Hook, compress_hook
from trainer.data.loading import MicroBatch
from trainer.data.plan import GlobalBatchPlan
from trainer.step import StepModule
from trainer.strategies.base import Strategy
from trainer.watch import watch

_STEPS_UNTIL_BUCKETS = 3  # DDP rebuilds its buckets after the first, and tells so after this one


class DDPStrategy(Strategy):
    """Torch's ``DistributedDataParallel``; on one rank, the module as it is."""

    def __init__(
        self,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        sync_batchnorm: bool = False,
        comm_hook: str | None = None,
    ) -> None:
        """Store the options, which mean what they mean for torch.

        Args:
            bucket_cap_mb: MiB per gradient bucket; None for torch's default.
            find_unused_parameters: Search each graph for parameters that get no gradient.
            static_graph: Promise that every step uses the same parameters.
            gradient_as_bucket_view: Let ``p.grad`` be a view into its bucket.
            sync_batchnorm: Replace the task's BatchNorm layers by SyncBatchNorm, for good.
            comm_hook: ``fp16`` or ``bf16``: what gradients are sent as.
        """
        self._bucket_cap_mb = bucket_cap_mb
        self._options = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        self._sync_batchnorm = sync_batchnorm
        self._comm_hook = comm_hook
        self._wrapped: nn.parallel.DistributedDataParallel | None = None
        self._steps_until_buckets = 0
        self.may_miss_gradients = find_unused_parameters

    def check(self, plan: GlobalBatchPlan, device: torch.device, always_full: bool) -> None:
        """Refuse options that cannot work with the device or the way global batches are cut."""
        world_size, size = distributed.world_size(), plan.global_batch_size
        steps = None if size is None else plan.accumulation_steps(size, world_size)
        if self._options["static_graph"] and world_size > 1 and steps != 1:
            raise ValueError(
                f"static_graph=true with {steps} micro-batches per step and rank: DDP cannot "
                "accumulate gradients over a static graph; set static_graph=false, or "
                "micro_batch_size=null for one micro-batch"
            )
        if not self._sync_batchnorm:
            return
        if device.type == "cpu":
            raise ValueError(
                "sync_batchnorm=true on the CPU: torch's SyncBatchNorm works on CUDA only; set "
                "sync_batchnorm=false"
            )
        is_even = size is not None and steps == 1 and size % world_size == 0 and always_full
        if world_size > 1 and not is_even:
            raise ValueError(
                "sync_batchnorm=true runs collectives inside forward, so every rank needs one "
                f"micro-batch of the same size in every step; with global_batch_size={size} on "
                f"{world_size} ranks that does not hold. Set drop_last=true (a DataLoader has its "
                "own), micro_batch_size=null and a global_batch_size that is a multiple of the "
                "world size"
            )

    def setup(self, step: StepModule, device: torch.device) -> nn.Module:
        """Wrap ``step`` and make every rank's parameters and buffers those of rank 0.

        Raises:
            ValueError: If the ranks' parameters or buffers differ in name, shape or type, which
                DDP itself would meet with a crash or with wrong values.
        """
        if distributed.world_size() == 1:
            return step
        check_same_tensors(step.task)
        if self._sync_batchnorm:
            convert = nn.SyncBatchNorm.convert_sync_batchnorm
            step.task = convert(step.task)  # type: ignore[no-untyped-call]
        options: dict[str, Any] = dict(self._options)
        if self._bucket_cap_mb is not None:  # an explicit None would be taken for a size
            options["bucket_cap_mb"] = self._bucket_cap_mb
        # Buffers are made rank 0's where it matters (evaluation, saving), not in every forward.
        known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options[buffers] = False
        self._wrapped = nn.parallel.DistributedDataParallel(
            step, device_ids=[device] if device.type == "cuda" else None, **options
        )
        hook = self._hook(step)
        if hook is not None:
            self._wrapped.register_comm_hook(None, hook)
        self._steps_until_buckets = _STEPS_UNTIL_BUCKETS
        return self._wrapped

    def no_sync(self) -> AbstractContextManager[None]:
        """Return DDP's ``no_sync``, for all micro-batches but the last."""
        return nullcontext() if self._wrapped is None else self._wrapped.no_sync()

    def after_backward(self, micro: MicroBatch) -> None:
        """Nothing is left to do: DDP has averaged the gradients."""
        if micro.is_last:
            self._count_buckets()

    def teardown(self) -> None:
        """Drop the wrapper; DDP's hooks on the parameters go with it."""
        self._wrapped = None

    def _count_buckets(self) -> None:
        """Let the watch know how many buckets a backward has, once DDP has settled them."""
        if self._wrapped is None or not self._steps_until_buckets:
            return
        self._steps_until_buckets -= 1
        if self._steps_until_buckets:
            return
        # Not while a backward runs, in which this would wait for a lock, holding the GIL.
        found: dict[str, Any] = self._wrapped._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        sizes: str = found.get("rebuilt_bucket_sizes", found["bucket_sizes"])
        watch.num_buckets = sizes.count(",") + 1

    def _hook(self, step: StepModule) -> Hook | None:
        if self._comm_hook is None:
            return None
        return compress_hook(self._comm_hook, exact=step.extra_weight)


def check_same_tensors(task: nn.Module) -> None:
    """Compare names, shapes and types of the parameters and buffers on all ranks.

    Raises:
        ValueError: On every rank, naming the first difference.
    """
    mine = [
        f"{name} with shape {tuple(p.shape)} ({p.dtype}{'' if p.requires_grad else ', frozen'})"
        for name, p in task.named_parameters()
    ]
    mine += [
        f"buffer {name} with shape {tuple(b.shape)} ({b.dtype})" for name, b in task.named_buffers()
    ]
    everyone = distributed.all_gather_object(mine)
    for rank, theirs in enumerate(everyone):
        if theirs == everyone[0]:
            continue
        pairs = zip(everyone[0], theirs, strict=False)
        counts = [f"{len(found)} parameters and buffers" for found in (everyone[0], theirs)]
        first, other = next(((a, b) for a, b in pairs if a != b), counts)
        raise ValueError(
            f"the task's tensors differ between ranks: rank 0 has {first}, rank {rank} has "
            f"{other}. Build the same model on every rank: nothing in it may depend on the rank, "
            "on the machine or on unseeded random numbers"
        )
