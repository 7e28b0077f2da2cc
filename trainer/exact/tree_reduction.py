"""Adding gradients up over the ranks along the tree of ``tree_sum.py``, whatever the buckets.

Every rank adds up its own part of each of DDP's buckets: the others send it theirs (all-to-all),
and it sends the sum to all (all-gather), which moves as many bytes as a ring all-reduce. Between
two ranks an all-reduce is one addition, the same in either order.
"""

# Annotations are not postponed here: DDP compares those of a hook with the classes themselves.

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from trainer.comm_hooks import Beside
from trainer.exact.tree_sum import TreeSum

# Torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TreeReduction:
    """What DDP does with its buckets instead of an all-reduce; `reduce` is the hook."""

    def __init__(self, sums: TreeSum, device: torch.device) -> None:
        """Get ready; every rank does so at the same time.

        Args:
            sums: What this rank has added up before its last micro-batch.
            device: Where the gradients are.
        """
        self._sums = sums
        self._world_size = dist.get_world_size()
        self._beside = Beside(device)

    def reduce(self, _: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        """Add a bucket up over the ranks; a communication hook for DDP."""
        buffer: torch.Tensor = bucket.buffer()
        self._sums.add_to(dict(zip(bucket.parameters(), bucket.gradients(), strict=True)))
        # Gloo rounds sums in half precision in its own way.
        if self._world_size == 2 and buffer.dtype in (torch.float32, torch.float64):
            sent: Future[Any] = dist.all_reduce(buffer, async_op=True).get_future()
            return sent.then(lambda sent: sent.value()[0].add_(0.0))
        return self._beside.run(
            lambda: self._send_parts(buffer),
            lambda sent, group: self._add_parts(buffer, *sent, group),
        )

    def close(self) -> None:
        """End what sends the sums."""
        self._beside.close()

    def _send_parts(self, buffer: torch.Tensor) -> tuple[dist.Work, torch.Tensor]:
        missing = -buffer.numel() % self._world_size
        whole = nn.functional.pad(buffer, (0, missing)) if missing else buffer
        received = torch.empty_like(whole)
        return dist.all_to_all_single(received, whole, async_op=True), received

    def _add_parts(
        self,
        buffer: torch.Tensor,
        sent: dist.Work,
        received: torch.Tensor,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        sent.wait()
        parts = received.view(self._world_size, -1)
        while len(parts) > 1:
            parts = parts[0::2] + parts[1::2]
        total = parts[0].add_(0.0)
        if received.numel() == buffer.numel():
            _all_gather(buffer, total, group=group)
        else:
            _all_gather(received, total, group=group)
            buffer.copy_(received[: buffer.numel()])
        return buffer
