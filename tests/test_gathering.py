"""How parts of a global batch are joined, in one process; on ranks the same code runs."""

from __future__ import annotations

import re
from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from trainer.gathering import gather

CPU = torch.device("cpu")


class Pair(NamedTuple):
    left: Any
    right: Any


class Attributes(dict[str, Any]):
    extra = "kept"


def joined(parts: list[Any], sizes: list[int], compare: bool = True) -> Any:
    return gather(parts, sizes, CPU, compare=compare).tree


def plain(tree: Any) -> Any:
    """Tensors and arrays as lists, so that trees can be compared."""
    if isinstance(tree, torch.Tensor | np.ndarray):
        return tree.tolist()
    if isinstance(tree, dict | UserDict):
        return {key: plain(value) for key, value in tree.items()}
    return [plain(part) for part in tree] if isinstance(tree, list | tuple) else tree


def rows(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)


@pytest.mark.parametrize(
    ("parts", "sizes", "expected"),
    [
        ([rows(1, 2), rows(3)], [2, 1], [1, 2, 3]),
        ([np.ones((2, 1)), np.zeros((1, 1))], [2, 1], [[1], [1], [0]]),
        ([["a", "b"], ["c"]], [2, 1], ["a", "b", "c"]),
        ([("a", "b"), ("c",)], [2, 1], ["a", "b", "c"]),
        ([["a", None], ["b"]], [2, 1], ["a", None, "b"]),
        # A list of as many fields as samples is still one of fields.
        (
            [[rows(1, 2), rows(3, 4)], [rows(5, 6), rows(7, 8)]],
            [2, 2],
            [[1, 2, 5, 6], [3, 4, 7, 8]],
        ),
        ([[rows(1, 2), torch.tensor(9)], [rows(3, 4), torch.tensor(9)]], [2, 2], [[1, 2, 3, 4], 9]),
        # One tensor per sample, each of its own length, one of them by chance that of the batch.
        ([[rows(1, 2), rows(3)], [rows(4)]], [2, 1], [[1, 2], [3], [4]]),
        ([[{"x": rows(1, 2, 3)}], [{"x": rows(4, 5)}]], [1, 1], [{"x": [1, 2, 3]}, {"x": [4, 5]}]),
        ([(rows(1), ["a"]), (rows(2), ["b"])], [1, 1], [[1, 2], ["a", "b"]]),
        ([torch.ones(3, 3), torch.ones(3, 3)], [2, 2], [[1, 1, 1]] * 3),
        ([{"n": 3, "w": None}, {"n": 3, "w": None}], [2, 1], {"n": 3, "w": None}),
        ([rows(1, 2)], [2], [1, 2]),
    ],
)
def test_parts_are_joined_by_sample(parts, sizes, expected):
    assert plain(joined(parts, sizes)) == expected


@pytest.mark.parametrize("kind", [Attributes, OrderedDict, UserDict])
def test_a_dict_stays_what_it_is(kind):
    found = joined([kind(x=rows(1)), kind(x=rows(2))], [1, 1])
    assert type(found) is kind
    assert found["x"].tolist() == [1, 2]


def test_a_named_tuple_stays_what_it_is():
    found = joined([Pair(rows(1), {"y": ["a"]}), Pair(rows(2), {"y": ["b"]})], [1, 1])
    assert isinstance(found, Pair)
    assert found.right == {"y": ["a", "b"]}


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.complex64]
)
def test_types_of_tensors_stay(dtype):
    found = joined([torch.ones(1, 2).to(dtype), torch.zeros(2, 2).to(dtype)], [1, 2])
    assert found.dtype == dtype
    assert found.shape == (3, 2)


def test_gradients_go_to_every_part():
    parts = [torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)]
    (joined(parts, [2, 1]) * rows(1, 2, 3)).sum().backward()
    assert [part.grad.tolist() for part in parts] == [[1, 2], [3]]


def test_what_belongs_to_all_gets_its_gradient_once():
    scale = torch.tensor(2.0, requires_grad=True)
    found = joined([{"s": scale * 3} for _ in range(2)], [2, 2])
    (found["s"] ** 2).backward()
    assert scale.grad == pytest.approx(2 * 6 * 3 / 2)  # the other part's goes to its own scale


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            [torch.ones(2, 3), torch.ones(1, 4)],
            "is a tensor of shape (2, 3) (float32) and one of (1, 4) (float32) in different micro-"
            "batches; all but the number of samples must be the same: pad to one length",
        ),
        (
            [rows(1.0, 2.0), torch.ones(1, dtype=torch.long)],
            "(2,) (float32) and one of (1,) (int64)",
        ),
        (
            [torch.ones(4, 3), torch.ones(2, 3)],
            "for 2 and 1 samples in different micro-batches; its first dimension must be",
        ),
        (
            [torch.tensor(1.0), torch.tensor(2.0)],
            "a tensor of shape () with different values in different micro-batches; its first",
        ),
        ([1, 2], "is 1 and 2 in different micro-batches; what belongs to the whole batch must be"),
        ([["a", "b"], rows(1)], "is a Tensor and a list in different micro-batches; it must be of"),
        ([{"x": 1}, {"y": 1}], "has the entries x and the entries y in different micro-batches"),
        (
            [(1, 2), (1, 2, 3)],
            "has 2 entries and 3 entries in different micro-batches; it must have",
        ),
        ([object(), object()], "hold a object, which cannot be gathered"),
        (
            [torch.ones(2, 2).to_sparse(), torch.ones(1, 2).to_sparse()],
            "hold a Tensor, which cannot",
        ),
    ],
)
def test_what_cannot_be_joined_is_refused(parts, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        joined(parts, [2, 1])


def test_the_place_is_named():
    with pytest.raises(ValueError, match=re.escape("and outputs['a'][1] is 1 and 2 in")):
        joined([{"outputs": {"a": (0, 1)}}, {"outputs": {"a": (0, 2)}}], [1, 1])


def test_values_are_compared_where_that_is_asked_for():
    found = joined([torch.tensor(1.0), torch.tensor(2.0)], [1, 1], compare=False)
    assert found == 1
    nan = torch.tensor(torch.nan)
    assert joined([nan, nan], [1, 1]).isnan()
