"""What ``compile=true`` gains and costs, and whether communication still hides behind backward.

    python -m benchmarks.compiled recipes    # step time, and time until the first step
    python -m benchmarks.compiled overlap    # two hosts with a limited network (Linux, root)

A contestant is a fit. All take turns in the same ranks, in every round, and what is told is the
median over the rounds of the median step, a ratio the median of the ratios within a round. The code
that inductor makes is kept for the length of the benchmark only: the first compiled fit makes it.

In ``overlap`` the net takes the time of a computation but leaves the processor alone, so that hosts
which share one do not slow each other down. ``uncut`` compiles without the cuts that let gradients
leave early.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.utils.data import TensorDataset

from benchmarks.common import above_zero, at_least, environment, scratch, table
from benchmarks.nets import ConvTask, TextTask
from benchmarks.networking.hosts import Network, Unavailable
from benchmarks.resting import Chain
from recipes.language_model import PythonTopics
from recipes.mnist import MnistData
from trainer import TaskModule, Trainer, compiling, distributed
from trainer.config import TrainerConfig
from trainer.launching.launcher import launch

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
WARM_UP = 5
EAGER, COMPILED, UNCUT = "eager", "compiled", "uncut"
LAYERS, WIDTH, BUCKET_MB = 40, 512, 4.0  # 40 MiB of gradients


class Found(NamedTuple):
    """What one fit took, on rank 0.

    Attributes:
        first_s: Seconds until the first step was done, by the clock on the wall.
        step_ms: The median step.
        comm_ms: Communication in a step.
        hidden_ms: The part of it in which backward still computed.
    """

    first_s: float
    step_ms: float
    comm_ms: float
    hidden_ms: float


class Timed(TaskModule):
    """Notes when a step is done."""

    clock: Callable[[], float] = time.perf_counter

    def on_fit_start(self) -> None:
        """Start the clock."""
        self.done: list[float] = []
        self.first = 0.0

    def after_optimizer_step(self) -> None:
        """Note the time."""
        self.done.append(type(self).clock())
        self.first = self.first or time.perf_counter()


class Conv(Timed, ConvTask):
    """The net of the MNIST recipe."""


class Text(Timed, TextTask):
    """The net of the language model recipe."""


class Resting(Timed, Chain):
    """The net of ``overlap``."""


@contextmanager
def _uncut() -> Iterator[None]:
    cutting = compiling._cutting
    compiling._cutting = lambda backend, config: backend
    try:
        yield
    finally:
        compiling._cutting = cutting


def fit(task: Timed, data: Mapping[str, Any], steps: int, **options: Any) -> Found:
    """Train for a few steps that do not count, and ``steps`` that do."""
    begun = time.perf_counter()
    with scratch() as folder:
        result = Trainer(
            accelerator="cpu",
            max_steps=WARM_UP + steps,
            log_every_n_steps=WARM_UP + steps,
            validate_every_n_epochs=None,
            drop_last=True,
            callbacks=False,
            logger=False,
            start_timeout_s=3600,
            run_dir=distributed.broadcast_object(str(folder)),
            **options,
        ).fit(task, **data)
    done = torch.tensor(task.done, dtype=torch.float64)
    metrics = {} if result is None else result.metrics  # under a launcher rank 0 has them
    perf = [metrics.get(f"perf/{name}_ms", 0.0) for name in ("comm", "comm_hidden")]
    step_ms = float(done.diff()[-steps:].median()) * 1000
    return Found(task.first - begun, step_ms, *perf)


def take_turns(
    make: Callable[[], Timed],
    data: Mapping[str, Any],
    names: Sequence[str],
    rounds: int,
    steps: int,
    **options: Any,
) -> dict[str, list[Found]]:
    """Let every contestant train once a round, on the ranks that are there."""
    found: dict[str, list[Found]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            if name == UNCUT:
                with _uncut():
                    found[name].append(fit(make(), data, steps, compile=True, **options))
            else:
                compiles = name == COMPILED
                found[name].append(fit(make(), data, steps, compile=compiles, **options))
    return found


def _ratio(found: Mapping[str, Sequence[Found]], name: str) -> str:
    pairs = zip(found[name], found[EAGER], strict=True)
    return f"{median(one.step_ms / other.step_ms for one, other in pairs):.3f}"


def recipes(given: argparse.Namespace) -> list[list[str]]:
    """Return a row for each recipe and number of ranks."""
    Timed.clock = CLOCKS[given.clock]
    kinds: dict[str, tuple[Callable[[], Timed], Any, int]] = {
        "MNIST net": (Conv, MnistData(), 128),
        "language model": (Text, PythonTopics(), 16),
    }
    rows = []
    for ranks in given.ranks:
        for name, (make, data, size) in kinds.items():
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(given.folder / f"{size}-{ranks}")
            # What is compiled once for a machine, whatever the task is.
            config = TrainerConfig(devices=ranks, accelerator="cpu", num_threads=1, compile=True)
            compiling.prepare_to_compile(config)
            found = launch(
                lambda make=make, data=data, size=size: take_turns(
                    make,
                    {"data": data},
                    (EAGER, COMPILED),
                    given.rounds,
                    given.steps,
                    global_batch_size=size,
                    num_threads=1,
                ),
                config=config,
            )
            cold, *warm = (one.first_s for one in found[COMPILED])
            times = [median(one.step_ms for one in found[kind]) for kind in (EAGER, COMPILED)]
            first = [median(one.first_s for one in found[EAGER]), cold, median(warm)]
            row = [name, str(ranks), *(f"{ms:.2f}" for ms in times), _ratio(found, COMPILED)]
            rows.append([*row, *(f"{seconds:.1f}" for seconds in first)])
    return rows


def overlap(given: argparse.Namespace) -> list[list[str]]:
    """Return a row for each contestant and limit of the network."""
    rows = []
    with Network(2) as network:
        for mbit in given.mbit:
            network.limit(mbit)
            command = [sys.executable, "-m", __spec__.name, "rank"]
            command += [f"--rounds={given.rounds}", f"--steps={given.steps}"]
            outputs = network.run(
                [*command, f"--compute-ms={given.compute_ms}"],
                timeout_s=3600,
                env={"TORCHINDUCTOR_CACHE_DIR": str(given.folder)},
            )
            values = json.loads(outputs[0].splitlines()[-1])
            found = {name: [Found(*one) for one in fits] for name, fits in values.items()}
            for name, fits in found.items():
                cells = [median(column) for column in zip(*fits, strict=True)][1:]
                share = median(one.hidden_ms / one.comm_ms for one in fits)
                numbers = [*(f"{ms:.0f}" for ms in cells), f"{100 * share:.0f} %"]
                rows.append([f"{mbit:g}", name, *numbers, _ratio(found, name)])
    return rows


def rank(given: argparse.Namespace) -> None:
    """Be a rank of ``overlap``."""
    size = 2 * 8 * (WARM_UP + given.steps)
    samples = TensorDataset(torch.randn(size, 32), torch.randint(10, (size,)))

    def job() -> dict[str, list[Found]]:
        make = lambda: Resting(LAYERS, WIDTH, given.compute_ms)  # noqa: E731
        names, options = (EAGER, COMPILED, UNCUT), {"global_batch_size": 16}
        return take_turns(
            make,
            {"train": samples},
            names,
            given.rounds,
            given.steps,
            bucket_cap_mb=BUCKET_MB,
            **options,
        )

    with redirect_stdout(sys.stderr):
        found = launch(job, config=TrainerConfig(accelerator="cpu", compile=True))
    if found is not None:
        print(json.dumps(found))


MODES: dict[str, tuple[Callable[[argparse.Namespace], list[list[str]]], Sequence[str]]] = {
    "recipes": (
        recipes,
        [
            *("recipe", "ranks", "eager, ms", "compiled, ms", "ratio"),
            *("first step: eager, s", "compiled, s", "compiled before, s"),
        ],
    ),
    "overlap": (
        overlap,
        ["Mbit/s", "forward", "step, ms", "communication, ms", "hidden, ms", "hidden", "ratio"],
    ),
}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=[*MODES, "rank"])
    parser.add_argument(
        "--rounds", type=at_least(1), default=5, help="in which everyone trains once"
    )
    parser.add_argument("--steps", type=at_least(1), default=40, help="that count, in each round")
    parser.add_argument("--ranks", type=at_least(1), nargs="+", default=[1, 2], help="for recipes")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="of a step, for recipes")
    parser.add_argument("--mbit", type=above_zero, nargs="+", default=[1000.0], help="for overlap")
    parser.add_argument(
        "--compute-ms", type=above_zero, default=900.0, help="of a step, for overlap"
    )
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    given = parser.parse_args()
    if given.mode == "rank":
        rank(given)
        return
    if given.mode == "recipes" and given.rounds < 2:
        parser.error("--rounds must be 2 or more: in the first, code is compiled for the others")
    measure, header = MODES[given.mode]
    try:
        with scratch() as given.folder, redirect_stdout(sys.stderr):
            rows = measure(given)
    except Unavailable as error:
        raise SystemExit(str(error)) from None
    print(f"{environment()}\n")
    print(table(header, rows, given.markdown))


if __name__ == "__main__":
    main()
