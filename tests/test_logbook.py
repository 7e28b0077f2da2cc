"""Weighted means, and the search for the first loss that is not finite."""

from __future__ import annotations

import io
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from support import on_ranks

from trainer import distributed, logbook
from trainer.logbook import Logbook, full_names


@pytest.mark.parametrize("stack_after", [1, 3, 1024])
def test_a_mean_is_weighted_by_samples_or_by_what_is_given(
    stack_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logbook, "STACK_AFTER", stack_after)
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
@pytest.mark.parametrize("stack_after", [2, 1024])
def test_the_first_loss_that_is_not_finite_is_named(
    bad: float, stack_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logbook, "STACK_AFTER", stack_after)
    book = Logbook()
    for step, value in enumerate([1.0, 2.0, 3.0, bad, 5.0, math.nan]):
        book.begin(step, 10 * step, 4)
        book.add_loss(torch.tensor(value), 4, is_total=False)
    with pytest.raises(FloatingPointError, match="Usual causes: a learning rate"):
        book.check_finite()
    book.suspect = "a hook"
    with pytest.raises(FloatingPointError, match="Usual causes: a hook, a learning rate"):
        book.check_finite()
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


def test_a_mean_is_the_nearest_float_whatever_the_order() -> None:
    values = [1e16, 1.0, -1e16, 0.1, 1e-300, 3.0]
    for order in (values, values[::-1], sorted(values)):
        book = Logbook()
        for value in order:
            book.add("a", value, weight=1)
        assert book.reduce() == {"a": float(sum(map(Fraction, values)) / 6)}


def test_values_of_different_formats_are_not_rounded_to_a_common_one() -> None:
    book, many = Logbook(), 2**24 + 1  # not a float32
    for value in (torch.tensor(many), torch.tensor(1.0), 2.0):
        book.add("a", value, weight=1)
    assert book.reduce() == {"a": (many + 3) / 3}


@pytest.mark.parametrize("stack_after", [3, 1024])
def test_values_of_the_host_and_of_a_device_are_told_apart(
    stack_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kinds of values and of weights, of which some do not count."""
    monkeypatch.setattr(logbook, "STACK_AFTER", stack_after)
    book, total, weight = Logbook(), 0, 0
    for number in range(10):
        value: Any = math.nan if number % 4 == 0 else float(number)
        size: Any = number % 4
        total += number * size
        weight += size
        book.begin(number, number, 1)
        value = torch.tensor(value, dtype=torch.float64)
        book.add_loss(value, torch.tensor(size) if number % 3 else size, is_total=False)
        book.add("a", value if number % 2 else float(value), weight=size)
    book.check_finite()
    assert book.reduce() == {"loss": total / weight, "a": total / weight}
    for number in range(5):
        book.begin(number, 10 * number, 1)
        size = 1.0 if number % 2 else torch.tensor(1.0)
        book.add_loss(torch.tensor(math.nan if number >= 3 else 1.0), size, is_total=False)
    with pytest.raises(FloatingPointError, match="first at step 3"):
        book.check_finite()


def test_pending_values_survive_a_checkpoint() -> None:
    book, further, file = Logbook(), Logbook(), io.BytesIO()
    for value in (0.1, 0.2, 1e20):
        book.add("a", value, weight=0.3)
    torch.save(book.state(), file)
    file.seek(0)
    further.restore(torch.load(file, weights_only=True))
    for either in (book, further):
        either.add("a", -1e20, weight=0.3)
        either.add("b", 1.0, weight=1)
    assert further.state() == book.state()
    assert further.reduce() == book.reduce()
    assert further.reduce() == further.state() == {}


def test_a_loss_that_overflows_with_its_weight_is_named() -> None:
    book = Logbook()
    book.begin(3, 0, 2)
    book.add_loss(torch.tensor(1e308, dtype=torch.float64), 100, is_total=False)
    with pytest.raises(FloatingPointError, match="first at step 3"):
        book.reduce()


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


def logged_everywhere(parts: int) -> list[Any]:
    """Log the same 16 micro-batches at any world size, with a checkpoint after the first 8.

    ``parts`` is the world size of the second half; less than there are ranks leaves some idle.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(16, generator=generator) * 10.0 ** torch.arange(-8, 8)
    rank, ranks = distributed.rank(), distributed.world_size()
    book = Logbook()
    found: list[Any] = []

    def log(numbers: range, rank: int, ranks: int) -> None:
        for number in numbers[rank::ranks] if rank < ranks else ():
            book.begin(number, 0, number % 3 + 1)
            book.add_loss(values[number], number % 3 + 1, is_total=False)
            book.add("own", values[number] / 3, weight=float(values[number]) ** 2)
            book.add("sum", values[number])

    log(range(16), rank, ranks)
    found.append(book.reduce())
    log(range(8), rank, ranks)
    state = book.state()
    book = Logbook()
    book.restore(state)
    log(range(8, 16), rank, parts)
    found.append(book.reduce())
    return found


def on_all_and_on_one(world_size: int) -> list[Any]:
    return logged_everywhere(world_size) + logged_everywhere(1)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("world_size", [2, 4])
def test_means_have_the_same_bits_at_any_world_size(world_size: int) -> None:
    expected, *_ = whole = logged_everywhere(1)
    assert whole == [expected] * 2
    for found in on_ranks(world_size, on_all_and_on_one, world_size):
        assert found == [expected] * 4


def test_a_name_that_starts_with_a_slash_stands_by_itself() -> None:
    assert full_names("val", {"loss": 1, "/my_loss": 2}) == {"val/loss": 1, "my_loss": 2}
    assert full_names("val", {"/val/loss": 3, "loss": 1}) == {"val/loss": 3}
