"""What every rank has computed for its own samples, put together on all ranks, with gradients.

Two collectives: the ranks tell each other the structure of what they have, with *slots* in the
place of tensors, and join that. If it does not fit together they all find out here, before any
tensor is on its way. Then the tensors travel, as one row of bytes per rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from trainer import distributed
from trainer.trees import PLAIN, has_rows, joined, map_leaves, refusal

ALIGNMENT = 16  # bytes: as many as the largest number has


class Gathered(NamedTuple):
    """What all ranks have.

    Attributes:
        tree: The parts of all ranks, joined in rank order.
        num_samples: The number of samples in it.
        first_rank: The first rank that has any.
    """

    tree: Any
    num_samples: int
    first_rank: int


def gather(
    parts: Sequence[Any], sizes: Sequence[int], device: torch.device, *, compare: bool
) -> Gathered:
    """Return what the ranks have, joined by sample. A collective.

    What belongs to the whole batch (see ``trees.py``) must be the same in all parts.

    Args:
        parts: This rank's, of one structure each; none where it has no sample.
        sizes: Samples in each.
        device: Where tensors travel.
        compare: Whether to check that tensors that belong to the whole batch are the same.

    Returns:
        The same values on every rank. On N ranks, what a gradient gives to a rank's own tensor is
        multiplied by N; if the tensor belongs to the whole batch, by N divided by the parts.

    Raises:
        ValueError: On every rank, if the parts cannot be joined.
    """
    own = _Own()
    mine = [own.take(part) for part in parts]
    everyone = distributed.all_gather_object((mine, list(sizes), own.slots, own.unknown))
    if unknown := {name for *_, names in everyone for name in names}:
        raise ValueError(
            f"outputs or batch hold a {', a '.join(sorted(unknown))}, which cannot be gathered "
            "from all ranks for a global loss; use tensors, numbers, strings, and lists, tuples or "
            "dicts of these"
        )
    all_sizes = [size for _, theirs, *_ in everyone for size in theirs]
    tree = joined([part for theirs, *_ in everyone for part in theirs], all_sizes, _join_leaves)
    received = _exchange(own.tensors, [slots for _, _, slots, _ in everyone], device)
    world_size = distributed.world_size()

    def value(slot: _Slot) -> torch.Tensor:
        return received[slot.rank][slot.number].to(slot.device)

    def fill(leaf: Any) -> Any:
        if isinstance(leaf, _Slot):
            return own.linked(leaf, value(leaf), world_size)
        if isinstance(leaf, _Rows):
            return torch.cat([own.linked(slot, value(slot), world_size) for slot in leaf.slots])
        if isinstance(leaf, _Common):
            if compare:
                _check_same([value(slot) for slot in leaf.slots], leaf.path)
            slot = next((s for s in leaf.slots if s.rank == distributed.rank()), leaf.slots[0])
            return own.linked(slot, value(leaf.slots[0]), world_size / len(leaf.slots))
        return leaf

    first_rank = next(rank for rank, (theirs, *_) in enumerate(everyone) if theirs)
    return Gathered(map_leaves(fill, tree), sum(all_sizes), first_rank)


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor: number ``number`` of ``rank``."""

    rank: int
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def num_padded_bytes(self) -> int:
        """Bytes that it takes on its way: every tensor starts at a multiple of `ALIGNMENT`."""
        return -(-self.num_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def kind(self) -> tuple[torch.dtype, int, tuple[int, ...]]:
        """What must be the same for tensors to be joined along their first dimension."""
        return self.dtype, len(self.shape), self.shape[1:]

    def __str__(self) -> str:
        return f"{self.shape} ({str(self.dtype).removeprefix('torch.')})"


@dataclass(frozen=True)
class _Rows:
    """Stands for tensors that are joined along their first dimension."""

    slots: list[_Slot]


@dataclass(frozen=True)
class _Common:
    """Stands for a tensor that belongs to the whole batch."""

    slots: list[_Slot]
    path: str


class _Own:
    """This rank's tensors, and the slots that stand for them."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.slots: list[_Slot] = []
        self.unknown: list[str] = []

    def take(self, tree: Any) -> Any:
        """Return ``tree`` with slots in the place of tensors."""
        return map_leaves(self._take_leaf, tree)

    def _take_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            slot = _Slot(
                distributed.rank(),
                len(self.tensors),
                tuple(leaf.shape),
                leaf.dtype,
                leaf.device.type,
            )
            self.tensors.append(leaf)
            self.slots.append(slot)
            return slot
        if isinstance(leaf, (*PLAIN, np.ndarray)):
            return leaf
        self.unknown.append(type(leaf).__name__)
        return None

    def linked(self, slot: _Slot, value: torch.Tensor, factor: float) -> torch.Tensor:
        """Return ``value``; its gradient, times ``factor``, goes to the tensor if it is ours."""
        if slot.rank != distributed.rank() or not self.tensors[slot.number].requires_grad:
            return value
        own = self.tensors[slot.number]
        linked: torch.Tensor = _Linked.apply(own, value, factor)  # type: ignore[no-untyped-call]
        return linked


class _Linked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.factor, None, None


def _exchange(
    tensors: list[torch.Tensor], everyone: list[list[_Slot]], device: torch.device
) -> list[list[torch.Tensor]]:
    """Return every rank's tensors, given the slots that stand for them."""
    if len(everyone) == 1:
        return [[tensor.detach() for tensor in tensors]]
    length = max(sum(slot.num_padded_bytes for slot in slots) for slots in everyone)
    row = torch.empty(length, dtype=torch.uint8, device=device)
    for view, tensor in zip(_views(row, everyone[distributed.rank()]), tensors, strict=True):
        view.copy_(tensor.detach())
    rows = distributed.all_gather_tensor(row)
    return [_views(row, slots) for row, slots in zip(rows, everyone, strict=True)]


def _views(row: torch.Tensor, slots: list[_Slot]) -> list[torch.Tensor]:
    """Return the tensors that lie in a row of bytes, one after the other."""
    starts = itertools.accumulate((slot.num_padded_bytes for slot in slots), initial=0)
    return [
        row[start : start + slot.num_bytes].view(slot.dtype).view(slot.shape)
        for start, slot in zip(starts, slots, strict=False)
    ]


def _join_leaves(parts: Sequence[Any], sizes: Sequence[int], path: str) -> Any:
    """Join parts in which slots stand for tensors."""
    first = parts[0]
    if len({type(part) for part in parts}) > 1:
        types = " and ".join(sorted({_type_name(part) for part in parts}))
        raise refusal(path, f"is {types}", "it must be of one type")
    if isinstance(first, _Slot):
        return _join_slots(parts, sizes, path)
    if any(not np.array_equal(part, first) for part in parts):
        different = next(part for part in parts if not np.array_equal(part, first))
        raise refusal(
            path,
            f"is {first!r:.60} and {different!r:.60}",
            "what belongs to the whole batch must be the same in all of them; what belongs to "
            "samples goes into a tensor with one row, or a list with one entry, per sample",
        )
    return first


def _join_slots(slots: Sequence[_Slot], sizes: Sequence[int], path: str) -> _Rows | _Common:
    first = slots[0]
    different = next((slot for slot in slots if slot.kind != first.kind), None)
    if all(map(has_rows, slots, sizes)):
        if different is not None:
            raise refusal(
                path,
                f"is a tensor of shape {first} and one of {different}",
                "all but the number of samples must be the same: pad to one length for all "
                "batches, in the dataset or in collate_fn, or use a list with one tensor for each",
            )
        return _Rows(list(slots))
    if different is None and all(slot.shape == first.shape for slot in slots):
        return _Common(list(slots), path)
    other = different or next(slot for slot in slots if slot.shape != first.shape)
    raise refusal(
        path,
        f"is a tensor of shape {first} and one of {other}, for {sizes[slots.index(first)]} and "
        f"{sizes[slots.index(other)]} samples",
        "its first dimension must be the samples: several views of each go into a tuple or a "
        "second dimension",
    )


def _check_same(values: list[torch.Tensor], path: str) -> None:
    bits = [value.reshape(-1).view(torch.uint8) for value in values]  # NaN is the same as NaN
    if not all(torch.equal(bits[0], other) for other in bits):
        raise refusal(
            path,
            f"is a tensor of shape {tuple(values[0].shape)} with different values",
            "its first dimension is not the samples, so it belongs to the whole batch and must be "
            "the same in all of them; what depends on the samples must have one row for each, and "
            "several views of a sample go into a tuple or a second dimension",
        )


def _type_name(part: Any) -> str:
    return "a Tensor" if isinstance(part, _Slot) else f"a {type(part).__name__}"
