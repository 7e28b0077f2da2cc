"""A few steps of hand-written DDP under torchrun, and one save; the argument is the data in MB."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.remembering.net import (
    BATCH_SIZE,
    LEARNING_RATE,
    STEPS,
    build_data,
    build_net,
    note_step,
)


def main() -> None:
    """Train and save."""
    dist.init_process_group("gloo")
    data, net = build_data(int(sys.argv[1])), build_net()
    model = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters(), LEARNING_RATE, fused=True)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, BATCH_SIZE // dist.get_world_size(), sampler=sampler)
    for step, (inputs,) in enumerate(loader, start=1):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        note_step(step)
        if step == STEPS:
            break
    if dist.get_rank() == 0:
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, os.environ["BENCHMARK_FOLDER"] + "/checkpoint.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
