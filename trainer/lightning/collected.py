"""What a module has logged, until it is told: over all ranks, at the end of what it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from trainer import distributed, metrics
from trainer.logbook import Logbook

FOLDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class Folded(NamedTuple):
    """A sum, a maximum or a minimum so far; ``how`` is a key of `FOLDS`."""

    how: str
    value: torch.Tensor


class LoggedMetric(NamedTuple):
    """A torchmetrics object: the attribute that holds it, and whether its value is told."""

    path: str
    is_told: bool


class Collected:
    """What was logged for one epoch, or for one evaluation, and is told at its end.

    ``reduce`` and ``state`` are collectives.

    Attributes:
        means: Of values that were logged, weighted by samples.
        metrics: By the name under which they were logged.
        folded: This rank's, by name.
        num_samples: This rank's samples, up to now.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        """Start with nothing.

        Args:
            note: Tells the user something, once.
        """
        self.means = Logbook()
        self.metrics: dict[str, LoggedMetric] = {}
        self.folded: dict[str, Folded] = {}
        self.num_samples = 0
        self._of_ranks: dict[str, torch.Tensor] = {}
        self._used: list[Any] = []
        self._note = note

    def fold(self, name: str, how: str, value: torch.Tensor) -> None:
        """Add a value to a sum, or to a maximum or minimum."""
        known = self.folded.get(name)
        self.folded[name] = Folded(how, value if known is None else FOLDS[how](known.value, value))

    def add_of_rank(self, name: str, value: torch.Tensor, weight: float) -> None:
        """Record a value that each rank has computed by itself, for its own samples."""
        self.means.add(f"/{name}", value, weight)
        self._of_ranks[name] = value

    def reduce(self, module: torch.nn.Module) -> dict[str, float]:
        """Return all values over all ranks, by name, and forget them, but for torchmetrics."""
        values = {name[1:]: v for name, v in self.means.reduce(finite_loss=False).items()}
        of_ranks = {name: float(value) for name, value in self._of_ranks.items()}
        every = distributed.all_gather_object((self.metrics, of_ranks))
        self._check_equal([theirs for _, theirs in every])
        values |= {name: float(folded.value) for name, folded in self._shared_folds().items()}
        logged = {name: how for theirs, _ in every for name, how in sorted(theirs.items())}
        found: dict[str, Any] = {n: module.get_submodule(how.path) for n, how in logged.items()}
        told = metrics.MetricSet({n: m for n, m in found.items() if logged[n].is_told}, exact=False)
        with metrics.synchronised_here(told):
            values.update(metrics.compute(told))
        self._used += found.values()
        self.metrics.clear()
        self.folded.clear()
        self._of_ranks.clear()
        return values

    def state(self) -> dict[str, Any]:
        """Return what there is so far over all ranks: means, sums and extremes."""
        return {
            "means": self.means.state(),
            "folded": {name: list(folded) for name, folded in self._shared_folds().items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state`` returned on rank 0."""
        self.means.restore(state["means"])
        if distributed.rank() == 0:  # what is over all ranks counts once
            self.folded = {name: Folded(*folded) for name, folded in state["folded"].items()}

    def end(self) -> None:
        """Reset the torchmetrics that were logged, and start anew."""
        for metric in self._used:
            metric.reset()
        self._used.clear()
        self.num_samples = 0

    def _shared_folds(self) -> dict[str, Folded]:
        """Return sums and extremes over all ranks."""
        if distributed.world_size() == 1:
            return self.folded
        own = {name: (how, float(value)) for name, (how, value) in self.folded.items()}
        shared: dict[str, Folded] = {}
        for theirs in distributed.all_gather_object(own):
            for name, (how, number) in theirs.items():
                value = torch.tensor(number, dtype=torch.float64)
                known = shared.get(name)
                shared[name] = Folded(how, FOLDS[how](known.value, value) if known else value)
        return shared

    def _check_equal(self, ranks: list[dict[str, float]]) -> None:
        """Tell the user where ranks have values of their own, whose mean may not be what is meant.

        Args:
            ranks: The values of each, by name.
        """
        for name in dict.fromkeys(name for theirs in ranks for name in theirs):
            if len({repr(theirs[name]) for theirs in ranks if name in theirs}) > 1:
                self._note(
                    f"each rank computed {name} for its own samples; their mean is weighted by "
                    "samples, which is right if it is a mean over samples. Log anything else as a "
                    "torchmetrics object"
                )


class Latest:
    """What training steps have logged: of each name its mean in the last step that logged it.

    On several ranks each has a part of that mean, so that no rank knows it by itself.
    """

    def __init__(self) -> None:
        self._own: dict[str, tuple[int, list[tuple[torch.Tensor, float]]]] = {}

    def add(self, name: str, step: int, value: torch.Tensor, weight: float) -> None:
        """Record a value of one micro-batch."""
        if name not in self._own or self._own[name][0] != step:
            self._own[name] = (step, [])
        self._own[name][1].append((value, weight))

    def reduce(self) -> dict[str, float]:
        """Return the means over all ranks. A collective."""
        own = {}
        for name, (step, parts) in self._own.items():
            total = sum(float(value) * weight for value, weight in parts)
            own[name] = (step, total, sum(weight for _, weight in parts))
        every = distributed.all_gather_object(own)
        means: dict[str, float] = {}
        for name in dict.fromkeys(name for theirs in every for name in theirs):
            found = [theirs[name] for theirs in every if name in theirs]
            last = max(step for step, *_ in found)
            weight = sum(weight for step, _, weight in found if step == last)
            if weight:
                means[name] = sum(total for step, total, _ in found if step == last) / weight
        return means
