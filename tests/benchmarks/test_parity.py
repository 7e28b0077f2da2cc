"""The Trainer against hand-written loops, on few steps; and the benchmark that measures it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.parity import (
    EQUAL_BITS,
    ROUNDING,
    Length,
    Outcome,
    by_ddp,
    by_plain_loop,
    by_trainer,
    compare,
    report,
)

# Three epochs of a whole batch and of one that leaves rank 1 without a sample.
SHORT = Length(images=128 + 40, epochs=3)
DOUBLE = torch.float64


@pytest.fixture(scope="module")
def plain() -> Outcome:
    return by_plain_loop(SHORT, DOUBLE)


def test_the_loop_by_hand_trains(plain: Outcome) -> None:
    assert len(plain.losses) == SHORT.steps == 6
    assert plain.losses[-1] < plain.losses[0] - 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_process_computes_the_bits_of_a_plain_loop(dtype: torch.dtype) -> None:
    found = compare("", by_trainer(SHORT, dtype, 1), by_plain_loop(SHORT, dtype), EQUAL_BITS)
    assert found.holds, found


def test_two_ranks_compute_the_bits_of_ddp_and_the_plain_loop_within_rounding(
    plain: Outcome,
) -> None:
    ours = by_trainer(SHORT, DOUBLE, 2)
    same_as_ddp = compare("", ours, by_ddp(SHORT, DOUBLE, 2), EQUAL_BITS)
    assert same_as_ddp.holds, same_as_ddp
    as_alone = compare("", ours, plain, ROUNDING)
    assert as_alone.holds, as_alone


@pytest.mark.parametrize("error", [1e-9, float("nan")])
def test_a_wrong_weight_breaks_both_bounds(plain: Outcome, error: float) -> None:
    weights = {name: weight.clone() for name, weight in plain.weights.items()}
    next(iter(weights.values())).view(-1)[3] += error
    wrong = replace(plain, weights=weights)
    assert not compare("", wrong, plain, EQUAL_BITS).holds
    found = compare("a wrong weight", wrong, plain, ROUNDING)
    assert not found.holds
    assert report([found], markdown=True).splitlines()[-1].endswith("| NO    |")


def test_a_wrong_loss_breaks_both_bounds(plain: Outcome) -> None:
    wrong = replace(plain, losses=[plain.losses[0] + 1e-9, *plain.losses[1:]])
    assert not compare("", wrong, plain, EQUAL_BITS).holds
    assert not compare("", wrong, plain, ROUNDING).holds


def test_rounding_is_no_equality_of_bits(plain: Outcome) -> None:
    weights = {name: torch.nextafter(w, w + 1) for name, w in plain.weights.items()}
    close = replace(plain, weights=weights)
    assert compare("", close, plain, ROUNDING).holds
    assert not compare("", close, plain, EQUAL_BITS).holds
