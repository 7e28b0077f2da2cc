"""What the tests of checkpoints share: something to save, and ways to look at what was saved."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.faults import damage as damage
from trainer.checkpoint.files import sha256
from trainer.checkpoint.manifest import manifest_text, read_manifest
from trainer.checkpoint.snapshot import Snapshot
from trainer.checkpoint.store import LocalStore
from trainer.checkpoint.writer import CheckpointWriter
from trainer.config import CheckpointConfig


def snapshot(step: int, metric: float | None = None, **fields: Any) -> Snapshot:
    values: dict[str, Any] = {
        "weights": nn.Linear(3, 2).state_dict(),
        "state": {"optimizer": {"state": {0: {"exp_avg": torch.full((3,), float(step))}}}},
        "config": {"trainer": {"max_epochs": 2}},
        "world_size": 2,
    }
    return Snapshot(step=step, metric=metric, **{**values, **fields})


def open_writer(folder: Path, step: int | None = None, **options: Any) -> CheckpointWriter:
    return CheckpointWriter(LocalStore(folder), CheckpointConfig(**options), step)


def write(folder: Path, *snapshots: Snapshot, **options: Any) -> CheckpointWriter:
    writer = open_writer(folder, **options)
    for each in snapshots:
        writer.save(each)
    writer.close()
    return writer


def steps(folder: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in folder.glob("step-*"))


def step_at(folder: Path, link: str) -> int:
    assert not os.path.isabs(os.readlink(folder / link))  # the run can be moved
    return int((folder / link).resolve().name.removeprefix("step-"))


def reseal(path: Path) -> None:
    """Give a checkpoint a manifest that fits its files."""
    files = {
        name: {"size": (path / name).stat().st_size, "sha256": sha256(path / name)}
        for name in ("model.safetensors", "state.pt", "config.yaml")
    }
    text = manifest_text({**read_manifest(path), "files": files})
    (path / "manifest.json").write_text(text)
