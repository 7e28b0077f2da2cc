"""Plain averaging of gradients, in their own number format or in half the bytes."""

# Annotations are not postponed here: DDP compares those of a hook with the classes themselves.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from trainer import distributed

Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]


def average_hook(dtype: torch.dtype | None, exact: torch.nn.Parameter) -> Hook:
    """Return a hook that sends gradients as ``dtype``; works on gloo and NCCL.

    Torch's own bf16 hook refuses gloo, and neither of torch's leaves a single value uncompressed.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``; None for what they are, as DDP itself does.
        exact: A scalar parameter whose gradient must arrive in full precision: it is sent by
            itself, beside the rest.
    """

    def send_as_they_are(_: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        sent = _all_reduce(bucket.buffer().div_(dist.get_world_size()))
        return sent.then(lambda sent: sent.value()[0])

    def send_compressed(_: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        buffer: torch.Tensor = bucket.buffer()
        world_size = dist.get_world_size()
        # Divide first: a sum over many ranks overflows fp16 sooner than a mean.
        compressed = buffer.div(world_size).to(dtype)
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        exact_grad = next((grad for parameter, grad in pairs if parameter is exact), None)
        exact_sent: Future[Any] | None = None
        if exact_grad is not None:
            # Sent first: the backend takes work in order, so whoever waits for this one below
            # cannot keep it from starting.
            exact_sent = _all_reduce(exact_grad.div(world_size))

        # Gloo calls this before it declares the work done, so it must not wait for that. NCCL calls
        # it at once, on a stream of its own: only what comes out of a future stays in memory until
        # that stream has read it.
        def decompress(sent: Future[Any]) -> torch.Tensor:
            buffer.copy_(sent.value()[0])
            if exact_grad is not None and exact_sent is not None:
                exact_grad.copy_(exact_sent.wait()[0])
            return buffer

        return _all_reduce(compressed).then(decompress)

    return send_as_they_are if dtype is None else send_compressed


def _all_reduce(tensor: torch.Tensor) -> Future[Any]:
    future: Future[Any] = dist.all_reduce(tensor, async_op=True).get_future()
    return future


def overflow_in(hook: str | None, is_scaled: bool) -> str | None:
    """Return what a hook may have made infinite, as a cause to name; None if nothing.

    Args:
        hook: The option ``comm_hook``.
        is_scaled: Whether the loss is scaled; then a step that overflows is skipped.
    """
    if hook is None or not hook.endswith("fp16") or is_scaled or distributed.world_size() == 1:
        return None
    most = int(torch.finfo(torch.float16).max)
    instead = hook.replace("fp16", "bf16")
    return f"a gradient beyond {most}, the range of what comm_hook={hook} sends (use {instead})"
