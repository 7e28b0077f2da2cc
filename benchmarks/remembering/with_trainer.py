"""The same with the Trainer; the arguments are the data in MB, the ranks, and more options."""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor

from benchmarks.remembering.net import (
    BATCH_SIZE,
    LEARNING_RATE,
    STEPS,
    build_data,
    build_net,
    note_step,
)
from trainer import TaskModule, Trainer


class Net(TaskModule):
    """The net, with a loss that makes it smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build_net()

    def forward(self, batch: tuple[Tensor]) -> Tensor:
        """Return the outputs."""
        outputs: Tensor = self.net(batch[0])
        return outputs

    def loss(self, outputs: Tensor, batch: tuple[Tensor]) -> Tensor:
        """Return the mean square."""
        return outputs.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), LEARNING_RATE, fused=True)

    def after_optimizer_step(self) -> None:
        """Tell the benchmark."""
        note_step(self.run.step + 1)


def main() -> None:
    """Train; the end saves."""
    trainer = Trainer(
        devices=int(sys.argv[2]),
        global_batch_size=BATCH_SIZE,
        max_steps=STEPS,
        run_dir=os.environ["BENCHMARK_FOLDER"] + "/run",
        checkpoint={"asynchronous": "synchronous" not in sys.argv},
        reproducible="reproducible" in sys.argv,
        micro_batch_size=BATCH_SIZE // 2 if "reproducible" in sys.argv else None,
    )
    trainer.fit(Net(), train=build_data(int(sys.argv[1])))


if __name__ == "__main__":
    main()
