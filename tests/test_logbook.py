"""Weighted means, and the search for the first loss that is not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import on_ranks

from trainer import distributed, logbook
from trainer.logbook import Logbook


@pytest.mark.parametrize("fold_after", [1, 3, 1024])
def test_a_mean_is_weighted_by_samples_or_by_what_is_given(
    fold_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logbook, "FOLD_AFTER", fold_after)
    book = Logbook()
    for number, (value, size) in enumerate([(1.0, 4), (2.0, 4), (5.0, 1)]):
        book.begin(number, 0, size)
        book.add("plain", torch.tensor(value, requires_grad=True))
        book.add("given", value, weight=number)
        book.add_loss(torch.tensor(value), size, is_total=False)
    found = book.reduce()
    assert found == pytest.approx({"plain": 17 / 9, "given": 12 / 3, "loss": 17 / 9})
    assert book.reduce() == {}, "values are kept"


def test_a_total_is_divided_by_its_weight_once() -> None:
    book = Logbook()
    book.add_loss(torch.tensor(30.0), torch.tensor(10), is_total=True)
    book.add_loss(torch.tensor(2.0), 2, is_total=False)
    assert book.reduce() == pytest.approx({"loss": (30 + 4) / 12})


def test_a_value_of_weight_0_does_not_count_even_if_it_is_nan() -> None:
    book = Logbook()
    book.add("a", math.nan, weight=0)
    assert book.reduce() == {}
    book.add("a", math.nan, weight=0)
    book.add("a", 3.0, weight=2)
    assert book.reduce() == {"a": 3.0}


def test_sums_are_in_float64() -> None:
    book = Logbook()
    book.begin(0, 0, 1)
    for _ in range(3000):
        book.add("a", torch.tensor(0.1))
    assert book.reduce()["a"] == pytest.approx(float(torch.tensor(0.1)), rel=1e-13)


def test_a_parameter_is_logged_as_it_is_now_and_not_as_it_will_be() -> None:
    book, parameter = Logbook(), torch.nn.Parameter(torch.tensor([1.0]))
    book.begin(0, 0, 1)
    for _ in range(3):
        book.add("a", parameter)
        with torch.no_grad():
            parameter.add_(1.0)
    assert book.reduce()["a"] == (1 + 2 + 3) / 3


def test_what_is_no_scalar_is_refused() -> None:
    with pytest.raises(ValueError, match=r"log\('a', ...\) got a tensor of shape \(2,\)"):
        Logbook().add("a", torch.zeros(2))
    with pytest.raises(ValueError, match="use another name"):
        Logbook().add("loss", 1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fold_after", [2, 1024])
def test_the_first_loss_that_is_not_finite_is_named(
    bad: float, fold_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logbook, "FOLD_AFTER", fold_after)
    book = Logbook()
    for step, value in enumerate([1.0, 2.0, 3.0, bad, 5.0, math.nan]):
        book.begin(step, 10 * step, 4)
        book.add_loss(torch.tensor(value), 4, is_total=False)
    where = "step 3, on rank 0, for the samples at positions 30 to 33"
    with pytest.raises(FloatingPointError, match=where):
        book.check_finite()
    with pytest.raises(FloatingPointError, match=where):
        book.reduce()


def test_a_finite_loss_passes_and_evaluation_may_ask_for_any() -> None:
    book = Logbook()
    book.check_finite()
    book.begin(1, 0, 1)
    book.add_loss(torch.tensor(1.0), 1, is_total=False)
    book.check_finite()
    book.add_loss(torch.tensor(math.nan), 1, is_total=False)
    assert math.isnan(book.reduce(finite_loss=False)["loss"])
    book.check_finite()


def shared() -> list[Any]:
    rank = distributed.rank()
    book = Logbook()
    book.begin(1, 0, rank + 1)
    book.add("all", float(rank))
    book.add(f"own_{rank}", rank + 10.0)
    found: list[Any] = [book.reduce()]
    if rank == 1:
        book.add("late", 4.0)
    found.append(book.reduce())
    book.add("all", float(rank), weight=1)
    found.append(book.reduce())
    return found


@pytest.mark.timeout(60)
def test_means_are_over_all_ranks_whatever_each_of_them_logs() -> None:
    for found in on_ranks(3, shared):
        assert found == [
            {"all": (0 + 2 + 6) / 6, "own_0": 10.0, "own_1": 11.0, "own_2": 12.0},
            {"late": 4.0},
            {"all": 1.0},
        ]
