"""From the command to the first optimizer step, and from the last one back to the prompt.

    python -m benchmarks.startup                 # 1, 2 and 4 ranks; ten minutes
    python -m benchmarks.startup --ranks 4 --markdown

Everybody trains the net of the MNIST recipe for two steps, by a program of its own
(`benchmarks/starting`), as a user starts it: a hand-written script (under torchrun where there are
several ranks), a script that calls the Trainer, the recipe with its config, and Lightning. The
clock begins when the program is started; a step is done when the slowest rank has done it.
Contestants take turns, figures are medians over the rounds, and a ratio is the median of the ratios
within a round. Programs compile to bytecode once, in the round that warms up, and have one thread.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.common import at_least, scratch, table
from benchmarks.starting.digits import FIRST, LAST, STEPS

LIMIT_S = 120
REFERENCE = "hand-written"
_PACKAGES = {"Lightning": "lightning"}


class Times(NamedTuple):
    """Seconds of one run.

    Attributes:
        first: From the start of the program to its first step.
        end: From its last step to its end.
        cpu: Of all its processes together.
    """

    first: float
    end: float
    cpu: float


def by_hand(ranks: int) -> list[str]:
    """Return the arguments of the hand-written script."""
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    return ["-m", *(torchrun if ranks > 1 else []), "benchmarks.starting.hand_written"]


def by_recipe(ranks: int, *others: str) -> list[str]:
    """Return the arguments of the recipe, without evaluation."""
    options = {
        "task._target_": "benchmarks.starting.recipe.Digits",
        "trainer.devices": ranks,
        "trainer.max_steps": STEPS,
        "trainer.validate_every_n_epochs": "null",
        "trainer.run_dir": f"{os.environ['BENCHMARK_FOLDER']}/run",
        "test": "false",
        "optimized_metric": "null",
    }
    return ["-m", "recipes.mnist", *(f"{name}={value}" for name, value in options.items()), *others]


CONTESTANTS: dict[str, Callable[[int], list[str]]] = {
    REFERENCE: by_hand,
    "Trainer, script": lambda ranks: ["-m", "benchmarks.starting.with_trainer", str(ranks)],
    "Trainer, recipe": by_recipe,
    "Lightning": lambda ranks: ["-m", "benchmarks.starting.with_lightning", str(ranks)],
}


def run(contestant: str, ranks: int) -> Times:
    """Run a program and read its clock.

    Raises:
        RuntimeError: If it failed; with what it printed.
    """
    with scratch() as folder:
        os.environ["BENCHMARK_FOLDER"] = str(folder)
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, *CONTESTANTS[contestant](ranks)]
        cpu, start = _cpu_s(), time.monotonic()
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        end = time.monotonic()
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
        first, last = (_slowest(folder, what, ranks) for what in (FIRST, LAST))
        return Times(first - start, end - last, _cpu_s() - cpu)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _slowest(folder: Path, what: str, ranks: int) -> float:
    times = [float(path.read_text()) for path in folder.glob(f"{what}-*")]
    assert len(times) == ranks, f"{len(times)} of {ranks} ranks did their {what} step"
    return max(times)


def measure(names: Sequence[str], ranks: int, rounds: int) -> dict[str, list[Times]]:
    """Return the times of each contestant in each round."""
    found: dict[str, list[Times]] = {name: [] for name in names}
    for number in range(-1, rounds):
        for name in names:
            times = run(name, ranks)
            if number >= 0:  # the round before the first one warms up
                found[name].append(times)
    return found


def report(found: dict[str, list[Times]], ranks: int, markdown: bool) -> str:
    """Return the table for one number of ranks."""
    rows = []
    for name, runs in found.items():
        row = [name]
        for field in Times._fields:
            if field == "cpu" and name == "Lightning" and ranks > 1:
                row += ["?", "?"]  # it leaves its processes without asking what they used
                continue
            own = [getattr(times, field) for times in runs]
            theirs = [getattr(times, field) for times in found[REFERENCE]]
            ratio = median(a / b for a, b in zip(own, theirs, strict=True))
            row += [f"{median(own):.2f}", f"{ratio:.2f}"]
        rows.append(row)
    processes = "1 process" if ranks == 1 else f"{ranks} ranks"
    header = [processes, "s to step 1", "ratio", "s to the prompt", "ratio", "CPU s", "ratio"]
    return table(header, rows, markdown)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument(
        "--rounds", type=at_least(1), default=5, help="that count, after one to warm up"
    )
    parser.add_argument("--ranks", type=at_least(1), nargs="+", default=[1, 2, 4])
    parser.add_argument("--only", nargs="+", default=list(CONTESTANTS), choices=CONTESTANTS)
    given = parser.parse_args()
    names = [
        name
        for name in CONTESTANTS
        if name in (REFERENCE, *given.only)
        and importlib.util.find_spec(_PACKAGES.get(name, "torch"))
    ]
    for ranks in given.ranks:
        found = measure(names, ranks, given.rounds)
        print(report(found, ranks, given.markdown), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
