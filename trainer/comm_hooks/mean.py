"""The mean over the ranks of several tensors, in one all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Mean:
    """The mean of tensors that are on their way; `send` makes one.

    Attributes:
        shapes: Of the tensors.
        dtype: Of the tensors.
        flat: What is sent of all of them; then the mean of it.
        work: What to wait for; None if nothing is sent.
    """

    shapes: list[torch.Size]
    dtype: torch.dtype | None
    flat: torch.Tensor
    work: dist.Work | None

    @classmethod
    def send(
        cls,
        tensors: Sequence[torch.Tensor],
        dtype: torch.dtype | None,
        group: dist.ProcessGroup | None = None,
    ) -> Mean:
        """Send copies of the tensors, without waiting; nothing, if they have no element.

        Args:
            tensors: Of one dtype and device; with the same shapes on every rank.
            dtype: What to send them as; None for what they are.
            group: Where to; None for the default group.
        """
        shapes = [tensor.shape for tensor in tensors]
        if not any(shape.numel() for shape in shapes):
            return cls(shapes, None, torch.empty(0), None)
        # Divide first: a sum over many ranks overflows fp16 sooner than a mean.
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).div_(dist.get_world_size())
        flat = flat.to(dtype)
        work = dist.all_reduce(flat, group=group, async_op=True)
        return cls(shapes, tensors[0].dtype, flat, work)

    def receive(self) -> list[torch.Tensor]:
        """Wait, and return the means in the order, shapes and dtype of what was sent.

        On CUDA it is the current stream that waits.
        """
        if self.work is not None:
            self.work.wait()
        pieces = torch.split(self.flat.to(self.dtype), [shape.numel() for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]
