"""What a step costs beside a hand-written loop: with the Trainer, and with other trainers.

    python -m benchmarks.overhead                  # whatever is installed; a few minutes
    python -m benchmarks.overhead --markdown       # the tables of docs/performance.md
    python -m benchmarks.overhead --clock wall     # on a machine that does nothing else

A contestant trains for a short and for a long run, and the difference gives the time of a step:
set-up, the last checkpoint and the like cancel, and nothing is hooked into anybody's loop.
Contestants take turns, so that a change in the machine's load meets all of them. A figure is the
median over the rounds; a ratio is the median of the ratios within a round. The clock counts the
processor time of all threads, which other programs on the machine disturb less than the time on
the wall. Two ranks are started once, by torchrun, and every contestant trains in the same two.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import io
import itertools
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
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.common import scratch, table
from recipes.mnist import Batch, Digits, MnistData, MnistTask
from trainer import TaskModule, Trainer

CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}


class TwoLayers(TaskModule):
    """Two linear layers; by default so small that a step is mostly overhead."""

    def __init__(self, inputs: int = 32, hidden: int = 64, outputs: int = 10) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.net(batch[0])
        return logits

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the mean cross-entropy."""
        return F.cross_entropy(outputs, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD, the cheapest there is."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class ConvTask(MnistTask):
    """The net of the MNIST recipe, with its optimizer and without its schedule."""

    def configure_optimizers(self) -> torch.optim.Optimizer:  # type: ignore[override]
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), self.learning_rate, fused=True)


@dataclass(frozen=True)
class Workload:
    """What is trained, how long, and by whom.

    Attributes:
        name: For the table.
        task: Builds the net with its loss and optimizer.
        data: The samples; the long run is a part of one epoch.
        batch_size: The global batch.
        steps: Of the short and of the long run.
        contestants: Who trains.
    """

    name: str
    task: Callable[[], TaskModule]
    data: TensorDataset | Digits
    batch_size: int
    steps: tuple[int, int]
    contestants: Sequence[str]

    @property
    def samples(self) -> Sequence[Tensor]:
        """The inputs and the labels, whole."""
        if isinstance(self.data, Digits):
            return self.data.images, self.data.labels
        return self.data.tensors

    def loader(self) -> DataLoader[Any]:
        """Return the loader of a hand-written loop, for this rank's share of each batch."""
        sampler: DistributedSampler[Any] | None = None
        if dist.is_initialized():
            sampler = DistributedSampler(self.data)
        return DataLoader(
            self.data,
            self.batch_size // _world_size(),
            shuffle=sampler is None,
            sampler=sampler,
            collate_fn=_as_it_is if isinstance(self.data, Digits) else None,
        )

    def start(self) -> tuple[TaskModule, torch.optim.Optimizer]:
        """Return a fresh net and its optimizer."""
        task = self.task()
        optimizer = task.configure_optimizers()
        assert isinstance(optimizer, torch.optim.Optimizer)
        return task, optimizer


def compute_alone(work: Workload, steps: int, folder: Path) -> None:
    """Repeat forward, backward and update with one batch."""
    task, optimizer = work.start()
    inputs, labels = (part[: work.batch_size] for part in work.samples)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(task((inputs, labels)), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def loop_over_tensors(work: Workload, steps: int, folder: Path) -> None:
    """Take each batch out of the tensors by one index operation."""
    task, optimizer = work.start()
    order = torch.randperm(len(work.data))[: steps * work.batch_size]
    for indices in order.view(steps, work.batch_size):
        inputs, labels = (part[indices] for part in work.samples)
        optimizer.zero_grad()
        F.cross_entropy(task((inputs, labels)), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def hand_written(work: Workload, steps: int, folder: Path) -> None:
    """Loop over a DataLoader; with several ranks, over a DistributedSampler's, with DDP."""
    task, optimizer = work.start()
    net: nn.Module = nn.parallel.DistributedDataParallel(task) if dist.is_initialized() else task
    for batch in itertools.islice(work.loader(), steps):
        optimizer.zero_grad()
        F.cross_entropy(net(batch), batch[1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def trainer(work: Workload, steps: int, folder: Path, **options: Any) -> None:
    """Our Trainer as it comes: progress bar, metrics.jsonl, TensorBoard, checkpoints."""
    ours = Trainer(
        accelerator="cpu",
        global_batch_size=work.batch_size,
        max_steps=steps,
        num_threads=1,
        run_dir=str(folder),
        **options,
    )
    ours.fit(work.task(), train=work.data)


def trainer_bare(work: Workload, steps: int, folder: Path) -> None:
    """Our Trainer without callbacks and loggers."""
    trainer(work, steps, folder, callbacks=False, logger=False)


def lightning(work: Workload, steps: int, folder: Path, **options: Any) -> None:
    """Lightning as it comes: progress bar, logger, checkpoints."""
    from lightning.pytorch import LightningModule
    from lightning.pytorch import Trainer as LightningTrainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.task, self.optimizer = work.start()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return F.cross_entropy(self.task(batch), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.optimizer

    theirs = LightningTrainer(
        accelerator="cpu",
        devices=_world_size(),
        strategy="ddp" if dist.is_initialized() else "auto",
        max_steps=steps,
        default_root_dir=folder,
        **options,
    )
    theirs.fit(Module(), work.loader())


def lightning_bare(work: Workload, steps: int, folder: Path) -> None:
    """Lightning without progress bar, logger and checkpoints."""
    names = ("enable_progress_bar", "logger", "enable_checkpointing", "enable_model_summary")
    lightning(work, steps, folder, **dict.fromkeys(names, False))


def fabric(work: Workload, steps: int, folder: Path) -> None:
    """Lightning Fabric in a hand-written loop."""
    from lightning.fabric import Fabric

    tool = Fabric(accelerator="cpu", devices=1)
    net, optimizer = tool.setup(*work.start())
    for batch in itertools.islice(tool.setup_dataloaders(work.loader()), steps):
        optimizer.zero_grad()
        tool.backward(F.cross_entropy(net(batch), batch[1]))
        optimizer.step()


def accelerate(work: Workload, steps: int, folder: Path) -> None:
    """Accelerate in a hand-written loop."""
    from accelerate import Accelerator  # type: ignore[import-not-found]

    tool = Accelerator(cpu=True)
    net, optimizer, loader = tool.prepare(*work.start(), work.loader())
    for batch in itertools.islice(loader, steps):
        optimizer.zero_grad()
        tool.backward(F.cross_entropy(net(batch), batch[1]))
        optimizer.step()


def ignite(work: Workload, steps: int, folder: Path) -> None:
    """Ignite's Engine around a hand-written step."""
    from ignite.engine import Engine  # type: ignore[import-not-found]

    task, optimizer = work.start()

    def step(engine: Any, batch: Any) -> None:
        optimizer.zero_grad()
        F.cross_entropy(task(batch), batch[1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    Engine(step).run(work.loader(), max_epochs=1, epoch_length=steps)


REFERENCE = "hand-written loop"
CONTESTANTS: dict[str, Callable[[Workload, int, Path], None]] = {
    "compute alone": compute_alone,
    "loop over tensors": loop_over_tensors,
    REFERENCE: hand_written,
    "Trainer, everything on": trainer,
    "Trainer, no callbacks or loggers": trainer_bare,
    "Fabric": fabric,
    "Ignite": ignite,
    "Accelerate": accelerate,
    "Lightning, no extras": lightning_bare,
    "Lightning, defaults": lightning,
}
PACKAGES = {"Ignite": "ignite", "Accelerate": "accelerate"}  # the others come with the project
FEW = [REFERENCE, "Trainer, everything on", "Lightning, no extras", "Lightning, defaults"]


def workloads(scale: float, ranks: int) -> list[Workload]:
    """Return what is measured.

    Args:
        scale: Stretches the runs.
        ranks: On how many.
    """
    installed = [n for n in CONTESTANTS if importlib.util.find_spec(PACKAGES.get(n, "torch"))]
    tiny_steps = (round(100 * scale), round(600 * scale))
    conv_steps = (round(4 * scale), round(24 * scale))
    inputs = torch.randn(32 * (tiny_steps[1] + 1), 32)
    labels = torch.randint(10, (len(inputs),))
    samples, batches = TensorDataset(inputs, labels), Digits(inputs, labels)
    conv = Workload("MNIST net, batch 128", ConvTask, MnistData().train, 128, conv_steps, FEW)
    if ranks > 1:
        tiny = Workload("tiny MLP, batch 32", TwoLayers, samples, 32, tiny_steps, FEW)
        return [tiny, conv]
    name = "tiny MLP, batch 32, TensorDataset"
    tiny = Workload(name, TwoLayers, samples, 32, tiny_steps, installed)
    name = "tiny MLP, batch 32, ready batches"
    light = [n for n in installed if not n.startswith("Lightning")]
    ready = Workload(name, TwoLayers, batches, 32, tiny_steps, light)
    return [tiny, ready, conv]


def measure(work: Workload, rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Return the seconds per step of each contestant in each round."""
    found: dict[str, list[float]] = {name: [] for name in work.contestants}
    short, long = work.steps
    for number in range(-1, rounds):
        for name in work.contestants:
            seconds = [_seconds(CONTESTANTS[name], work, steps, clock) for steps in (short, long)]
            if number >= 0:  # the round before the first one warms up
                found[name].append((seconds[1] - seconds[0]) / (long - short))
    return found


def _seconds(
    contestant: Callable[[Workload, int, Path], None],
    work: Workload,
    steps: int,
    clock: Callable[[], float],
) -> float:
    with scratch() as own, _shown_to_nobody():
        box = [own]
        gc.collect()
        if dist.is_initialized():
            dist.broadcast_object_list(
                box
            )  # all ranks write to rank 0's folder, and start together
        start = clock()
        contestant(work, steps, box[0])
        seconds = clock() - start
        if dist.is_initialized():
            dist.barrier()
        return seconds


class _Terminal(io.StringIO):
    """Lets progress bars draw."""

    def isatty(self) -> bool:
        return True


@contextmanager
def _shown_to_nobody() -> Iterator[None]:
    with redirect_stdout(_Terminal()), redirect_stderr(_Terminal()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def report(work: Workload, found: dict[str, list[float]], ranks: int, markdown: bool) -> str:
    """Return the table of one workload."""
    rows = []
    for name, seconds in found.items():
        ratios = [a / b for a, b in zip(seconds, found[REFERENCE], strict=True)]
        low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        spread = f"{low:.2f} to {high:.2f}"
        rows.append([name, f"{median(seconds) * 1e6:,.0f}", f"{median(ratios):.2f}", spread])
    processes = "one process" if ranks == 1 else f"{ranks} ranks"
    header = [f"{work.name}, {processes}", "µs per step", "ratio", "half of the rounds"]
    return table(header, rows, markdown)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _as_it_is(batch: Any) -> Any:
    return batch


def main() -> None:
    """Measure and print: here, then again under torchrun."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--rounds", type=int, default=5, help="that count, after one to warm up")
    parser.add_argument("--scale", type=float, default=1.0, help="makes the runs longer")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="what is counted")
    given = parser.parse_args()
    is_rank = "TORCHELASTIC_RUN_ID" in os.environ
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    if is_rank:
        dist.init_process_group("gloo")
    ranks = _world_size()
    for work in workloads(given.scale, ranks):
        found = measure(work, given.rounds, CLOCKS[given.clock])
        if not is_rank or dist.get_rank() == 0:
            print(report(work, found, ranks, given.markdown), end="\n\n", flush=True)
    if is_rank:
        dist.destroy_process_group()
        return
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, "-m", "benchmarks.overhead", *sys.argv[1:]]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
