"""What the tests of checkpoints share: something to save, and ways to look at what was saved."""

import os
import random
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.writer import CheckpointWriter, Snapshot
from trainer.config import CheckpointConfig


def snapshot(step: int, metric: float | None = None, **fields: Any) -> Snapshot:
    values: dict[str, Any] = {
        "weights": nn.Linear(3, 2).state_dict(),
        "state": {"optimizer": {"state": {0: {"exp_avg": torch.full((3,), float(step))}}}},
        "config": {"trainer": {"max_epochs": 2}},
        "world_size": 2,
    }
    return Snapshot(step=step, metric=metric, **{**values, **fields})


def write(folder: Path, *snapshots: Snapshot, **options: Any) -> CheckpointWriter:
    writer = CheckpointWriter(folder, CheckpointConfig(**options))
    for each in snapshots:
        writer.save(each)
    writer.close()
    return writer


def steps(folder: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in folder.glob("step-*"))


def step_at(folder: Path, link: str) -> int:
    assert not os.path.isabs(os.readlink(folder / link))  # the run can be moved
    return int((folder / link).resolve().name.removeprefix("step-"))


def damage(file: Path, how: str, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    if how == "flip":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del content[rng.randrange(len(content)) :]
    elif how == "zero":
        start = rng.randrange(len(content))
        page = content[start : start + 64]
        if not any(page):
            page[:] = b"x" * len(page)
            content[start : start + 64] = page
        else:
            content[start : start + 64] = bytes(len(page))
    file.write_bytes(content)
