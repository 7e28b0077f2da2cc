"""The fixed order in which gradients are added up, on one rank after the other."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from trainer.data.plan import GlobalBatchPlan, halves
from trainer.exact.tree_sum import TreeSum, completed_sums


def tree(leaves: list[Tensor]) -> Tensor:
    """The sum along the tree, as it is defined."""
    if len(leaves) == 1:
        return leaves[0]
    left, _ = halves(range(len(leaves)))
    return tree(leaves[: len(left)]) + tree(leaves[len(left) :])


def gradient(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(7, generator=generator) * 10 ** (number % 5)


def summed_by_ranks(count: int, world_size: int, present: int) -> tuple[Tensor, int]:
    """Of ``count`` leaves, the first ``present`` are there; also the most sums kept at once."""
    plan = GlobalBatchPlan(count, 1, halving=True)
    totals, most = [], 0
    for rank in range(world_size):
        parameter = nn.Parameter(torch.zeros(7))
        sums = TreeSum([parameter])
        mine = plan.cut(present, rank, world_size)
        for part in mine:
            parameter.grad = gradient(part.number)
            if part is not mine[-1]:
                sums.push(completed_sums(part.number, plan.block(present, rank, world_size)))
                assert parameter.grad is None
                most = max(most, len(sums._sums))
        last = {parameter: torch.zeros(7) if parameter.grad is None else parameter.grad}
        sums.add_to(last)
        totals.append(last[parameter])
    return tree(totals), most


@given(levels=st.integers(0, 4), data=st.data())
def test_every_world_size_adds_up_along_the_same_tree(levels: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 33), "micro-batches")
    present = data.draw(st.integers(1, count), "of which are there")
    world_size = 2 ** min(levels, int(math.log2(count)))
    leaves = [gradient(n) if n < present else torch.zeros(7) for n in range(count)]
    total, most = summed_by_ranks(count, world_size, present)
    assert torch.equal(total, tree(leaves))
    assert most <= math.log2(count) + 1


def test_the_sum_differs_from_that_in_sequence() -> None:
    leaves = [gradient(n) for n in range(8)]
    assert not torch.equal(tree(leaves), sum(leaves[1:], leaves[0]))


@pytest.mark.parametrize("missing", [(), (0,), (3,), (0, 1, 2, 3), (1, 2)])
def test_a_parameter_without_a_gradient_counts_as_zero(missing: tuple[int, ...]) -> None:
    one, other = nn.Parameter(torch.zeros(7)), nn.Parameter(torch.zeros(7))
    sums = TreeSum([one, other])
    for number in range(4):
        one.grad = gradient(number)
        other.grad = None if number in missing else gradient(number)
        if number < 3:
            sums.push(completed_sums(number, range(4)))
    sums.finish()
    there = [torch.zeros(7) if n in missing else gradient(n) for n in range(4)]
    assert one.grad is not None
    assert torch.equal(one.grad, tree([gradient(n) for n in range(4)]))
    if len(missing) == 4:
        assert other.grad is None
    else:
        assert other.grad is not None
        assert torch.equal(other.grad, tree(there))


def test_a_zero_has_the_sign_that_it_has_beside_missing_leaves() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    sums = TreeSum([parameter])
    parameter.grad = torch.tensor([-0.0])
    sums.finish()
    assert parameter.grad is not None
    assert math.copysign(1, float(parameter.grad)) == 1
