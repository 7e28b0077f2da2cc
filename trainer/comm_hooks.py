"""Gradient communication hooks by name: what DDP sends instead of plain float32 gradients."""

# Annotations are not postponed here: DDP compares those of a hook with the classes themselves.

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from trainer.data.plan import ceil_div
from trainer.precision import DTYPES
from trainer.tree_sum import TreeSum

# Torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

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

    hook.__name__ = f"send_as_{name}"  # DDP refuses torch's own names on gloo
    return hook


class FixedOrderReduction:
    """Adds gradients up over the ranks along the tree of ``tree_sum.py``, whatever the buckets.

    Every rank adds up its own part of each bucket: the others send it theirs (all-to-all), and it
    sends the sum to all (all-gather), which moves as many bytes as a ring all-reduce. Between two
    ranks an all-reduce is one addition, the same in either order.
    """

    def __init__(self, sums: TreeSum, device: torch.device) -> None:
        """Get ready; every rank does so at the same time.

        Args:
            sums: What this rank has added up before its last micro-batch.
            device: Where the gradients are.
        """
        self._sums = sums
        self._device = device
        self._world_size = dist.get_world_size()
        self._group: dist.ProcessGroup | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        else:
            # With gloo, only a thread can wait for an all-to-all beside the backward. There is one,
            # so that the all-gathers come in the order of the buckets; they have a group of their
            # own, for they run beside later all-to-alls. It ends with the process, even if it
            # waits for a rank that is gone.
            self._group = dist.new_group(backend="gloo")
            self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
            self._thread = Thread(target=self._work, name="fixed-order reduction", daemon=True)
            self._thread.start()

    def hook(self) -> Hook:
        """Return the communication hook for DDP."""

        def add_in_fixed_order(_: Any, bucket: GradBucket) -> Future[torch.Tensor]:
            buffer: torch.Tensor = bucket.buffer()
            self._sums.add_to(dict(zip(bucket.parameters(), bucket.gradients(), strict=True)))
            # Gloo rounds sums in half precision in its own way.
            if self._world_size == 2 and buffer.dtype in (torch.float32, torch.float64):
                return _all_reduce(buffer).then(lambda sent: sent.value()[0].add_(0.0))
            return self._reduce(buffer)

        return add_in_fixed_order

    def close(self) -> None:
        """End the thread, and leave its group."""
        if self._group is not None:
            self._queue.put(None)
            self._thread.join(timeout=1)
            if not self._thread.is_alive():  # else it waits for a rank that is gone
                dist.destroy_process_group(self._group)

    def _reduce(self, buffer: torch.Tensor) -> Future[torch.Tensor]:
        if self._stream is None:
            done: Future[torch.Tensor] = Future()
            sent, received = self._send_parts(buffer)
            self._queue.put(lambda: self._add_parts(buffer, sent, received, done))
            return done
        done = Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):  # here it is the stream that waits, not this thread
            self._add_parts(buffer, *self._send_parts(buffer), done)
        return done

    def _send_parts(self, buffer: torch.Tensor) -> tuple[dist.Work, torch.Tensor]:
        part = ceil_div(buffer.numel(), self._world_size)
        whole = nn.functional.pad(buffer, (0, part * self._world_size - buffer.numel()))
        received = torch.empty_like(whole)
        return dist.all_to_all_single(received, whole, async_op=True), received

    def _add_parts(
        self,
        buffer: torch.Tensor,
        sent: dist.Work,
        received: torch.Tensor,
        done: Future[torch.Tensor],
    ) -> None:
        sent.wait()
        parts = received.view(self._world_size, -1)
        while len(parts) > 1:
            parts = parts[0::2] + parts[1::2]
        total = parts[0].add_(0.0)
        whole = torch.empty_like(received)
        _all_gather(whole, total, group=self._group)
        buffer.copy_(whole[: buffer.numel()])
        done.set_result(buffer)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()


def _all_reduce(tensor: torch.Tensor) -> Future[Any]:
    future: Future[Any] = dist.all_reduce(tensor, async_op=True).get_future()
    return future
