"""What ``reproducible=true`` costs, as a ratio to the default mode on the same ranks.

    python -m benchmarks.reproducible               # 1, 2 and 4 ranks
    python -m benchmarks.reproducible --markdown    # the table of docs/exactness.md

Both modes train with the same micro-batches and one thread per rank; a third contestant leaves
``micro_batch_size`` to the default, an even share per rank, and shows what the cut itself costs.
They take turns in the same ranks. A run is a short and a long fit, and their difference gives the
time of a step. A figure is the median over the rounds; a ratio is the median of the ratios within a
round. The time is that on the wall, for communication is what is measured: use a quiet machine.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.utils.data import TensorDataset

from benchmarks.common import scratch, table
from benchmarks.nets import ConvTask, TwoLayers
from recipes.mnist import MnistData
from trainer import TaskModule, Trainer, distributed
from trainer.config import TrainerConfig
from trainer.launcher import launch

GLOBAL_BATCH, MICRO_BATCH = 128, 32
DEFAULT = "default"
CONTESTANTS: dict[str, dict[str, Any]] = {
    DEFAULT: {"micro_batch_size": MICRO_BATCH},
    "reproducible": {"micro_batch_size": MICRO_BATCH, "reproducible": True},
    "default, even share": {},
}


def wide() -> TaskModule:
    """Return a net with 12 MB of gradients for little computing, so that communication shows."""
    return TwoLayers(1000, 1500, 1000)


def measure(
    task: Callable[[], TaskModule], data: Any, steps: tuple[int, int], rounds: int
) -> dict[str, list[float]]:
    """Return the seconds per step of each contestant in each round; called on every rank."""
    found: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for number in range(-1, rounds):
        for name, options in CONTESTANTS.items():
            seconds = [_seconds(task(), data, count, options) for count in steps]
            if number >= 0:  # the round before the first one warms up
                found[name].append((seconds[1] - seconds[0]) / (steps[1] - steps[0]))
    return found


def _seconds(task: TaskModule, data: Any, steps: int, options: dict[str, Any]) -> float:
    with scratch() as folder:
        trainer = Trainer(
            accelerator="cpu",
            devices=distributed.world_size(),
            global_batch_size=GLOBAL_BATCH,
            max_steps=steps,
            num_threads=1,
            callbacks=False,
            logger=False,
            run_dir=distributed.broadcast_object(str(folder)),
            **options,
        )
        gc.collect()
        distributed.barrier()
        start = time.perf_counter()
        trainer.fit(task, train=data)
        distributed.barrier()
        return time.perf_counter() - start


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scale", type=float, default=1, help="stretches the runs")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    samples = TensorDataset(torch.randn(8192, 1000), torch.randint(1000, (8192,)))
    work: dict[str, tuple[Callable[[], TaskModule], Any, tuple[int, int]]] = {
        "MNIST net": (ConvTask, MnistData().train, (4, 40)),
        "wide MLP": (wide, samples, (4, 30)),
    }
    rows = []
    for count in args.ranks:
        for name, (task, data, (short, long)) in work.items():
            config = TrainerConfig(devices=count, accelerator="cpu", num_threads=1)
            steps = (short, short + round((long - short) * args.scale))
            found = launch(measure, task, data, steps, args.rounds, config=config)
            assert found is not None
            ratios = {
                other: [a / b for a, b in zip(found[other], found[DEFAULT], strict=True)]
                for other in CONTESTANTS
            }
            for other, seconds in found.items():
                spread = f"{min(ratios[other]):.2f} to {max(ratios[other]):.2f}"
                figures = [f"{median(seconds) * 1e3:.1f}", f"{median(ratios[other]):.2f}", spread]
                rows.append([name, str(count), other, *figures])
    header = ["net", "ranks", "mode", "ms per step", "ratio to default", "over the rounds"]
    print(table(header, rows, args.markdown))


if __name__ == "__main__":
    main()
