"""DDP's own buckets, at any world size, in one process: it is run on a group that sends nothing."""

# Annotations are not postponed here: DDP compares those of a hook with the classes themselves.

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup, GradBucket
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.futures import Future

from trainer.planning.simulation import Bucket
from trainer.starting import num_threads

CAPS_MB = (None, 1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0)
"""Values of ``bucket_cap_mb`` to choose from; None is torch's own."""


def bucket_layout(
    parameters: Sequence[tuple[int, torch.dtype]],
    order: Sequence[int],
    cap_mb: float | None,
    world_size: int,
) -> list[Bucket]:
    """Return the buckets into which DDP puts the gradients of a module.

    Args:
        parameters: Elements and type of each, in the order of ``module.parameters()``.
        order: Their numbers in the order in which their gradients become ready.
        cap_mb: The option ``bucket_cap_mb``.
        world_size: The number of ranks.

    Returns:
        The buckets in the order in which they are sent; sizes are those of the gradients.
    """
    options: dict[str, Any] = {} if cap_mb is None else {"bucket_cap_mb": cap_mb}
    module = _ReadyInOrder(parameters, order)
    numbers = {id(p): number for number, p in enumerate(module.parameters())}
    found: list[Bucket] = []

    def note(_: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        buffer: torch.Tensor = bucket.buffer()
        members = tuple(numbers[id(p)] for p in bucket.parameters())
        found.append(Bucket(members, buffer.numel() * buffer.element_size()))
        done: Future[torch.Tensor] = Future()
        done.set_result(buffer)
        return done

    with num_threads(1):  # threads would be in the way of a later fork
        ddp = nn.parallel.DistributedDataParallel(
            module, process_group=_silent_group(world_size), **options
        )
        ddp.register_comm_hook(None, note)
        for _ in range(2):  # after the first, DDP orders its buckets by what became ready first
            found.clear()
            ddp().backward()
    return found


def _silent_group(world_size: int) -> dist.ProcessGroup:
    """Return a group of the backend `fake`, beside whatever groups there are."""
    custom = dist.ProcessGroup.BackendType.CUSTOM
    group = dist.ProcessGroup(HashStore(), 0, world_size)
    group._set_default_backend(custom)
    backend = FakeProcessGroup._create_internal(0, world_size)
    group._register_backend(torch.device("cpu"), custom, backend)
    return group


class _ReadyInOrder(nn.Module):
    """Parameters whose gradients become ready in a given order."""

    def __init__(self, parameters: Sequence[tuple[int, torch.dtype]], order: Sequence[int]) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.zeros(count, dtype=kind) for count, kind in parameters)
        self._order = order

    def forward(self) -> torch.Tensor:
        total = torch.zeros(())
        for number in reversed(self._order):  # what was used last is ready first
            total = total + self.all[number].sum().float()
        return total
