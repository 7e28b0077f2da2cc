"""Two steps with Lightning, from a plain script: its argument is the number of ranks."""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.starting.digits import (
    BATCH_SIZE,
    STEPS,
    build_net,
    normalized,
    note_step,
    read_digits,
)


class Digits(lightning.LightningModule):
    """The net of the recipe."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build_net()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Return the mean cross-entropy."""
        return F.cross_entropy(self.net(normalized(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), 0.004, fused=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note it for the benchmark."""
        note_step(batch_idx + 1)


def main() -> None:
    """Train."""
    ranks = int(sys.argv[1])
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=STEPS,
        default_root_dir=os.environ["BENCHMARK_FOLDER"] + "/run",
    )
    trainer.fit(Digits(), DataLoader(read_digits(), BATCH_SIZE // ranks, shuffle=True))


if __name__ == "__main__":
    main()
