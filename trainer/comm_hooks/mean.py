"""The mean over the ranks of several tensors, in one all-reduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class Mean:
    """Sends tensors when it is made, and has their mean when it is asked for it."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        dtype: torch.dtype | None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Send copies of the tensors; nothing, if they have no element.

        Args:
            tensors: Of one dtype and device; with the same shapes on every rank.
            dtype: What to send them as; None for what they are.
            group: Where to; None for the default group.
        """
        self._shapes = [tensor.shape for tensor in tensors]
        self._work: dist.Work | None = None
        if not any(shape.numel() for shape in self._shapes):
            return
        self._dtype = tensors[0].dtype
        # Divide first: a sum over many ranks overflows fp16 sooner than a mean.
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).div_(dist.get_world_size())
        self._flat = flat.to(dtype)
        self._work = dist.all_reduce(self._flat, group=group, async_op=True)

    def receive(self) -> list[torch.Tensor]:
        """Wait, and return the means in the order, shapes and dtype of what was sent.

        On CUDA it is the current stream that waits.
        """
        if self._work is None:
            return [torch.empty(shape) for shape in self._shapes]
        self._work.wait()
        sizes = [shape.numel() for shape in self._shapes]
        pieces = torch.split(self._flat.to(self._dtype), sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]
