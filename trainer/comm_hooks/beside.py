"""A place for the rest of a communication hook, beside the backward that goes on.

A hook that has to wait for one collective before it can launch the next must not wait in the
backward, and not in a callback of the first one either: gloo runs callbacks on any of its threads,
so each rank would launch the next collectives in an order of its own, and they would meet wrongly.
"""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.futures import Future

from trainer import distributed

T = TypeVar("T")
Finish = Callable[[T, dist.ProcessGroup | None], torch.Tensor]


class Beside:
    """Runs the rest of each hook in the order of the buckets, which is the same on every rank."""

    def __init__(self, device: torch.device) -> None:
        """Get ready; every rank does so at the same time.

        Args:
            device: Where the gradients are.
        """
        self._device = device
        self._group: dist.ProcessGroup | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            return
        # With gloo only a thread can wait. There is one, so that collectives come in order; they
        # have a group of their own, for they run beside those of later buckets. The thread ends
        # with the process, even if it waits for a rank that is gone.
        self._group = distributed.new_gloo_group()
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="communication hooks", daemon=True)
        self._thread.start()

    def run(self, begin: Callable[[], T], finish: Finish[T]) -> Future[Any]:
        """Run both, and return the future of what ``finish`` returns.

        Args:
            begin: Runs at once. It may launch collectives in the default group, and must not wait
                for them.
            finish: Gets what ``begin`` returned, and the group to send in. It may wait.
        """
        if self._stream is None:
            done: Future[Any] = Future()
            begun = begin()
            self._queue.put(lambda: self._complete(done, finish, begun))
            return done
        done = Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):  # here it is the stream that waits, and no thread
            done.set_result(finish(begin(), self._group))
        return done

    def close(self) -> None:
        """End the thread, and leave its group."""
        if self._group is not None:
            self._queue.put(None)
            self._thread.join(timeout=1)
            if not self._thread.is_alive():  # else it waits for a rank that is gone
                dist.destroy_process_group(self._group)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()

    def _complete(self, done: Future[Any], finish: Finish[T], begun: T) -> None:
        try:
            done.set_result(finish(begun, self._group))
        except Exception as error:  # the backward that waits raises it
            done.set_exception(error)
