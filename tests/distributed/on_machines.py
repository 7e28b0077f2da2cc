"""Run as a program, on each of several machines: a fit that tells how it goes.

Usage: on_machines.py RUN_DIR [OPTION=VALUE...]    (RUN_DIR may be "-": the default one)
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from trainer import Callback, TaskModule, Trainer
from trainer.loggers import JsonlLogger

STEPS = 24


class Line(TaskModule):
    """Takes its time for a step: what the file ``pace`` beside this machine's run says."""

    def __init__(self, pace: Path) -> None:
        super().__init__()
        self.pace = pace
        self.net = torch.nn.Sequential(
            torch.nn.Linear(1, 8), torch.nn.Dropout(0.3), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )

    def forward(self, batch: Any) -> Tensor:
        result: Tensor = self.net(batch[0])
        return result

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        if self.run.split == "train" and self.pace.exists():
            time.sleep(float(self.pace.read_text()))
        if self.run.step == 4 and os.environ.get("FAILS_ON") == str(self.run.rank):
            raise RuntimeError("an accident")
        return (outputs - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Tells(Callback):
    """Says on rank 0's machine how far the run has come, and on how many ranks."""

    def on_log(self, run: Any, metrics: Any) -> None:
        print(f"STEP {run.step} of {run.world_size}", flush=True)


def data() -> TensorDataset:
    x = torch.linspace(0, 1, 64).unsqueeze(1)
    return TensorDataset(x, (6 * x).sin())


def fit(run_dir: str, **options: Any) -> tuple[str, Any]:
    """Return the sum of the last weights to the last bit, and the result."""
    trainer = Trainer(
        **{
            "accelerator": "cpu",
            "run_dir": None if run_dir == "-" else run_dir,
            "callbacks": {"tells": Tells()},
            "logger": {"jsonl": JsonlLogger()},
            "reproducible": True,
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "max_steps": STEPS,
            "log_every_n_steps": 1,
            "timeout_s": 20,
            "checkpoint": {"every_n_steps": 3, "asynchronous": False},
            **options,
        }
    )
    task = Line(Path(run_dir).parent / "pace")
    result = trainer.fit(task, train=data(), val=data())
    return sum(float(p.detach().double().sum()) for p in task.parameters()).hex(), result


if __name__ == "__main__":
    given = dict(option.split("=", 1) for option in sys.argv[2:])
    weights, result = fit(sys.argv[1], **{name: json.loads(v) for name, v in given.items()})
    print(f"ENDED {weights} {None if result is None else result.step}", flush=True)
