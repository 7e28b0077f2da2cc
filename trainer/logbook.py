"""What is logged between two events: kept as it comes, summed and shared at the event.

An ordinary step only appends a detached tensor to a list. At an event the values become one sum
and one weight per name, in float64, and travel in one packed all-reduce.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch

from trainer import distributed

# Values of one name that are kept apart before they are folded into a sum on their device.
FOLD_AFTER = 1024


class NotFiniteError(ValueError, FloatingPointError):
    """A loss or a weight became NaN or infinite."""


class Logbook:
    """Weighted means over micro-batches and ranks since the last `reduce`.

    Attributes:
        has_weight: Whether this rank has recorded a loss in the current step.
    """

    def __init__(self) -> None:
        self.has_weight = False
        # Per name: the values that came since the last fold, their weights, and folded sums.
        self._values: dict[str, list[torch.Tensor | float]] = defaultdict(list)
        self._weights: dict[str, list[torch.Tensor | float]] = defaultdict(list)
        self._folded: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._names: list[str] = []  # agreed by all ranks
        self._num_samples = 0
        self._place = (0, 0)  # step and position of the current micro-batch
        self._loss_places: list[tuple[int, int, int]] = []
        self._loss_finite: list[torch.Tensor] = []

    def begin(self, step: int, position: int, num_samples: int) -> None:
        """Say to which micro-batch the values that follow belong."""
        if step != self._place[0]:
            self.has_weight = False
        self._num_samples = num_samples
        self._place = (step, position)

    def add(self, name: str, value: torch.Tensor | float, weight: float | None = None) -> None:
        """Record one value of a mean.

        Raises:
            ValueError: If ``value`` is not a scalar or ``name`` is ``loss``, which is the loop's.
        """
        if name == "loss":
            raise ValueError("log('loss', ...): the Trainer logs the loss itself; use another name")
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise ValueError(
                f"log({name!r}, ...) got a tensor of shape {tuple(value.shape)}; log a scalar: its "
                "mean or its norm, say"
            )
        if isinstance(value, torch.Tensor):  # a parameter or buffer will change in place
            value = value.detach().clone()
        self._append(name, value, self._num_samples if weight is None else weight)

    def add_loss(
        self, value: torch.Tensor, weight: torch.Tensor | float, *, is_total: bool
    ) -> None:
        """Record a micro-batch's loss: a mean, or the total over ``weight``."""
        self.has_weight = True
        self._loss_places.append((*self._place, self._num_samples))
        self._append("loss", value.detach() / weight if is_total else value, weight)

    def reduce(self, *, finite_loss: bool = True) -> dict[str, float]:
        """Return the mean of every name since the last call, over all ranks, and start anew.

        Must be called on every rank. Names without weight anywhere are left out.

        Args:
            finite_loss: Whether a NaN or infinite loss is an error.

        Raises:
            NotFiniteError: If a loss was NaN or infinite; the message says where.
        """
        sums = {name: self._sum(name) for name in (*self._values, *self._folded)}
        means = self._share(sums)
        if finite_loss and not math.isfinite(means.get("loss", 0.0)):
            self._raise_not_finite()
        self._values.clear()
        self._weights.clear()
        self._folded.clear()
        self._loss_places.clear()
        self._loss_finite.clear()
        return means

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
        values = self._values[name]
        values.append(_scalar(value) if isinstance(value, torch.Tensor) else float(value))
        self._weights[name].append(weight)
        if len(values) >= FOLD_AFTER:
            self._fold(name)

    def _fold(self, name: str) -> None:
        values = _stack(self._values.pop(name))
        weights = _stack(self._weights.pop(name)).to(values.device)
        if name == "loss":
            self._loss_finite.append(values.isfinite())
        # A weight of 0 means that the value does not count, not even if it is NaN.
        products = torch.where(weights == 0, 0.0, values * weights)
        self._folded[name].append(torch.stack([products.sum(), weights.sum()]))

    def _sum(self, name: str) -> tuple[float, float]:
        if name in self._values:
            self._fold(name)
        total, weight = torch.stack(self._folded[name]).sum(dim=0).tolist()
        return total, weight

    def _share(self, sums: dict[str, tuple[float, float]]) -> dict[str, float]:
        """Add up the ranks' sums in one all-reduce; the ranks agree on its layout beforehand."""
        unknown = sorted(set(sums) - set(self._names))
        packed = self._pack(sums, len(unknown))
        if packed[0]:
            # Some rank has a name that the others may not have: exchange names, once.
            every = distributed.all_gather_object(unknown)
            self._names += sorted({name for names in every for name in names})
            packed = self._pack(sums, 0)
        pairs = zip(packed[1::2], packed[2::2], strict=True)
        return {
            name: total / weight
            for name, (total, weight) in zip(self._names, pairs, strict=True)
            if weight
        }

    def _pack(self, sums: dict[str, tuple[float, float]], unknown: int) -> list[float]:
        numbers = [float(unknown)]
        for name in self._names:
            numbers += sums.get(name, (0.0, 0.0))
        packed = torch.tensor(numbers, dtype=torch.float64)
        result: list[float] = distributed.all_reduce_sum(packed).tolist()
        return result

    def _first_not_finite(self) -> tuple[int, int, int] | None:
        if not self._loss_places:
            return None
        masks = list(self._loss_finite)
        if self._values.get("loss"):
            masks.append(_stack(self._values["loss"]).isfinite())
        finite = torch.cat(masks)
        if bool(finite.all()):
            return None
        return self._loss_places[int(finite.logical_not().nonzero()[0])]

    def _raise_not_finite(self) -> None:
        found = distributed.all_gather_object(self._first_not_finite())
        rank = min(
            (r for r, place in enumerate(found) if place is not None), key=lambda r: found[r] or ()
        )
        step, position, count = found[rank] or (0, 0, 0)
        raise NotFiniteError(
            f"the loss became NaN or infinite first at step {step}, on rank {rank}, for the "
            f"samples at positions {position} to {position + count - 1} of the epoch. Nothing was "
            "saved since. Usual causes: a learning rate that is too high, a logarithm or division "
            "by 0, broken inputs; detect_anomaly=true names the operation"
        )


def _stack(values: list[Any]) -> torch.Tensor:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if len(tensors) == len(values):
        return torch.stack(tensors).to(torch.float64)
    device = tensors[0].device if tensors else torch.device("cpu")
    return torch.tensor([float(v) for v in values], dtype=torch.float64, device=device)


def _scalar(value: torch.Tensor) -> torch.Tensor:
    return value.detach() if value.dim() == 0 else value.detach().reshape(())
