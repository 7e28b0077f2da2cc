"""Adding up gradients in one fixed order, whichever rank computes them.

Floating-point sums depend on their order. So the micro-batches of a global batch are the leaves of
one binary tree, which halves their list again and again, and gradients are added along it. A rank
has the leaves below one node (`GlobalBatchPlan.block`) and adds those up here, like a binary
counter: two sums become one as soon as both are there, so that few are kept, log2 of the number of
leaves at most. The levels above the ranks are added up where the ranks meet, in
``tree_reduction.py``.

A leaf that is missing, at the end of an epoch or because a parameter was not used, counts as +0.
Adding +0 changes nothing but the sign of a zero, so missing leaves are left out here, and +0 is
added to the whole once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer.data.plan import halves

Leaf = dict[torch.Tensor, torch.Tensor]  # gradients, by parameter


def completed_sums(leaf: int, block: range) -> int:
    """Return how many sums of the tree over ``block`` have ``leaf`` as their last one."""
    completed = 0
    while len(block) > 1:
        left, right = halves(block)
        block, completed = (left, 0) if leaf in left else (right, completed + 1)
    return completed


class TreeSum:
    """The sums of gradients that a rank has not added to one another yet, in order."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        """Note whose gradients are added up."""
        self._parameters = parameters
        self._sums: list[Leaf] = []

    def push(self, completes: int, *, leave_zeros: bool = False) -> None:
        """Take the gradients off the parameters, as the next leaf.

        Args:
            completes: How many sums this leaf completes.
            leave_zeros: Leave zeros instead of None: these parameters will have a gradient.
        """
        leaf = {p: p.grad for p in self._parameters if p.grad is not None}
        for parameter, gradient in leaf.items():
            parameter.grad = torch.zeros_like(gradient) if leave_zeros else None
        self._sums.append(leaf)
        for _ in range(completes):
            right = self._sums.pop()
            _add(self._sums[-1], right)

    def add_to(self, last: Leaf) -> None:
        """Add what there is of some parameters to their gradients in the last leaf, in place.

        Args:
            last: As they lie in one of DDP's buckets: whole, but in the order of the parameter's
                own strides (``channels_last``, say), which are those of the sums.
        """
        for sums in reversed(self._sums):
            here = {p: sums[p] for p in last if p in sums}
            there = {
                p: last[p].as_strided(g.size(), g.stride(), last[p].storage_offset())
                for p, g in here.items()
            }
            _add(there, here)

    def finish(self) -> None:
        """Leave the whole sum, the gradients of the last leaf included, on the parameters."""
        last: Leaf = {}
        self._sums.append({p: p.grad for p in self._parameters if p.grad is not None})
        while self._sums:
            _add(last, self._sums.pop())
        if last:
            torch._foreach_add_(list(last.values()), 0.0)
        for parameter, gradient in last.items():
            parameter.grad = gradient

    def clear(self) -> None:
        """Start the next global batch."""
        self._sums.clear()


def _add(left: Leaf, right: Leaf) -> None:
    """Add ``right`` to ``left``, in place; addition does not care which of the two comes first."""
    both = [p for p in right if p in left]
    if both:
        torch._foreach_add_([left[p] for p in both], [right[p] for p in both])
    left.update((p, gradient) for p, gradient in right.items() if p not in left)
