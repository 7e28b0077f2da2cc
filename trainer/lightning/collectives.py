"""What a module asks of all ranks: ``self.all_gather`` and ``self.trainer.strategy``.

The ranks divide each batch, so what they have of it differs in size, and some may have nothing.
Whatever would then wait for a rank that never comes, or mix up what the ranks send, is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer import distributed
from trainer.lightning.hooks import OF_A_TRAINED_BATCH, OF_AN_EVALUATED_BATCH

if TYPE_CHECKING:
    from trainer.lightning.manual import ManualOptimization
    from trainer.lightning.module import LightningTask


def check_all_call(task: LightningTask, what: str) -> None:
    """Refuse a collective where a rank may have no batch, and so would not take part.

    Args:
        task: Knows which step or hook runs.
        what: The module's call.

    Raises:
        ValueError: On several ranks, in the steps of an evaluation and the hooks around them; and
            in those of training, unless every rank has a part of each batch.
    """
    hook, world_size = task.calls.running, distributed.world_size()
    if world_size == 1:
        return
    if hook in OF_AN_EVALUATED_BATCH:
        raise ValueError(
            f"{what} in {hook}: the ranks have different numbers of batches there, so some would "
            "wait for ever; self.log gives means over all ranks, and anything else can be gathered "
            "in the hook at the end of the epoch"
        )
    if hook in OF_A_TRAINED_BATCH and not task.data.is_for_all(task.config, world_size):
        raise ValueError(
            f"{what} in {hook}: a rank may have no part of a batch, or more micro-batches than "
            "another, so some would wait for ever; give the loader drop_last=True, and leave "
            "micro_batch_size out"
        )


class Strategy:
    """The part of ``self.trainer.strategy`` that modules use: collectives by Lightning's names."""

    def __init__(self, task: LightningTask, device: torch.device) -> None:
        self._task = task
        self._lightning_optimizers: list[Any] = []  # what self.optimizers() returns
        self.root_device = device

    @property
    def model(self) -> nn.Module:
        """The user's module."""
        module: nn.Module = self._task.module
        return module

    lightning_module = model

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return distributed.world_size()

    @property
    def global_rank(self) -> int:
        """This rank's number."""
        return distributed.rank()

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        self._check("self.trainer.strategy.barrier")
        distributed.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank 0's object."""
        self._check("self.trainer.strategy.broadcast")
        if src != 0:
            raise ValueError(f"self.trainer.strategy.broadcast(src={src}): it must be 0")
        return distributed.broadcast_object(obj)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the sum or mean over the ranks.

        Raises:
            ValueError: On every rank, if their tensors are of different shapes.
        """
        if group is not None or str(reduce_op).lower() not in ("mean", "avg", "sum"):
            raise ValueError(
                f"self.trainer.strategy.reduce(group={group}, reduce_op={reduce_op}): it reduces "
                "over all ranks, and by 'mean' or 'sum'"
            )
        own = torch.as_tensor(tensor).detach().clone()
        self._check("self.trainer.strategy.reduce", own)
        total = distributed.all_reduce_sum(own)
        return total if str(reduce_op).lower() == "sum" else total / distributed.world_size()

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> Any:
        """Return the tensors of all ranks, stacked; the tensor itself on one rank.

        Raises:
            ValueError: On every rank, if their tensors are of different shapes.
        """
        if distributed.world_size() == 1:
            return tensor
        self._check("self.all_gather", tensor)
        if sync_grads:
            return _Gathered.apply(tensor)  # type: ignore[no-untyped-call]
        return distributed.all_gather_tensor(tensor.detach().contiguous())

    def backward(self, loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Do what ``self.manual_backward`` stands for."""
        self._by_hand().backward(loss, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Any, **kwargs: Any) -> Any:
        """Do what ``step`` of one of ``self.optimizers()`` stands for."""
        return self._by_hand().optimizer_step(optimizer, closure, **kwargs)

    def _check(self, what: str, tensor: torch.Tensor | None = None) -> None:
        """Refuse a collective that not all ranks call, or with tensors that do not fit."""
        check_all_call(self._task, what)
        if tensor is None:
            return
        kinds = distributed.all_gather_object((tuple(tensor.shape), tensor.dtype))
        if len(set(kinds)) > 1:
            have = ", ".join(f"{shape} of {str(dtype)[6:]}" for shape, dtype in kinds)
            raise ValueError(
                f"{what} got tensors of different kinds from the ranks: {have}. Each rank has its "
                "own part of a batch, and parts differ in size. Keep what is to be joined in a "
                "torchmetrics.CatMetric, whose compute() at the end of an epoch has that of all "
                "ranks; or log a torchmetrics object"
            )

    def _by_hand(self) -> ManualOptimization:
        if self._task.manual is None:
            raise ValueError(
                "the loop runs backward and steps the optimizer; to do so in training_step, set "
                "self.automatic_optimization = False"
            )
        return self._task.manual


class _Gathered(torch.autograd.Function):
    """The tensors of all ranks; each rank's gets the sum of the gradients that all have for it."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor) -> torch.Tensor:
        return distributed.all_gather_tensor(own.contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return distributed.all_reduce_sum(gradient.clone())[distributed.rank()]
