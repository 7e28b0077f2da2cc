"""What a checkpoint costs the training, and what it survives.

    python -m benchmarks.checkpoint                  # everything; some minutes
    python -m benchmarks.checkpoint --only faults    # without the times
    python -m benchmarks.checkpoint --markdown

Times are ratios of what was measured in turns, each the median over the rounds. How long the loop
stands still for a save is the processor time of its thread; it stands beside a plain copy of the
same tensors, to memory that is new, which the system has to clear, and to memory that was used.
What a write costs the steps beside it is a time on the wall: use a quiet machine.

Faults are tried one by one. What is asked for is that afterwards the checkpoint before is there, or
the new one, whole; that the next start cleans up; and that the next save works. The program ends
with 1 if that was ever not so.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from contextlib import redirect_stdout
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

from benchmarks.common import at_least, scratch, table
from benchmarks.nets import TwoLayers
from benchmarks.survival import FAULTS
from trainer import Trainer
from trainer.checkpoint.manifest import FOLDER
from trainer.checkpoint.saving import Saver
from trainer.checkpoint.snapshot import Snapshot
from trainer.checkpoint.store import LocalStore
from trainer.checkpoint.writer import CheckpointWriter
from trainer.config import CheckpointConfig

MEBI = 1 << 20


class Wide(TwoLayers):
    """Two wide layers and AdamW: the state of a step is three times the weights."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), fused=True)


def stalls(mebibytes: int, rounds: int) -> dict[str, list[float]]:
    """Return how long the loop stands still for a save, as ratios to plain copies of its bytes."""
    ratios: dict[str, list[float]] = {}
    save = Saver.save
    number = 0

    def measured(saver: Saver, shared: Any) -> None:
        nonlocal number
        writer = saver._writer
        assert writer is not None
        writer._collect(wait=True)
        task, optimizer = saver._session.task, saver._turns[0].optimizer
        state = tree_leaves([task.state_dict(), optimizer.state_dict()])
        tensors = [value for value in state if isinstance(value, Tensor)]
        start = time.thread_time()
        copies = [tensor.detach().clone() for tensor in tensors]
        to_new = time.thread_time() - start
        start = time.thread_time()
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor.detach())
        to_old = time.thread_time() - start
        del copies
        start = time.thread_time()
        save(saver, shared)
        seconds = time.thread_time() - start
        which = "first save" if number == 0 else "save"
        ratios.setdefault(f"{which} : copy to new memory", []).append(seconds / to_new)
        ratios.setdefault(f"{which} : copy to used memory", []).append(seconds / to_old)
        number += 1

    width = int((mebibytes * MEBI / 3 / 4 / 2) ** 0.5)  # two square layers, AdamW
    data = TensorDataset(torch.randn(64, width), torch.randint(width, (64,)))
    for _ in range(2):
        number = 0
        with (
            scratch() as folder,
            patch.object(Saver, "save", measured),
            redirect_stdout(io.StringIO()),
        ):
            Trainer(
                accelerator="cpu",
                global_batch_size=1,
                max_steps=rounds // 2 + 1,
                num_threads=torch.get_num_threads(),
                callbacks=False,
                logger=False,
                checkpoint={"every_n_steps": 1, "keep": 1},
                run_dir=str(folder),
            ).fit(Wide(width, width, width), train=data)
    return ratios


def slowdowns(mebibytes: int, rounds: int) -> dict[str, list[float]]:
    """Return the time of a step while a checkpoint is written, as a ratio to that without."""
    ratios: dict[str, list[float]] = {}
    count = mebibytes * MEBI // 4 // 40
    state = {str(number): torch.randn(count) for number in range(40)}
    for name, (inputs, hidden) in {"tiny steps": (32, 64), "large steps": (512, 1024)}.items():
        task = TwoLayers(inputs, hidden)
        optimizer = task.configure_optimizers()
        batch = (torch.randn(64, inputs), torch.randint(10, (64,)))

        def step(task: TwoLayers = task, optimizer: Any = optimizer, batch: Any = batch) -> None:
            optimizer.zero_grad()
            task.loss(task(batch), batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        with scratch() as folder:
            store = LocalStore(folder / FOLDER)
            writer = CheckpointWriter(store, CheckpointConfig(keep=1))
            for number in range(rounds + 1):
                writer.save(Snapshot(number, state, {}, {}, 1))
                pending = writer._pending
                assert pending is not None
                steps, start = 0, time.perf_counter()
                while not pending.done():
                    step()
                    steps += 1
                beside = (time.perf_counter() - start) / steps
                start = time.perf_counter()
                for _ in range(steps):
                    step()
                alone = (time.perf_counter() - start) / steps
                if number:  # the first one warms up
                    ratios.setdefault(f"{name}, beside a write : alone", []).append(beside / alone)
            writer.close()
    return ratios


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("times", "faults"), help="a part of it")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--rounds", type=at_least(1), default=10)
    parser.add_argument("--mebibytes", type=at_least(1), default=400, help="size of a checkpoint")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    faults = {} if given.only == "times" else FAULTS
    for name, fault in faults.items():  # first, for they fork
        outcomes = list(fault())
        rows.append([name, f"{len(outcomes):,}", f"{sum(outcomes):,}"])
    if rows:
        print(table(["fault", "tried", "held"], rows, given.markdown), end="\n\n", flush=True)
    if given.only in (None, "times"):
        found = stalls(given.mebibytes, given.rounds) | slowdowns(given.mebibytes, given.rounds)
        times = [
            [name, f"{median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]
            for name, ratios in found.items()
        ]
        header = [f"{given.mebibytes} MiB, 1 thread", "ratio", "over the rounds"]
        print(table(header, times, given.markdown))
    if any(tried != held for _, tried, held in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
