"""The benchmark that compares world sizes, on few steps and images."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.world_size import Line, Outcome, Recipe, difference, recipes, report, train

STEPS = 3


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return recipes()[1]


@pytest.fixture(scope="module")
def alone(recipe: Recipe) -> Outcome:
    return train(recipe, 1, 0, STEPS, reproducible=True)


def test_two_ranks_keep_the_bounds(recipe: Recipe, alone: Outcome) -> None:
    exact = difference(alone, train(recipe, 2, 0, STEPS, reproducible=True))
    assert exact == (0, 0, 0, True)
    usual = difference(alone, train(recipe, 2, 0, STEPS, reproducible=False))
    lines = [Line(recipe, True, 2, [exact]), Line(recipe, False, 2, [usual])]
    assert [line.holds for line in lines] == [True, True]
    assert report(lines, STEPS, markdown=True).count("\n") == 3


def test_a_wrong_loss_breaks_them(recipe: Recipe, alone: Outcome) -> None:
    losses = alone.losses.clone()
    losses[1] *= 1 + 1e-9
    wrong = difference(alone, replace(alone, losses=losses))
    assert wrong[1] == pytest.approx(1e-9)
    for reproducible in (True, False):
        assert not Line(recipe, reproducible, 2, [wrong]).holds


def test_a_wrong_last_bit_breaks_the_bits(recipe: Recipe, alone: Outcome) -> None:
    weights = {name: w.clone() for name, w in alone.weights.items()}
    first = next(iter(weights.values())).view(-1)
    first[0] = torch.nextafter(first[0], first[0] + 1)
    wrong = difference(alone, replace(alone, weights=weights))
    assert not Line(recipe, True, 2, [wrong]).holds
    assert Line(recipe, False, 2, [wrong]).holds
