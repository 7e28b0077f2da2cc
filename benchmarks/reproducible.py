"""What ``reproducible=true`` costs, as a ratio to the default mode on the same ranks.

    python -m benchmarks.reproducible               # 1, 2 and 4 ranks
    python -m benchmarks.reproducible --markdown    # the table of docs/exactness.md

Both modes train with the same micro-batches and one thread per rank; a third contestant leaves
``micro_batch_size`` to the default, an even share per rank, and shows what the cut itself costs.
They take turns in the same ranks. The clock is read when the net's ``forward`` is called in the
first and after the last step that count, within one fit: so its start, its first log event and its
last checkpoint do not count. A figure is the median over the rounds; a ratio is the median of the
ratios within a round. The time is that on the wall, for communication is what is measured: use a
quiet machine.
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

from benchmarks.common import at_least, scratch, table
from benchmarks.nets import ConvTask, TwoLayers
from recipes.mnist import MnistData
from trainer import TaskModule, Trainer, distributed
from trainer.config import TrainerConfig
from trainer.launching.launcher import launch

GLOBAL_BATCH, MICRO_BATCH = 128, 32
WARM_UP, LOG_EVERY = 30, 20  # steps
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
    task: Callable[[], TaskModule], data: Any, steps: int, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds per step of each contestant in each round; called on every rank.

    Args:
        task: Makes the net.
        data: The samples.
        steps: That count, of each fit.
        rounds: In which each contestant trains once.
    """
    found: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for number in range(-1, rounds):
        for name, options in CONTESTANTS.items():
            seconds = _seconds(task(), data, steps, options)
            if number >= 0:  # the round before the first one warms up
                found[name].append(seconds / steps)
    return found


def _seconds(task: TaskModule, data: Any, steps: int, options: dict[str, Any]) -> float:
    """Return the seconds that so many steps take after those that warm up."""
    begun: dict[int, float] = {}  # when the first forward after so many steps began

    def note(*_: Any) -> None:
        begun.setdefault(task.run.step, time.perf_counter())

    task.register_forward_pre_hook(note)
    gc.collect()
    with scratch() as folder:
        Trainer(
            accelerator="cpu",
            devices=distributed.world_size(),
            global_batch_size=GLOBAL_BATCH,
            max_steps=WARM_UP + steps + 1,
            log_every_n_steps=LOG_EVERY,
            num_threads=1,
            callbacks=False,
            logger=False,
            run_dir=distributed.broadcast_object(str(folder)),
            **options,
        ).fit(task, train=data)
        distributed.barrier()
    return begun[WARM_UP + steps] - begun[WARM_UP]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=at_least(1), nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=at_least(1), default=7)
    parser.add_argument(
        "--steps", type=at_least(1), default=2 * LOG_EVERY, help="that count, in each"
    )
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    size = GLOBAL_BATCH * (WARM_UP + args.steps + 1)
    samples = TensorDataset(torch.randn(size, 1000), torch.randint(1000, (size,)))
    work: dict[str, tuple[Callable[[], TaskModule], Any]] = {
        "MNIST net": (ConvTask, MnistData().train),
        "wide MLP": (wide, samples),
    }
    rows = []
    for count in args.ranks:
        for name, (task, data) in work.items():
            config = TrainerConfig(devices=count, accelerator="cpu", num_threads=1)
            found = launch(measure, task, data, args.steps, args.rounds, config=config)
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
