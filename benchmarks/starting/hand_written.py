"""Two steps by a plain loop: alone, or with DDP where torchrun has started this."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.starting.digits import (
    BATCH_SIZE,
    STEPS,
    build_net,
    normalized,
    note_step,
    read_digits,
)


def main() -> None:
    """Train."""
    data, net = read_digits(), build_net()
    model: nn.Module = net
    sampler, ranks = None, int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(net)
        sampler = DistributedSampler(data)
    optimizer = torch.optim.AdamW(net.parameters(), 0.004, fused=True)
    loader = DataLoader(data, BATCH_SIZE // ranks, shuffle=sampler is None, sampler=sampler)
    for step, (images, labels) in enumerate(loader, start=1):
        optimizer.zero_grad()
        F.cross_entropy(model(normalized(images)), labels).backward()
        optimizer.step()
        note_step(step)
        if step == STEPS:
            break
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
