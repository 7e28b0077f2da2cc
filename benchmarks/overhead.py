"""What a step costs beside a hand-written loop: ours, and that of other trainers.

    python -m benchmarks.overhead               # everything that is installed, plain tables
    python -m benchmarks.overhead --markdown    # the tables of docs/performance.md

A contestant trains for a short and for a long run, and the difference gives the time of a step:
set-up, the last checkpoint and the like cancel, and nothing has to be hooked into anybody's loop.
Contestants take turns, so that a change in the machine's load meets all of them; a figure is the
median over the rounds, a ratio that of the ratios to the hand-written loop of the same round.
Ranks are started once, by torchrun, and every contestant trains in the same ones.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import io
import itertools
import json
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from benchmarks.common import scratch, table
from recipes.mnist import MnistData, MnistTask
from trainer import TaskModule, Trainer

Batch = tuple[Tensor, Tensor]


class TinyTask(TaskModule):
    """A net so small that a step is mostly overhead."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.net(batch[0])
        return logits

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the mean cross-entropy."""
        return F.cross_entropy(outputs, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class ConvTask(MnistTask):
    """The net of the MNIST recipe, with its optimizer and without its schedule."""

    def configure_optimizers(self) -> torch.optim.Optimizer:  # type: ignore[override]
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, fused=True)


@dataclass(frozen=True)
class Workload:
    """What is trained, and for how long.

    Attributes:
        name: For the table.
        task: Builds the net with its loss and optimizer.
        samples: Inputs and labels, enough for the long run to be a part of one epoch.
        batch_size: The global batch.
        steps: Of the short and of the long run.
    """

    name: str
    task: Callable[[], TaskModule]
    samples: Batch
    batch_size: int
    steps: tuple[int, int]

    def dataset(self) -> Dataset[Any]:
        """Return the samples as most people would hold them."""
        return TensorDataset(*self.samples)

    def loader(self) -> DataLoader[Any]:
        """Return the loader of a hand-written loop, for this rank's share of each batch."""
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        data = self.dataset()
        if world_size == 1:
            return DataLoader(data, self.batch_size, shuffle=True)
        return DataLoader(data, self.batch_size // world_size, sampler=DistributedSampler(data))


Contestant = Callable[[Workload, int, Path], None]


def compute_alone(work: Workload, steps: int, folder: Path) -> None:
    """Repeat forward, backward and update with one batch."""
    task = work.task()
    optimizer = _optimizer(task)
    batch = tuple(part[: work.batch_size] for part in work.samples)
    for _ in range(steps):
        optimizer.zero_grad()
        task.loss(task(batch), batch).backward()  # type: ignore[union-attr, no-untyped-call]
        optimizer.step()


def loop_over_tensors(work: Workload, steps: int, folder: Path) -> None:
    """Take each batch out of the tensors in one call."""
    task = work.task()
    optimizer = _optimizer(task)
    order = torch.randperm(len(work.samples[0])).split(work.batch_size)
    for indices in order[:steps]:
        batch = tuple(part[indices] for part in work.samples)
        optimizer.zero_grad()
        task.loss(task(batch), batch).backward()  # type: ignore[union-attr, no-untyped-call]
        optimizer.step()


def hand_written(work: Workload, steps: int, folder: Path) -> None:
    """Loop over a DataLoader; with several ranks, over a DistributedSampler and DDP."""
    task = work.task()
    optimizer = _optimizer(task)
    model: nn.Module = nn.parallel.DistributedDataParallel(task) if dist.is_initialized() else task
    for batch in itertools.islice(work.loader(), steps):
        optimizer.zero_grad()
        F.cross_entropy(model(batch), batch[1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def trainer(work: Workload, steps: int, folder: Path) -> None:
    """Our Trainer as it comes: progress bar, metrics.jsonl, TensorBoard, checkpoints."""
    _fit(work, steps, folder)


def trainer_bare(work: Workload, steps: int, folder: Path) -> None:
    """Our Trainer without callbacks and loggers."""
    _fit(work, steps, folder, callbacks=(), logger=())


def lightning(work: Workload, steps: int, folder: Path) -> None:
    """Lightning as it comes."""
    _fit_lightning(work, steps, folder)


def lightning_bare(work: Workload, steps: int, folder: Path) -> None:
    """Lightning without progress bar, logger and checkpoints."""
    _fit_lightning(
        work,
        steps,
        folder,
        enable_progress_bar=False,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )


def fabric(work: Workload, steps: int, folder: Path) -> None:
    """Lightning Fabric around a hand-written loop."""
    from lightning.fabric import Fabric

    tool = Fabric(accelerator="cpu", devices=1)
    task = work.task()
    model, optimizer = tool.setup(task, _optimizer(task))
    for batch in itertools.islice(tool.setup_dataloaders(work.loader()), steps):
        optimizer.zero_grad()
        tool.backward(F.cross_entropy(model(batch), batch[1]))
        optimizer.step()


def accelerate(work: Workload, steps: int, folder: Path) -> None:
    """Accelerate around a hand-written loop."""
    from accelerate import Accelerator

    tool = Accelerator(cpu=True)
    task = work.task()
    model, optimizer, loader = tool.prepare(task, _optimizer(task), work.loader())
    for batch in itertools.islice(loader, steps):
        optimizer.zero_grad()
        tool.backward(F.cross_entropy(model(batch), batch[1]))
        optimizer.step()


def ignite(work: Workload, steps: int, folder: Path) -> None:
    """An Ignite Engine around a hand-written step."""
    from ignite.engine import Engine

    task = work.task()
    optimizer = _optimizer(task)

    def step(engine: Any, batch: Any) -> None:
        optimizer.zero_grad()
        F.cross_entropy(task(batch), batch[1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    Engine(step).run(work.loader(), max_epochs=1, epoch_length=steps)


ONE_PROCESS: dict[str, tuple[str, Contestant]] = {
    "compute alone": ("", compute_alone),
    "loop over tensors": ("", loop_over_tensors),
    "hand-written loop, DataLoader": ("", hand_written),
    "Trainer, everything on": ("", trainer),
    "Trainer, no callbacks or loggers": ("", trainer_bare),
    "Fabric": ("lightning", fabric),
    "Ignite": ("ignite", ignite),
    "Accelerate": ("accelerate", accelerate),
    "Lightning, no extras": ("lightning", lightning_bare),
    "Lightning, defaults": ("lightning", lightning),
}
REFERENCE = "hand-written loop, DataLoader"
TWO_RANKS = (
    REFERENCE,
    "Trainer, everything on",
    "Trainer, no callbacks or loggers",
    "Lightning, no extras",
    "Lightning, defaults",
)


def _fit(work: Workload, steps: int, folder: Path, **options: Any) -> None:
    Trainer(
        accelerator="cpu",
        global_batch_size=work.batch_size,
        max_steps=steps,
        num_threads=1,
        run_dir=str(folder),
        **options,
    ).fit(work.task(), train=work.dataset())


def _fit_lightning(work: Workload, steps: int, folder: Path, **options: Any) -> None:
    from lightning.pytorch import LightningModule
    from lightning.pytorch import Trainer as LightningTrainer

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.task = work.task()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.task.loss(self.task(batch), batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return _optimizer(self.task)

    world_size = dist.get_world_size() if dist.is_initialized() else 1
    loader = DataLoader(work.dataset(), work.batch_size // world_size, shuffle=True)
    LightningTrainer(
        accelerator="cpu",
        devices=world_size,
        strategy="auto" if world_size == 1 else "ddp",
        max_steps=steps,
        default_root_dir=str(folder),
        **options,
    ).fit(Module(), loader)


def _optimizer(task: TaskModule) -> torch.optim.Optimizer:
    optimizer = task.configure_optimizers()
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def workloads(scale: float) -> list[Workload]:
    """Return what is measured; ``scale`` stretches the runs."""
    tiny = (round(200 * scale), round(1700 * scale))
    conv = (round(5 * scale), round(45 * scale))
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(32 * (tiny[1] + 1), 32, generator=generator)
    labels = torch.randint(10, (len(inputs),), generator=generator)
    digits = MnistData().train
    return [
        Workload("tiny MLP, batch 32", TinyTask, (inputs, labels), 32, tiny),
        Workload("MNIST net, batch 128", ConvTask, (digits.images, digits.labels), 128, conv),
    ]


def measure(work: Workload, names: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Return the seconds per step of each contestant in each round."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):
        for name in names:
            seconds = _seconds_per_step(ONE_PROCESS[name][1], work)
            if number >= 0:  # the first round warms up
                found[name].append(seconds)
    return found


def _seconds_per_step(contestant: Contestant, work: Workload) -> float:
    short, long = work.steps
    return (_seconds(contestant, work, long) - _seconds(contestant, work, short)) / (long - short)


def _seconds(contestant: Contestant, work: Workload, steps: int) -> float:
    with scratch() as folder, _shown_to_nobody():
        gc.collect()
        if dist.is_initialized():
            dist.barrier()
        start = time.process_time()
        contestant(work, steps, folder)
        return time.process_time() - start


class _Terminal(io.StringIO):
    """Makes progress bars draw."""

    def isatty(self) -> bool:
        return True


@contextmanager
def _shown_to_nobody() -> Iterator[None]:
    with redirect_stdout(_Terminal()), redirect_stderr(_Terminal()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def report(work: Workload, found: dict[str, list[float]], markdown: bool) -> str:
    """Return the table of one workload."""
    reference = found[REFERENCE]
    rows = []
    for name, seconds in found.items():
        ratios = [a / b for a, b in zip(seconds, reference, strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append([name, f"{median(seconds) * 1e6:,.0f}", f"{median(ratios):.2f}", spread])
    return table([work.name, "µs per step", "ratio", "over the rounds"], rows, markdown)


def installed(names: Sequence[str]) -> list[str]:
    """Return the contestants whose package can be imported."""
    return [n for n in names if not (p := ONE_PROCESS[n][0]) or importlib.util.find_spec(p)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one more")
    parser.add_argument("--scale", type=float, default=1.0, help="stretches the runs")
    parser.add_argument("--only", help="a part of the names of the contestants to compare")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    names = [n for n in installed(list(ONE_PROCESS)) if not given.only or given.only in n or n == REFERENCE]
    for work in workloads(given.scale):
        print(report(work, measure(work, names, given.rounds), given.markdown), "\n", flush=True)


if __name__ == "__main__":
    main()
