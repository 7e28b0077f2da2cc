"""Distributed data parallel: every rank holds the whole model, gradients are averaged."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from trainer import distributed
from trainer.comm_hooks import Hook, PowerSGD, average_hook, overflow_in
from trainer.data.loading import MicroBatch
from trainer.data.plan import GlobalBatchPlan
from trainer.messages import listed
from trainer.precision import DTYPES
from trainer.step import StepModule
from trainer.strategies.base import Strategy
from trainer.strategies.bucket_size import BucketSizeSearch
from trainer.strategies.comm_clock import CommClock, CommTimes


class DDPStrategy(Strategy):
    """Torch's ``DistributedDataParallel``; on one rank, the module as it is."""

    def __init__(
        self,
        bucket_cap_mb: float | str | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        sync_batchnorm: bool = False,
        comm_hook: str | None = None,
        powersgd_rank: int = 4,
        powersgd_start_step: int = 1000,
    ) -> None:
        """Store the options, which mean what they mean for torch.

        Args:
            bucket_cap_mb: MiB per gradient bucket; None for torch's default; ``auto`` tries a few.
            find_unused_parameters: Search each graph for parameters that get no gradient.
            static_graph: Promise that every step uses the same parameters.
            gradient_as_bucket_view: Let ``p.grad`` be a view into its bucket.
            sync_batchnorm: Replace the task's BatchNorm layers by SyncBatchNorm, for good.
            comm_hook: How gradients are sent: ``fp16``, ``bf16``, ``powersgd``, or the last and one
                of the others with a plus between them.
            powersgd_rank: Columns of the two matrices that PowerSGD sends.
            powersgd_start_step: The first step whose gradients PowerSGD compresses, from 0.
        """
        self._bucket_cap_mb = bucket_cap_mb
        self._options = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        self._sync_batchnorm = sync_batchnorm
        self._comm_hook = comm_hook
        kinds = (comm_hook or "").split("+")
        self._sent_as = next((DTYPES[kind] for kind in kinds if kind in DTYPES), None)
        self._powersgd: PowerSGD | None = None
        if "powersgd" in kinds:
            self._powersgd = PowerSGD(powersgd_rank, powersgd_start_step, self._sent_as)
        self._bucket_search: BucketSizeSearch | None = None
        self._searches: dict[frozenset[str], BucketSizeSearch] = {}  # by what is trained
        self._wrapped: nn.parallel.DistributedDataParallel | None = None
        self._comm_clock: CommClock | None = None
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

        If nothing but the buckets is to change (``wants_setup``), all else stays as it is.

        Raises:
            ValueError: If the ranks' parameters or buffers differ in name, shape or type, which
                DDP itself would meet with a crash or with wrong values; or if ``comm_hook`` cannot
                compress the gradients of some.
        """
        self._step = step
        if self._comm_hook is not None:
            cannot = f"comm_hook={self._comm_hook} cannot compress"
            refuse_unusual_gradients(step.task, cannot, "comm_hook=null")
        if distributed.world_size() == 1:
            return step
        is_new, self.wants_setup = not self.wants_setup, False
        if is_new:
            check_same_tensors(step.task)
            if self._sync_batchnorm:
                convert = nn.SyncBatchNorm.convert_sync_batchnorm
                step.task = convert(step.task)  # type: ignore[no-untyped-call]
            if self._bucket_cap_mb == "auto":
                self._bucket_search = self._search(step, device)
        options: dict[str, Any] = {**self._options, "init_sync": is_new}
        cap_mb = self._bucket_cap_mb if self._bucket_search is None else self._bucket_search.cap_mb
        if cap_mb is not None:  # an explicit None would be taken for a size
            options["bucket_cap_mb"] = cap_mb
        # Buffers are made rank 0's where it matters (evaluation, saving), not in every forward.
        known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options[buffers] = False
        # Without device_ids: batches are on the device, and DDP would build them anew to move them.
        self._wrapped = nn.parallel.DistributedDataParallel(step, **options)
        hook = self._hook(step, device)
        if hook is not None:
            is_scaled = self.scaler is not None and self.scaler.is_enabled()
            step.suspect(overflow_in(self._comm_hook, is_scaled))
            self._wrapped.register_comm_hook(None, hook)
        self._comm_clock = CommClock(self._wrapped, device)
        return self._wrapped

    def no_sync(self) -> AbstractContextManager[None]:
        """Return DDP's ``no_sync``, for all micro-batches but the last."""
        return nullcontext() if self._wrapped is None else self._wrapped.no_sync()

    def after_backward(self, micro: MicroBatch) -> None:
        """Count; DDP has averaged the gradients."""
        if not micro.is_last:
            return
        if self._comm_clock is not None:
            self._comm_clock.after_step()
            # What is fast without compression is not what is fast with it.
            is_as_later = self._powersgd is None or self._powersgd.has_begun
            if self._bucket_search is not None and is_as_later:
                self.wants_setup = self._bucket_search.after_backward()
        elif self._powersgd is not None:
            self._powersgd.settle(self._step, self.scaler)

    def take_comm_times(self) -> CommTimes | None:
        """Return what DDP's timers have seen."""
        return None if self._comm_clock is None else self._comm_clock.take()

    def teardown(self) -> None:
        """Drop the wrapper; DDP's hooks on the parameters go with it."""
        self._wrapped = self._comm_clock = None
        if self._powersgd is not None:
            self._powersgd.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what PowerSGD has kept from earlier gradients; a collective."""
        return {} if self._powersgd is None else self._powersgd.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with that, at any world size."""
        if self._powersgd is None:
            super().load_state_dict(state)
        else:
            self._powersgd.load_state_dict(state)

    def _search(self, step: StepModule, device: torch.device) -> BucketSizeSearch:
        """Return the search for these gradients: the one that was broken off, if there is one."""
        trained = frozenset(name for name, p in step.task.named_parameters() if p.requires_grad)
        if trained in self._searches:
            self._searches[trained].go_on()
        else:
            self._searches[trained] = BucketSizeSearch(step, device)
        return self._searches[trained]

    def _hook(self, step: StepModule, device: torch.device) -> Hook | None:
        if self._powersgd is not None:
            self._powersgd.open(step, device, self.scaler, self.may_miss_gradients)
            return self._powersgd.reduce
        return None if self._sent_as is None else average_hook(self._sent_as, step.extra_weight)


def refuse_unusual_gradients(task: nn.Module, cannot: str, instead: str) -> None:
    """Refuse parameters whose gradients do not lie in a bucket as numbers in order.

    Args:
        task: Has the parameters.
        cannot: What cannot be done with the gradients of such parameters.
        instead: What to set instead.

    Raises:
        ValueError: Naming the parameters.
    """
    names = [
        f"{name}, which has sparse=True"
        for name, module in task.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    ]
    names += [f"{name}, which is complex" for name, p in task.named_parameters() if p.is_complex()]
    if names:
        raise ValueError(
            f"{cannot} the gradients of {listed(names)}; use dense, real parameters, or {instead}"
        )


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
