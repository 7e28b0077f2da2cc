"""Which collectives a step issues, and which it should."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from trainer import distributed
from trainer.config import TrainerConfig
from trainer.data.plan import ceil_div
from trainer.verify.record import Collective

ALL_REDUCE, ALL_TO_ALL, ALL_GATHER = "allreduce_", "alltoall_base_", "_allgather_base_"


class CollectiveCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every collective that this thread issues while it is active, DDP's own included.

    Attributes:
        found: Since the last `take`.
        in_forward: Set while the task's forward and loss run.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Collective] = []
        self.in_forward = False
        self._is_paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note a collective, and run it like everything else."""
        if func.namespace == "c10d" and not self._is_paused:
            name = func.overloadpacket.__name__
            self.found.append(Collective(name, _bytes_in(args[:1]), self.in_forward))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is no part of a step: log events, wrapping, loading."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def take(self) -> list[Collective]:
        """Return what was found, and start anew."""
        found, self.found = self.found, []
        return found


def expected_collectives(module: nn.Module, config: TrainerConfig) -> list[Collective] | None:
    """Return what reducing the gradients of one step takes.

    None for a strategy of the user's, and where PowerSGD compresses: that is up to the shapes.

    Args:
        module: The wrapped step module, after at least one step.
        config: The options.
    """
    if not isinstance(module, DistributedDataParallel):
        return None if distributed.world_size() > 1 else []
    buckets = [bucket.buffer() for bucket in module.reducer._get_zeros_like_grad_buckets()]
    if config.uses_powersgd and module.module.task.run.step > config.powersgd_start_step:
        return None
    if config.comm_hook not in (None, "powersgd"):
        sent = [(ALL_REDUCE, 2 * buffer.numel()) for buffer in buckets]
        sent.append((ALL_REDUCE, 4))  # the weight of the global batch, in full precision
    elif config.reproducible:
        sent = [each for buffer in buckets for each in _in_fixed_order(buffer)]
    else:
        sent = [(ALL_REDUCE, buffer.nbytes) for buffer in buckets]
    if config.find_unused_parameters:  # which of them were used, as int32
        trained = [p for p in module.module.parameters() if p.requires_grad]
        sent.append((ALL_REDUCE, 4 * len(trained)))
    return [Collective(name, num_bytes, False) for name, num_bytes in sent]


def gradient_bytes(module: nn.Module) -> int:
    """Return the bytes of all gradients, the extra scalar of the step module included."""
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)


def _in_fixed_order(buffer: torch.Tensor) -> list[tuple[str, int]]:
    world_size = distributed.world_size()
    if world_size == 2 and buffer.dtype in (torch.float32, torch.float64):
        return [(ALL_REDUCE, buffer.nbytes)]  # one addition: there is only one order
    padded = ceil_div(buffer.numel(), world_size) * world_size * buffer.element_size()
    sent = [(ALL_TO_ALL, padded)]
    # With gloo a thread of its own sends the sums, where they cannot be counted.
    return [*sent, (ALL_GATHER, padded)] if buffer.device.type == "cuda" else sent


def _bytes_in(tree: Any) -> int:
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    return sum(map(_bytes_in, tree)) if isinstance(tree, list | tuple) else 0
