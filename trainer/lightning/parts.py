"""Parts of ``self.trainer`` that are objects of their own: strategy, loggers, clipping."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer import distributed
from trainer.loggers import Logger

if TYPE_CHECKING:
    from trainer.lightning.manual import ManualOptimization
    from trainer.lightning.module import LightningTask


class NotAFactError(AttributeError, ValueError):
    """Something that ``self.trainer`` has under Lightning, and not here."""


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
        distributed.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank 0's object."""
        if src != 0:
            raise ValueError(f"self.trainer.strategy.broadcast(src={src}): it must be 0")
        return distributed.broadcast_object(obj)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the sum or mean over the ranks."""
        if group is not None or str(reduce_op).lower() not in ("mean", "avg", "sum"):
            raise ValueError(
                f"self.trainer.strategy.reduce(group={group}, reduce_op={reduce_op}): it reduces "
                "over all ranks, and by 'mean' or 'sum'"
            )
        total = distributed.all_reduce_sum(torch.as_tensor(tensor).detach().clone())
        return total if str(reduce_op).lower() == "sum" else total / distributed.world_size()

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> Any:
        """Return the tensors of all ranks, stacked; the tensor itself on one rank."""
        size = distributed.world_size()
        if size == 1:
            return tensor
        if sync_grads:
            import torch.distributed.nn.functional as with_gradients

            return torch.stack(with_gradients.all_gather(tensor))  # type: ignore[no-untyped-call]
        parts = [torch.empty_like(tensor) for _ in range(size)]
        torch.distributed.all_gather(parts, tensor.detach().contiguous())
        return torch.stack(parts)

    def backward(self, loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Do what ``self.manual_backward`` stands for."""
        self._by_hand().backward(loss, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Any, **kwargs: Any) -> Any:
        """Do what ``step`` of one of ``self.optimizers()`` stands for."""
        return self._by_hand().optimizer_step(optimizer, closure, **kwargs)

    def _by_hand(self) -> ManualOptimization:
        if self._task.manual is None:
            raise ValueError(
                "the loop runs backward and steps the optimizer; to do so in training_step, set "
                "self.automatic_optimization = False"
            )
        return self._task.manual


def shown_loggers(loggers: Iterable[Logger]) -> list[Any]:
    """Return loggers as a module finds them, those with an ``experiment`` first."""
    own = [logger.own for logger in loggers]
    shown = [OurLogger(logger) if isinstance(logger, Logger) else logger for logger in own]
    return sorted(shown, key=lambda logger: not hasattr(logger, "experiment"))


class OurLogger:
    """A logger of ours, in so far as it is one of Lightning's."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger

    @property
    def experiment(self) -> Any:
        """TensorBoard's writer."""
        try:
            return self._logger.writer  # type: ignore[attr-defined]
        except AttributeError:
            raise NotAFactError(
                f"self.logger.experiment: a {self._logger.label} has none; log what it takes by "
                "self.log, or give the Trainer a logger that has one"
            ) from None

    def __getattr__(self, name: str) -> Any:
        raise NotAFactError(
            f"self.logger.{name} is not known here: a {self._logger.label} has an experiment if "
            "it is for TensorBoard; numbers are logged by self.log"
        )


class Silent:
    """The logger of a rank that logs nothing: whatever is called does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Silent:
        """Do nothing."""
        return self


class Clipping:
    """What ``self.clip_gradients`` works with."""

    def clip_gradients(self, optimizer: Any, clip_val: float | None, algorithm: Any) -> None:
        """Clip the gradients of an optimizer by norm or by value, as Lightning names it."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not clip_val or clip_val <= 0:
            return
        if str(getattr(algorithm, "value", algorithm)) == "value":
            nn.utils.clip_grad_value_(parameters, clip_val)
        else:
            nn.utils.clip_grad_norm_(parameters, clip_val)
