"""Is the world size an execution detail? The recipes on 1 process and on several, compared.

    python -m benchmarks.world_size               # ten minutes; exit code 1 if a bound is broken
    python -m benchmarks.world_size --markdown    # the table of docs/exactness.md

Both recipes train at full size, dropout included, with a fixed ``micro_batch_size``, in the default
mode and with ``reproducible=true``. The losses of every step, which go to ``metrics.jsonl`` and are
the means over the global batches, are compared with those of one process, and so are the weights at
the end. Half of the curves lie below the median, one at the worst.

The MNIST net also trains in float64, which has the bound: its ReLU and max-pooling make a jump of a
last bit now and then (a unit whose input is 0 but for rounding), in float32 a visible one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import at_least, scratch, table
from recipes.language_model import ByteTransformer, PythonTopics
from recipes.mnist import PIXEL_MEAN, PIXEL_STD, Batch, MnistData, MnistTask
from trainer import DataModule, TaskModule, Trainer
from trainer.loggers import JsonlLogger


@dataclass(frozen=True)
class Recipe:
    """What is trained."""

    name: str
    task: Callable[[], TaskModule]
    data: DataModule
    options: dict[str, Any]
    bound: float | None = None  # of the relative difference of a loss, in the default mode


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


@dataclass(frozen=True)
class Line:
    """A recipe in one mode on so many ranks, against one process, over several seeds."""

    recipe: Recipe
    reproducible: bool
    ranks: int
    differences: list[tuple[float, float, float, bool]]

    @property
    def holds(self) -> bool:
        """Whether bits or the bound are kept."""
        if self.reproducible:
            return all(bits for *_, bits in self.differences)
        bound = self.recipe.bound
        return bound is None or all(whole <= bound for _, whole, _, _ in self.differences)

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        first, whole, weights, bits = zip(*self.differences, strict=True)
        numbers = [median(first), max(first), median(whole), max(whole), max(weights)]
        return [
            self.recipe.name,
            "reproducible" if self.reproducible else "default",
            str(self.ranks),
            *(f"{number:.0e}" if number else "0" for number in numbers),
            "yes" if all(bits) else "no",
        ]


def compare(recipe: Recipe, steps: int, seeds: int, reproducible: bool) -> list[Line]:
    """Return a line for every world size."""
    alone = [train(recipe, 1, seed, steps, reproducible) for seed in range(seeds)]
    return [
        Line(
            recipe,
            reproducible,
            ranks,
            [
                difference(one, train(recipe, ranks, seed, steps, reproducible))
                for seed, one in enumerate(alone)
            ],
        )
        for ranks in ((2, 4, 8) if reproducible else (2, 3, 4))
    ]


class MnistInDouble(MnistTask):
    """The net of the recipe, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.net((batch[0].unsqueeze(1).double() - PIXEL_MEAN) / PIXEL_STD)
        return logits


def recipes() -> list[Recipe]:
    """Return what is compared."""
    digits = MnistData()
    mnist = {"global_batch_size": 128, "micro_batch_size": 16}
    text = {"global_batch_size": 16, "micro_batch_size": 2, "gradient_clip_norm": 1.0}
    return [
        Recipe("MNIST net", MnistTask, digits, mnist),
        Recipe("MNIST net, float64", MnistInDouble, digits, mnist, bound=1e-12),
        Recipe("language model", ByteTransformer, PythonTopics(), text, bound=1e-4),
    ]


def report(lines: Sequence[Line], steps: int, markdown: bool) -> str:
    """Return the table."""
    header = ["recipe", "mode", "ranks", "loss, steps 1-10: median", "worst"]
    header += [f"steps 1-{steps}: median", "worst", "weight, worst", "equal bits"]
    return table(header, [line.cells() for line in lines], markdown)


def main() -> int:
    """Compare, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--steps", type=at_least(1), default=50)
    parser.add_argument("--seeds", type=at_least(1), default=5)
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
    return 0 if all(line.holds for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
