"""Is the world size an execution detail? The recipes on 1 process and on several, compared.

    python -m benchmarks.world_size               # some minutes; exit code 1 if a bound is broken
    python -m benchmarks.world_size --markdown    # the table of docs/exactness.md

Both recipes train at full size, dropout included, with a fixed ``micro_batch_size``, in the default
mode and with ``reproducible=true``. The losses of every step, which go to ``metrics.jsonl`` and are
the means over the global batches, are compared with those of one process, and so are the weights at
the end. Each line is the worst of several seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import scratch, table
from recipes.language_model import ByteTransformer, PythonTopics
from recipes.mnist import MnistData, MnistTask
from trainer import DataModule, TaskModule, Trainer
from trainer.loggers import JsonlLogger

# Of a loss of the first fifty steps: rounding, magnified by training. See docs/exactness.md.
BOUND = 5e-3


@dataclass(frozen=True)
class Recipe:
    """What is trained."""

    name: str
    task: Callable[[], TaskModule]
    data: DataModule
    options: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The loss of every step, and the weights at the end."""

    losses: Tensor
    weights: dict[str, Tensor]


def train(recipe: Recipe, world_size: int, seed: int, steps: int, reproducible: bool) -> Outcome:
    """Train on so many processes."""
    with scratch() as folder:
        trainer = Trainer(
            accelerator="cpu",
            launcher="self",
            devices=world_size,
            num_threads=1,
            max_steps=steps,
            seed=seed,
            reproducible=reproducible,
            log_every_n_steps=1,
            validate_every_n_epochs=None,
            run_dir=str(folder),
            callbacks=False,
            logger={"jsonl": JsonlLogger()},
            **recipe.options,
        )
        task = recipe.task()
        trainer.fit(task, recipe.data)
        events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = torch.tensor([event["train/loss"] for event in events], dtype=torch.float64)
    assert len(losses) == steps
    return Outcome(losses, task.state_dict())


def difference(one: Outcome, other: Outcome) -> tuple[float, float, float, bool]:
    """Return how far two trainings are apart.

    Returns:
        The largest relative difference between the losses of the first ten steps, and of all; the
        largest difference between two weights; and whether everything has the same bits.
    """
    apart = ((other.losses - one.losses) / one.losses).abs()
    weights = [(other.weights[k] - w).abs().max().double() for k, w in one.weights.items()]
    bits = all(torch.equal(other.weights[k], w) for k, w in one.weights.items())
    return (
        float(apart[:10].max()),
        float(apart.max()),
        float(torch.stack(weights).max()),
        bits and torch.equal(one.losses, other.losses),
    )


def compare(recipe: Recipe, steps: int, seeds: int, reproducible: bool) -> list[list[Any]]:
    """Return a line for every world size: the worst of the seeds."""
    world_sizes = (2, 4, 8) if reproducible else (2, 3, 4)
    alone = [train(recipe, 1, seed, steps, reproducible) for seed in range(seeds)]
    lines = []
    for count in world_sizes:
        found = [
            difference(alone[seed], train(recipe, count, seed, steps, reproducible))
            for seed in range(seeds)
        ]
        first, whole, weights = (max(f[i] for f in found) for i in range(3))
        lines.append([first, whole, weights, all(f[3] for f in found)])
    mode = "reproducible" if reproducible else "default"
    return [[recipe.name, mode, n, *line] for n, line in zip(world_sizes, lines, strict=True)]


def recipes() -> list[Recipe]:
    """Return what is compared."""
    mnist = {"global_batch_size": 128, "micro_batch_size": 16}
    text = {"global_batch_size": 16, "micro_batch_size": 2, "gradient_clip_norm": 1.0}
    return [
        Recipe("MNIST net", MnistTask, MnistData(), mnist),
        Recipe("language model", ByteTransformer, PythonTopics(), text),
    ]


def report(lines: Sequence[Sequence[Any]], steps: int, markdown: bool) -> str:
    """Return the table."""
    header = ["recipe", "mode", "ranks", "loss, steps 1-10", f"1-{steps}", "weight", "equal bits"]
    rows = [
        [recipe, mode, str(count), *(f"{n:.1e}" for n in numbers), "yes" if bits else "no"]
        for recipe, mode, count, *numbers, bits in lines
    ]
    return table(header, rows, markdown)


def main() -> int:
    """Compare, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    with redirect_stdout(sys.stderr):  # what the Trainer says is no part of the table
        lines = [
            line
            for recipe in recipes()
            for reproducible in (False, True)
            for line in compare(recipe, given.steps, given.seeds, reproducible)
        ]
    print(f"Against one process, over {given.steps} steps and {given.seeds} seeds:\n")
    print(report(lines, given.steps, given.markdown))
    holds = [
        bits or (mode == "default" and whole <= BOUND) for _, mode, _, _, whole, _, bits in lines
    ]
    return 0 if all(holds) else 1


if __name__ == "__main__":
    sys.exit(main())
