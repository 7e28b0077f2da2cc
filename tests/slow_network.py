"""A network on which every bucket of gradients takes its time."""

# Annotations are not postponed here: DDP compares those of a hook with the classes themselves.

from threading import Timer
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.strategies import DDPStrategy


class SlowNetwork(DDPStrategy):
    """DDP on it."""

    def __init__(self, seconds: float, bucket_cap_mb: float | None = None) -> None:
        super().__init__(bucket_cap_mb=bucket_cap_mb)
        self.seconds = seconds

    def setup(self, step: Any, device: torch.device) -> Any:
        wrapped = super().setup(step, device)
        wrapped.register_comm_hook(self.seconds, send_slowly)
        return wrapped


def send_slowly(seconds: float, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer, async_op=True)
    received: torch.futures.Future[Tensor] = torch.futures.Future()

    def finish() -> None:
        work.wait()
        received.set_result(buffer)

    Timer(seconds, finish).start()
    return received
