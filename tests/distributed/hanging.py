"""Run as a program: fits in which a rank hangs; each named on the command line, all at once."""

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from trainer import Callback, TaskModule, Trainer

LIMIT_S = 3.0
HANGS_AT = 3  # optimizer steps done


def hang(how):
    print(f"HANGS {how} AT {time.monotonic()}", flush=True)
    if how == "gil":
        ctypes.PyDLL(None).usleep(300_000_000)  # a C call that keeps the GIL
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(300)


class Points(Dataset):
    """Steps take 4 samples, rank 0 the first two of them."""

    def __init__(self, how):
        self.how = how

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index >= 4 * HANGS_AT and (
            self.how == "load everywhere" or (self.how in ("load", "worker") and index % 4 > 1)
        ):
            hang(self.how)
        return torch.tensor([index / 40])


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        hang("backward")
        return gradient


class Line(TaskModule):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.first = torch.nn.Linear(1, 4)
        self.second = torch.nn.Linear(4, 1)

    def on_fit_start(self):
        if self.how == "skipped":
            self.group = dist.new_group()

    def forward(self, batch):
        hidden = self.first(batch)
        if self.run.step == HANGS_AT and self.run.rank == self.run.world_size - 1:
            if self.how in ("forward", "gil", "stopped", "one rank"):
                hang(self.how)
            if self.how == "backward":
                hidden = SlowBackward.apply(hidden)
        return self.second(hidden)

    def loss(self, outputs, batch):
        return (outputs - batch).square().mean()

    def after_optimizer_step(self):
        if self.how == "skipped" and self.run.step == HANGS_AT and self.run.rank == 0:
            dist.all_reduce(torch.ones(5), group=self.group)

    def eval_forward(self, batch):
        if self.how == "validation":
            if self.run.rank == 1:
                hang(self.how)
            time.sleep(0.5)  # so that the other one is there before
        return self(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Archive(Callback):
    def __init__(self, how):
        self.how = how

    def on_save(self, run, path):
        if self.how == "callback":
            hang(self.how)


def fit(how):
    # Buckets so small that there is one for each layer.
    trainer = Trainer(
        devices=1 if how == "one rank" else 2,
        max_restarts=int(how == "one rank"),
        accelerator="cpu",
        timeout_s=LIMIT_S,
        start_timeout_s=60.0,
        global_batch_size=4,
        shuffle=False,
        bucket_cap_mb=2e-5,
        num_workers=1 if how == "worker" else 0,
        max_steps=6,
        validate_every_n_steps=5,
        callbacks={"archive": Archive(how)},
        logger=False,
        run_dir=f"run-{how}",
    )
    trainer.fit(Line(how), train=Points(how), val=torch.linspace(0, 1, 8)[:, None])


def failed(how):
    try:
        fit(how)
    except Exception as error:
        kind, text = type(error).__name__, error.__cause__.args[0]
        return [kind, str(error), text, time.monotonic()]


def all_at_once(*hows):
    """Fit in processes of their own: beside another launch ranks would not be forks."""
    with ProcessPoolExecutor(len(hows), multiprocessing.get_context("fork")) as pool:
        print("FOUND", json.dumps(dict(zip(hows, pool.map(failed, hows), strict=True))))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        all_at_once(*sys.argv[1:])
    else:
        fit(sys.argv[1])
