"""What it costs that ranks can stop together at any moment.

    python -m benchmarks.soaking.agreement --markdown

Ranks agree on signals and requests by one small all-reduce about once a second. Each fit here does
nothing else that is not training; what is measured is the time in that agreement, the wait for a
slower rank included, as a share of the fit's time; and the time of one agreement of ranks that are
there at the same moment, which is all that it adds, for ranks wait for each other anyway.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.common import at_least, scratch, table
from benchmarks.soaking.program import Spec, train
from trainer import distributed, stopping
from trainer.config import TrainerConfig
from trainer.launching.launcher import launch


class Timed(stopping.Agreement):
    """An agreement that notes how long each takes."""

    seconds: list[float] = []  # noqa: RUF012 - of the process

    def reach(self, step: int, stop: bool, save: bool) -> stopping.Decision:
        """Agree."""
        start = time.perf_counter()
        decision = super().reach(step, stop, save)
        self.seconds.append(time.perf_counter() - start)
        return decision


def measure(folder: str, steps: int) -> tuple[list[float], float, float]:
    """Train on the ranks that are there.

    Returns:
        The seconds of each agreement of the slowest rank, those of the fit, and those that the same
        all-reduce takes by itself.
    """
    Timed.seconds.clear()
    stopping.Agreement = Timed  # type: ignore[misc]
    options: dict[str, Any] = {
        "devices": distributed.world_size(),
        "max_epochs": None,
        "max_steps": steps,
        "log_every_n_steps": 10 * steps,
        "validate_every_n_steps": None,
        "validate_every_n_epochs": None,
        "checkpoint": {"every_n_epochs": None},
        "logger": False,
        "callbacks": False,
    }
    start = time.perf_counter()
    train(Spec(folder, options))
    fit_s = time.perf_counter() - start
    alone = []
    agreement = stopping.Agreement(0)
    for step in range(200):
        distributed.barrier()
        start = time.perf_counter()
        agreement.reach(step, stop=False, save=False)
        alone.append(time.perf_counter() - start)
    everywhere: list[list[float]] = distributed.all_gather_object(Timed.seconds[: -len(alone)])
    return max(everywhere, key=sum), fit_s, median(alone)


def lines(ranks: Sequence[int], steps: int) -> list[list[str]]:
    """Return a line of the table for each number of ranks."""
    found = []
    for count in ranks:
        with scratch() as folder:
            config = TrainerConfig(devices=count, accelerator="cpu", num_threads=1)
            outcome = launch(measure, str(folder), steps, config=config)
        assert outcome is not None
        seconds, fit_s, alone_s = outcome
        found.append(
            [
                str(count),
                f"{fit_s / steps * 1e3:.1f}",
                f"{len(seconds) / fit_s:.1f}",
                f"{alone_s * 1e3:.2f}",
                f"{len(seconds) * alone_s / fit_s * 100:.3f} %",
                f"{sum(seconds) / fit_s * 100:.2f} %",
            ]
        )
    return found


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=at_least(1), nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=at_least(1), default=600)
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    header = ["ranks", "ms per step", "agreements per s", "ms for one", "share", "with the wait"]
    print(table(header, lines(args.ranks, args.steps), args.markdown))


if __name__ == "__main__":
    main()
