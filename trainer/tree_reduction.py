"""Adding gradients up over the ranks along the tree of ``tree_sum.py``, whatever the buckets.

Every rank adds up its own part of each of DDP's buckets: the others send it theirs (all-to-all),
and it sends the sum to all (all-gather), which moves as many bytes as a ring all-reduce. Between
two ranks an all-reduce is one addition, the same in either order.
"""

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

from trainer import distributed
from trainer.tree_sum import TreeSum

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
        self._device = device
        self._world_size = dist.get_world_size()
        self._group: dist.ProcessGroup | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            return
        # With gloo, only a thread can wait for an all-to-all beside the backward. There is one, so
        # that the all-gathers come in the order of the buckets; they have a group of their own, for
        # they run beside later all-to-alls. It ends with the process, even if it waits for a rank
        # that is gone.
        self._group = distributed.new_group("gloo")
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="tree reduction", daemon=True)
        self._thread.start()

    def reduce(self, _: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        """Add a bucket up over the ranks; a communication hook for DDP."""
        buffer: torch.Tensor = bucket.buffer()
        self._sums.add_to(dict(zip(bucket.parameters(), bucket.gradients(), strict=True)))
        # Gloo rounds sums in half precision in its own way.
        if self._world_size == 2 and buffer.dtype in (torch.float32, torch.float64):
            sent: Future[Any] = dist.all_reduce(buffer, async_op=True).get_future()
            return sent.then(lambda sent: sent.value()[0].add_(0.0))
        if self._stream is None:
            done: Future[torch.Tensor] = Future()
            work, received = self._send_parts(buffer)
            self._queue.put(lambda: self._finish(buffer, work, received, done))
            return done
        done = Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):  # here it is the stream that waits, not this thread
            self._add_parts(buffer, *self._send_parts(buffer))
            done.set_result(buffer)
        return done

    def close(self) -> None:
        """End the thread, and leave its group."""
        if self._group is not None:
            self._queue.put(None)
            self._thread.join(timeout=1)
            if not self._thread.is_alive():  # else it waits for a rank that is gone
                dist.destroy_process_group(self._group)

    def _send_parts(self, buffer: torch.Tensor) -> tuple[dist.Work, torch.Tensor]:
        missing = -buffer.numel() % self._world_size
        whole = nn.functional.pad(buffer, (0, missing)) if missing else buffer
        received = torch.empty_like(whole)
        return dist.all_to_all_single(received, whole, async_op=True), received

    def _add_parts(self, buffer: torch.Tensor, sent: dist.Work, received: torch.Tensor) -> None:
        sent.wait()
        parts = received.view(self._world_size, -1)
        while len(parts) > 1:
            parts = parts[0::2] + parts[1::2]
        total = parts[0].add_(0.0)
        if received.numel() == buffer.numel():
            _all_gather(buffer, total, group=self._group)
        else:
            _all_gather(received, total, group=self._group)
            buffer.copy_(received[: buffer.numel()])

    def _finish(
        self,
        buffer: torch.Tensor,
        sent: dist.Work,
        received: torch.Tensor,
        done: Future[torch.Tensor],
    ) -> None:
        try:
            self._add_parts(buffer, sent, received)
        except Exception as error:  # the backward that waits raises it
            done.set_exception(error)  # type: ignore[arg-type]
        else:
            done.set_result(buffer)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
