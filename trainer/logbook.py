"""What is logged between two events: kept as it comes, summed and shared at the event.

An ordinary step only appends a detached tensor to a list. At an event the values become one sum
and one weight per name, and travel in one packed all-reduce. The sums are exact (see
``exact_sum.py``), so a mean has the same bits at any world size if its values have.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch

from trainer import distributed
from trainer.exact.exact_sum import ExactSum, pack, unpack

# Values of one name that are kept apart before they are stacked into few tensors where they are.
STACK_AFTER = 1024

# Numbers of several places: of each its tensor, and where in the order its numbers are.
_Stack: TypeAlias = list[tuple[list[int], torch.Tensor]]
_NOTHING = (ExactSum(), ExactSum())


class NotFiniteError(ValueError, FloatingPointError):
    """A loss or a weight became NaN or infinite."""


def full_names(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    """Return values as they are called in an event: ``<prefix>/<name>``, but ``/<name>`` alone.

    A name of the latter kind is the user's choice, so it wins over the same one with a prefix.
    """
    whole = {name[1:]: value for name, value in values.items() if name.startswith("/")}
    rest = {f"{prefix}/{name}": v for name, v in values.items() if not name.startswith("/")}
    return {**rest, **whole}


class Logbook:
    """Weighted means over micro-batches and ranks since the last `reduce`.

    Attributes:
        losses: The names of losses, the same on every rank; nobody else may log as such.
        place: Step and position of the current micro-batch.
        suspect: What in this run may have made a loss infinite or NaN; None if nothing special.
    """

    def __init__(self) -> None:
        self.losses: tuple[str, ...] = ("loss",)
        self.place = (0, 0)
        self.suspect: str | None = None
        # Per name: values since the last stack, their weights, and the stacks of both.
        self._values: dict[str, list[torch.Tensor | float]] = defaultdict(list)
        self._weights: dict[str, list[torch.Tensor | float]] = defaultdict(list)
        self._stacks: dict[str, list[tuple[_Stack, _Stack]]] = defaultdict(list)
        self._restored: dict[str, tuple[ExactSum, ExactSum]] = {}
        self._names: list[str] = []  # agreed by all ranks
        self._num_samples = 0
        self._is_counted = True
        self._loss_places: dict[str, list[tuple[int, int, int]]] = defaultdict(list)

    @property
    def num_samples(self) -> int:
        """How many samples the values that follow are of."""
        return self._num_samples

    def begin(self, step: int, position: int, num_samples: int) -> None:
        """Say to which micro-batch the values that follow belong.

        Args:
            step: The optimizer step.
            position: Position of its first sample in the epoch.
            num_samples: Its number of samples.
        """
        self.place = (step, position)
        self.count(num_samples)

    def count(self, num_samples: int, *, is_counted: bool = True) -> None:
        """Say of how many samples the values that follow are.

        Args:
            num_samples: Of this micro-batch, or of the global batch.
            is_counted: Whether the values count; not where another rank records the same ones.
        """
        self._num_samples = num_samples
        self._is_counted = is_counted

    def add(
        self, name: str, value: torch.Tensor | float, weight: torch.Tensor | float | None = None
    ) -> None:
        """Record one value of a mean.

        Raises:
            ValueError: If ``value`` is not a scalar or ``name`` is ``loss``, which is the loop's.
        """
        if name in self.losses:
            raise ValueError(
                f"log({name!r}, ...): the Trainer logs the loss itself; use another name"
            )
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise ValueError(
                f"log({name!r}, ...) got a tensor of shape {tuple(value.shape)}; log a scalar: its "
                "mean or its norm, say"
            )
        if isinstance(value, torch.Tensor):  # a parameter or buffer will change in place
            value = value.detach().clone().reshape(())
        else:
            value = float(value)
        self._append(name, value, self._num_samples if weight is None else weight)

    def add_loss(
        self,
        value: torch.Tensor,
        weight: torch.Tensor | float,
        *,
        is_total: bool,
        name: str = "loss",
    ) -> None:
        """Record a micro-batch's loss: a mean, or the total over ``weight``."""
        if self._is_counted:
            self._loss_places[name].append((*self.place, self._num_samples))
        value = value.detach()
        self._append(name, value / weight if is_total else value, weight)

    def reduce(
        self, *, finite_loss: bool = True, beside: torch.Tensor | None = None
    ) -> dict[str, float]:
        """Return the mean of every name since the last call, over all ranks, and start anew.

        Must be called on every rank. Names without weight anywhere are left out.

        Args:
            finite_loss: Whether a NaN or infinite loss is an error.
            beside: An int64 tensor to sum over the ranks on this occasion, in place; of the same
                shape on every rank.

        Raises:
            NotFiniteError: If a loss was NaN or infinite; the message says where.
        """
        shared = self._shared(beside)
        means = {name: total / weight for name, (total, weight) in shared.items() if weight}
        if finite_loss and not all(math.isfinite(means.get(name, 0.0)) for name in self.losses):
            self._raise_not_finite()
        self._values.clear()
        self._weights.clear()
        self._stacks.clear()
        self._restored = {}
        self._loss_places.clear()
        return means

    def state(self) -> dict[str, Any]:
        """Return what the next `reduce` would reckon with, as plain values, for `restore`.

        Must be called on every rank.

        Returns:
            By name, the exact sums of value times weight and of weight over all ranks; the same on
            every rank.
        """
        return {
            name: [total.state(), weight.state()]
            for name, (total, weight) in self._shared().items()
            if total or weight
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Let the next `reduce` reckon with what `state` returned, at any world size.

        Must be called on every rank.
        """
        if distributed.rank() == 0:  # the sums are over all ranks, and count once
            self._restored = {
                name: (ExactSum.restored(total), ExactSum.restored(weight))
                for name, (total, weight) in state.items()
            }

    def check_finite(self) -> None:
        """Refuse to go on if a loss since the last `reduce` is not finite, on any rank.

        Must be called on every rank.

        Raises:
            NotFiniteError: If there was one; the message says where.
        """
        bad = torch.tensor([0 if self._first_not_finite() is None else 1])
        if int(distributed.all_reduce_sum(bad)):
            self._raise_not_finite()

    def _append(self, name: str, value: Any, weight: torch.Tensor | float) -> None:
        if not self._is_counted:
            return
        values = self._values[name]
        values.append(value)
        self._weights[name].append(weight)
        if len(values) >= STACK_AFTER:
            self._stack(name)

    def _stack(self, name: str) -> None:
        if name in self._values:
            stacks = _stacked(self._values.pop(name)), _stacked(self._weights.pop(name))
            self._stacks[name].append(stacks)

    def _read(self, name: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield this rank's values times weights, and weights, in order; waits for the device."""
        self._stack(name)
        for values, weights in (map(_joined, stacks) for stacks in self._stacks.get(name, ())):
            # A weight of 0 means that the value does not count, not even if it is NaN.
            yield torch.where(weights == 0, 0.0, values * weights), weights

    def _sum(self, name: str) -> tuple[ExactSum, ExactSum]:
        """Add up this rank's values times weights, and weights."""
        total, weight = self._restored.get(name, _NOTHING)
        for products, weights in self._read(name):
            total += ExactSum.of(products.numpy())
            weight += ExactSum.of(weights.numpy())
        return total, weight

    def _shared(self, beside: torch.Tensor | None = None) -> dict[str, tuple[ExactSum, ExactSum]]:
        """Add up the ranks' sums in one all-reduce; the ranks agree on its layout beforehand."""
        names = {*self._values, *self._stacks, *self._restored}
        sums = {name: self._sum(name) for name in names}
        unknown = sorted(names.difference(self._names))
        if distributed.world_size() == 1:
            self._names += unknown
            return {name: sums.get(name, _NOTHING) for name in self._names}
        header, *shared = self._added(sums, len(unknown), beside)
        if header:
            # Some rank has a name that the others may not have: exchange names, once.
            every = distributed.all_gather_object(unknown)
            self._names += sorted({name for names in every for name in names})
            _, *shared = self._added(sums, 0)
        return dict(zip(self._names, zip(shared[::2], shared[1::2], strict=True), strict=True))

    def _added(
        self,
        sums: dict[str, tuple[ExactSum, ExactSum]],
        unknown: int,
        beside: torch.Tensor | None = None,
    ) -> list[ExactSum]:
        own = [part for name in self._names for part in sums.get(name, _NOTHING)]
        packed = pack([ExactSum(unknown), *own])  # a header and two sums per name
        if beside is None:
            return unpack(distributed.all_reduce_sum(packed))
        together = torch.cat([packed.flatten(), beside.flatten()])
        distributed.all_reduce_sum(together)
        beside.copy_(together[packed.numel() :].view_as(beside))
        return unpack(together[: packed.numel()].view_as(packed))

    def _first_not_finite(self) -> tuple[int, int, int] | None:
        found = []
        for name, places in self._loss_places.items():
            finite = torch.cat([products.isfinite() for products, _ in self._read(name)])
            if not bool(finite.all()):
                found.append(places[int(finite.logical_not().nonzero()[0])])
        return min(found, default=None)

    def _raise_not_finite(self) -> None:
        found = distributed.all_gather_object(self._first_not_finite())
        rank = min(
            (r for r, place in enumerate(found) if place is not None), key=lambda r: found[r] or ()
        )
        step, position, count = found[rank] or (0, 0, 0)
        suspect = "" if self.suspect is None else f"{self.suspect}, "
        raise NotFiniteError(
            f"the loss became NaN or infinite first at step {step}, on rank {rank}, for the "
            f"samples at positions {position} to {position + count - 1} of the epoch. Nothing was "
            f"saved since. Usual causes: {suspect}a learning rate that is too high, a logarithm or "
            "division by 0, broken inputs; detect_anomaly=true names the operation, if it is one "
            "of the task's"
        )


def _stacked(numbers: list[torch.Tensor | float]) -> _Stack:
    """Put the numbers of each place into one tensor there, as float64."""
    places: dict[torch.device | None, list[int]] = defaultdict(list)
    for place, number in enumerate(numbers):
        places[number.device if isinstance(number, torch.Tensor) else None].append(place)
    return [(own, _on_one_device([numbers[place] for place in own])) for own in places.values()]


def _on_one_device(numbers: list[Any]) -> torch.Tensor:
    if not isinstance(numbers[0], torch.Tensor):
        return torch.tensor(numbers, dtype=torch.float64)
    if len({number.dtype for number in numbers}) > 1:
        # Each by itself: in a common format some would be rounded.
        numbers = [number.to(torch.float64) for number in numbers]
    return torch.stack(numbers).to(torch.float64)


def _joined(stack: _Stack) -> torch.Tensor:
    """Return all numbers of a stack in their order, on the host."""
    if len(stack) == 1:
        return stack[0][1].cpu()
    joined = torch.empty(sum(len(places) for places, _ in stack), dtype=torch.float64)
    for places, numbers in stack:
        joined[places] = numbers.cpu()
    return joined
