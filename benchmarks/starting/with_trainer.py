"""Two steps with the Trainer, from a plain script: its argument is the number of ranks."""

from __future__ import annotations

import os
import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.starting.digits import (
    BATCH_SIZE,
    STEPS,
    build_net,
    normalized,
    note_step,
    read_digits,
)
from trainer import TaskModule, Trainer

Batch = tuple[Tensor, Tensor]


class Digits(TaskModule):
    """The net of the recipe."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build_net()

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.net(normalized(batch[0]))
        return logits

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the mean cross-entropy."""
        return F.cross_entropy(outputs, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), 0.004, fused=True)

    def after_optimizer_step(self) -> None:
        """Note it for the benchmark."""
        note_step(self.run.step + 1)


def main() -> None:
    """Train."""
    trainer = Trainer(
        devices=int(sys.argv[1]),
        global_batch_size=BATCH_SIZE,
        max_steps=STEPS,
        run_dir=os.environ["BENCHMARK_FOLDER"] + "/run",
    )
    trainer.fit(Digits(), train=read_digits())


if __name__ == "__main__":
    main()
