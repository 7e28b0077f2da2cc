"""What a link really gives, measured by all-reduces; every rank runs this, in its host.

Rank 0 prints a `Link` as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.networking.hosts import Network

_BYTES = 4 << 20
_SMALL = 4 << 10


@dataclass(frozen=True)
class Link:
    """What was measured.

    Attributes:
        mbit: Megabits per second in each direction of a host, from an all-reduce of 4 MiB.
        latency_ms: Of an all-reduce of 4 KiB.
    """

    mbit: float
    latency_ms: float

    @classmethod
    def measure(cls, network: Network) -> Link:
        """Measure the links of a network; some seconds."""
        outputs = network.run([sys.executable, "-m", __name__], timeout_s=120)
        return cls(**json.loads(outputs[0]))


def all_reduce_s(num_bytes: int, times: int) -> float:
    """Return the median seconds of an all-reduce of so many bytes, on the slowest rank."""
    buffer = torch.zeros(num_bytes // 4)
    taken = []
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(buffer)
        taken.append(time.perf_counter() - start)
    slowest = torch.tensor(taken, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(median(slowest.tolist()))


def main() -> None:
    """Measure as one of the ranks."""
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    all_reduce_s(_BYTES, 2)  # uses up what the limit lets through at once
    sent = 2 * (world_size - 1) / world_size * _BYTES  # by each rank, in a ring
    mbit = sent * 8 / 1e6 / all_reduce_s(_BYTES, 5)
    link = Link(mbit, all_reduce_s(_SMALL, 50) * 1000)
    if dist.get_rank() == 0:
        print(json.dumps(asdict(link)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
