"""Experiments on 1, 2, 3 and 4 real ranks: one launch per world size for all of a test file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support import assert_equal_bits, fit, on_ranks, weights
from torch import Tensor

from trainer import TaskModule, distributed

# In this order a run that was stopped on one number of ranks goes on with the next one.
WORLD_SIZES = (4, 2, 1, 3)

Experiment = Callable[[Path], Any]
ended: dict[str, dict[str, Tensor]] = {}  # on each rank: the weights of every fit by its folder


def train(task: TaskModule, folder: Path, **options: Any) -> Any:
    """Fit on the ranks that are there."""
    result = fit(task, folder, **options)
    ended[str(folder)] = weights(task)
    return result


class Everywhere:
    """What the ranks of every world size returned."""

    def __init__(self, root: Path, experiments: Sequence[Experiment]) -> None:
        """Run ``experiment(folder)`` on the ranks of every world size."""
        self._ranks = {size: on_ranks(size, _run, experiments, root) for size in WORLD_SIZES}

    def outcomes(self, experiment: Experiment) -> dict[int, list[Any]]:
        """By world size, what each rank found."""
        name = experiment.__name__
        found = {size: [all_[name] for all_, _ in ranks] for size, ranks in self._ranks.items()}
        for of_rank in itertools.chain(*found.values()):
            if isinstance(of_rank, Exception):
                raise of_rank
        return found

    def outcome(self, experiment: Experiment) -> list[Any]:
        """What each rank found, of every world size in turn."""
        return [of_rank for ranks in self.outcomes(experiment).values() for of_rank in ranks]

    def assert_equal_weights(self) -> None:
        """All ranks ended every training with the same weights, to the last bit."""
        for ranks in self._ranks.values():
            first, *others = (fits for _, fits in ranks)
            assert first
            for other in others:
                assert other.keys() == first.keys()
                for name, final in other.items():
                    assert_equal_bits(final, first[name])


def _run(experiments: Sequence[Experiment], root: Path) -> Any:
    ended.clear()
    folder = root / str(distributed.world_size())
    found = {job.__name__: _outcome(job, folder / job.__name__) for job in experiments}
    return found, dict(ended)


def _outcome(experiment: Experiment, folder: Path) -> Any:
    try:
        return experiment(folder)
    except Exception as error:  # fails the tests that look at it, and not all the others
        return error
