"""Exact sums, against fractions."""

from __future__ import annotations

import io
import math
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from trainer.exact.exact_sum import UNIT_EXPONENT, ExactSum, pack, unpack

finite = st.floats(allow_nan=False, allow_infinity=False)
BIGGEST, TINIEST = sys.float_info.max, 5e-324


def added(parts: list[ExactSum]) -> ExactSum:
    """As the ranks add them up: one all-reduce of what each has packed."""
    packed = torch.stack([pack([part, ExactSum.of([1.0])]) for part in parts]).sum(dim=0)
    total, count = unpack(packed)
    assert float(count) == len(parts)
    return total


@given(st.lists(finite), st.randoms(use_true_random=False), st.integers(1, 5))
@example([BIGGEST] * 4, None, 2)
@example([-BIGGEST, -TINIEST, -0.0], None, 3)
@example([1e16, 1.0, -1e16, TINIEST], None, 1)
def test_a_sum_is_exact_in_any_order_and_however_it_is_split(values, random, ranks):
    whole = ExactSum.of(values)
    assert Fraction(whole.units, 2**UNIT_EXPONENT) == sum(map(Fraction, values))
    shuffled = list(values)
    if random is not None:
        random.shuffle(shuffled)
    parts = [ExactSum.of(shuffled[rank::ranks]) for rank in range(ranks)]
    assert added(parts) == sum(parts, ExactSum()) == whole
    assert bool(whole) == (sum(map(Fraction, values)) != 0)


@given(st.lists(finite), st.lists(finite))
def test_a_quotient_is_the_nearest_float(values, weights):
    total, weight = ExactSum.of(values), ExactSum.of(weights)
    true_total, true_weight = sum(map(Fraction, values)), sum(map(Fraction, weights))
    if weight:
        assert total / weight == nearest(Fraction(true_total) / true_weight)
    assert float(total) == nearest(Fraction(true_total))


def nearest(fraction: Fraction) -> float:
    try:
        return float(fraction)
    except OverflowError:
        return math.copysign(math.inf, (fraction > 0) - 0.5)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, math.inf], math.inf),
        ([-math.inf, BIGGEST], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.nan, 1.0], math.nan),
        ([math.nan, math.inf], math.nan),
    ],
)
def test_what_is_not_finite_stays_so(values, expected):
    total = added([ExactSum.of(values[:1]), ExactSum.of(values[1:])])
    for found in (float(total), total / ExactSum.of([2.0])):
        assert found == expected or (math.isnan(found) and math.isnan(expected))
    assert total
    assert ExactSum.of([1.0]) / ExactSum.of([math.inf]) == 0


@given(st.lists(st.floats()))
@example([BIGGEST] * 3 + [TINIEST])
@example([-BIGGEST] * 3)
def test_a_sum_survives_a_checkpoint(values):
    total, file = ExactSum.of(values), io.BytesIO()
    torch.save(total.state(), file)
    file.seek(0)
    assert ExactSum.restored(torch.load(file, weights_only=True)) == total
