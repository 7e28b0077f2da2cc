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
        # Divide first: a sum over many ranks overflows fp16 sooner than a mean.
        compressed = buffer.div(dist.get_world_size()).to(dtype)
        exact_grads = [
            grad
            for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True)
            if parameter is exact
        ]
        exact_means = [grad.div(dist.get_world_size()) for grad in exact_grads]
        sent = [dist.all_reduce(tensor, async_op=True) for tensor in (compressed, *exact_means)]

        def decompress(_: Future[Any]) -> torch.Tensor:
            for work in sent:
                work.wait()
            buffer.copy_(compressed)
            for grad, mean in zip(exact_grads, exact_means, strict=True):
                grad.copy_(mean)
            return buffer

        future: Future[Any] = sent[0].get_future()
        return future.then(decompress)

    hook.__name__ = f"{name}_compress_hook"
    return hook
