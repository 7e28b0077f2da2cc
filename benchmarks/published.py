"""Does a simulation reproduce what others measured? PyTorch's own benchmark of DDP, on paper.

    python -m benchmarks.published                    # seconds

The measurements: github.com/pytorch/pytorch, benchmarks/distributed/ddp/README.md (torch 1.4, NCCL,
32 images per GPU, median seconds per step), on machines with 8 V100 and 4 x 100 Gbit/s InfiniBand.

What goes in: for each net its two rows of a single GPU (without DDP, and what DDP adds to that),
and the same hardware for all rows, from specifications:

- 25 GB/s between GPUs, each way: one NVLink 2.0 (NVIDIA V100 whitepaper), which every pair of
  neighbours in a ring has at least, by the topology in that README; latency 3.4 us, 9.6 us between
  machines (NCCL 2.7, src/graph/tuning.cc, ring, simple protocol).
- 50 GB/s between machines, each way: 4 x 100 Gbit/s.

What is assumed: backward is two thirds of the time, and each layer takes its share of the
multiplications. What is left out: that all-reduces take processors and memory bandwidth from
backward, and that GPUs wait for the slowest of them. The last columns are for comparison: there
nothing overlaps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from benchmarks.common import table
from trainer.planning.buckets import bucket_layout
from trainer.planning.network import Link, Network
from trainer.planning.simulation import Bucket, Compute, Step, simulate

NETWORK = Network(Link(3.4e-6, 25e9), Link(9.6e-6, 50e9), ranks_per_node=8)
Parameters = Iterator[tuple[int, int]]

GPUS = (2, 4, 8, 16)
BOUND, BOUND_FOR = 0.05, "resnet50"


@dataclass(frozen=True)
class Net:
    """A residual network, and what was published of it.

    Attributes:
        name: As in the README.
        blocks: Bottlenecks in each of the four levels.
        plain_ms: A step of one GPU without DDP.
        ddp_ms: A step of one GPU with DDP.
        published_ms: A step on 2, 4, 8 and 16 GPUs.
        groups: Of the 3 x 3 convolutions.
        group_width: Channels of a group in the first level.
    """

    name: str
    blocks: tuple[int, int, int, int]
    plain_ms: float
    ddp_ms: float
    published_ms: tuple[float, float, float, float]
    groups: int = 1
    group_width: int = 64

    def parameters(self) -> Parameters:
        """Yield elements and multiplications (for one image of 224 x 224) of each parameter."""

        def convolution(
            inputs: int, outputs: int, kernel: int, size: int, groups: int = 1
        ) -> Parameters:
            count = inputs * outputs // groups * kernel**2
            yield from ((count, count * size**2), (outputs, 0), (outputs, 0))  # and BatchNorm

        yield from convolution(3, 64, 7, 112)
        inputs = 64
        for level, blocks in enumerate(self.blocks):
            size, outputs = 56 >> level, 256 << level
            width = (self.group_width << level) * self.groups
            for block in range(blocks):
                shrinks = block == 0 and level > 0
                yield from convolution(inputs, width, 1, size * 2 if shrinks else size)
                yield from convolution(width, width, 3, size, self.groups)
                yield from convolution(width, outputs, 1, size)
                if block == 0:
                    yield from convolution(inputs, outputs, 1, size)
                inputs = outputs
        yield from ((inputs * 1000, inputs * 1000), (1000, 0))

    def simulate(self, gpus: int) -> Step:
        """Return a step on so many GPUs."""
        counts, work = zip(*self.parameters(), strict=True)
        backward_s = self.plain_ms / 1e3 * 2 / 3
        ready_s, done = [0.0] * len(counts), 0
        for number in range(len(counts))[::-1]:
            done += work[number]
            ready_s[number] = backward_s * done / sum(work)
        compute = Compute(backward_s / 2, backward_s, ready_s, (self.ddp_ms - self.plain_ms) / 1e3)
        return simulate(compute, buckets_of(self), lambda size: NETWORK.ring_s(size, gpus))


@cache
def buckets_of(net: Net) -> list[Bucket]:
    """Return DDP's buckets; they are the same for any number of GPUs."""
    parameters = [(count, torch.float32) for count, _ in net.parameters()]
    order = range(len(parameters))[::-1]
    return bucket_layout(parameters, order, None)


NETS = (
    Net("resnet50", (3, 4, 6, 3), 97, 100, (103, 103, 104, 104)),
    Net("resnet101", (3, 4, 23, 3), 162, 171, (176, 176, 179, 179)),
    Net("resnext50_32x4d", (3, 4, 6, 3), 145, 147, (153, 153, 157, 157), 32, 4),
    Net("resnext101_32x8d", (3, 4, 23, 3), 415, 425, (438, 439, 447, 450), 32, 8),
)


def rows(net: Net) -> Iterator[tuple[int, float, float, float]]:
    """Yield GPUs, and milliseconds of a step: published, simulated, and if nothing overlapped."""
    for gpus, published_ms in zip(GPUS, net.published_ms, strict=True):
        step = net.simulate(gpus)
        serial_ms = net.ddp_ms + step.communication_s * 1e3
        yield gpus, published_ms, step.step_s * 1e3, serial_ms


def main() -> None:
    """Print the table; end with code 1 if the bound is broken."""
    parser = argparse.ArgumentParser(description="Simulate a published benchmark of DDP.")
    parser.add_argument("--markdown", action="store_true")
    markdown = parser.parse_args().markdown
    lines, worst = [], 0.0
    for net in NETS:
        for gpus, published, simulated, serial in rows(net):
            times = (simulated, serial, net.ddp_ms)  # the last one: as if GPUs cost nothing
            cells = [cell for ms in times for cell in (f"{ms:.1f}", f"{ms / published - 1:+.1%}")]
            lines.append([net.name, str(gpus), f"{published:g}", *cells])
            if net.name == BOUND_FOR:
                worst = max(worst, abs(simulated / published - 1))
    header = ["net", "GPUs", "published ms", "simulated", "error", "no overlap", "error"]
    print(table([*header, "as 1 GPU", "error"], lines, markdown))
    sys.exit(worst > BOUND)


if __name__ == "__main__":
    main()
