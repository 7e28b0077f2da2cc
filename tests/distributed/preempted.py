"""Run as a program: a fit that tells where it is, so that a signal can be sent there.

Usage: preempted.py fit RUN_DIR DEVICES WHERE
       preempted.py resume RUN_DIR...
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from trainer import Callback, TaskModule, Trainer

STEPS = 40
where = ""  # nowhere: nothing is told


def at(place: str, step: int) -> None:
    """Tell the test, once per process, that this is the place, and stay for a moment."""
    global where
    if place == where and step >= 10:
        where = ""
        os.write(1, f"AT {os.getpid()}\n".encode())  # whole, whoever else writes
        time.sleep(0.5)


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if torch.utils.data.get_worker_info() is not None:
            at("worker", index)
        return torch.tensor([index / 64.0]), torch.tensor([index / 32.0 - 1.0])


class Line(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(1, 8), torch.nn.Dropout(0.3), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )

    def forward(self, batch: Any) -> Any:
        at("forward", self.run.step)
        return self.net(batch[0])

    def eval_forward(self, batch: Any) -> Any:
        if where == "validation":
            time.sleep(0.1)
        at("validation", self.run.step)
        return self.net(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return (outputs - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Watcher(Callback):
    def on_save(self, run: Any, path: Path) -> None:
        at("saving", run.step)


def fit(run_dir: str, devices: int = 1, **options: Any) -> None:
    trainer = Trainer(
        devices=devices,
        accelerator="cpu",
        run_dir=run_dir,
        callbacks={"watcher": Watcher()},
        logger={"jsonl": {"_target_": "trainer.loggers.JsonlLogger"}},
        reproducible=True,
        global_batch_size=8,
        micro_batch_size=2,
        max_steps=STEPS,
        log_every_n_steps=5,
        validate_every_n_steps=7,
        timeout_s=30,
        checkpoint={"every_n_steps": 6},
        **options,
    )
    task = Line()
    result = trainer.fit(task, train=Numbers(), val=Numbers())
    total = sum(float(p.detach().double().sum()) for p in task.parameters())
    print(f"DONE {result.step} {total.hex()}", flush=True)


def once_more() -> None:
    """As schedulers do, when the program is on its way out already."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)


if sys.argv[1] == "fit":
    where = sys.argv[4]
    atexit.register(once_more)
    try:
        fit(sys.argv[2], int(sys.argv[3]), num_workers=int(where == "worker"))
    except SystemExit:
        once_more()
else:
    for folder in sys.argv[2:]:
        fit(folder, resume="auto")
