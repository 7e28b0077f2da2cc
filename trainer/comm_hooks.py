"""Gradient communication hooks by name: what DDP sends instead of plain float32 gradients."""

# Annotations are not postponed here: DDP compares those of a hook with the classes themselves.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]


def compress_hook(name: str, exact: torch.nn.Parameter) -> Hook:
    """Return a hook that sends gradients in half the bytes; works on gloo and NCCL.

    Torch's own bf16 hook refuses gloo, and neither of torch's leaves a single value uncompressed.

    Args:
        name: ``fp16`` or ``bf16``.
        exact: A scalar parameter whose gradient must arrive in full precision: it is sent by
            itself, beside the rest.
    """
    dtype = DTYPES[name]

    def hook(_: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        buffer: torch.Tensor = bucket.buffer()
        world_size = dist.get_world_size()
        # Divide first: a sum over many ranks overflows fp16 sooner than a mean.
        compressed = buffer.div(world_size).to(dtype)
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        exact_grad = next((grad for parameter, grad in pairs if parameter is exact), None)
        if exact_grad is not None:
            # Sent first: the backend takes work in order, so whoever waits for this one below
            # cannot keep it from starting.
            exact_mean = exact_grad.div(world_size)
            exact_sent = dist.all_reduce(exact_mean, async_op=True)
        sent = dist.all_reduce(compressed, async_op=True)

        # Gloo calls this before it declares the work done, so it must not wait for `sent` itself.
        def decompress(_: Future[Any]) -> torch.Tensor:
            buffer.copy_(compressed)
            if exact_grad is not None:
                exact_sent.wait()
                exact_grad.copy_(exact_mean)
            return buffer

        future: Future[Any] = sent.get_future()
        return future.then(decompress)

    hook.__name__ = f"send_as_{name}"  # DDP refuses torch's own names on gloo
    return hook
