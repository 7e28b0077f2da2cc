"""Nested batches: moved, and cut and joined by sample."""

from collections import UserDict
from typing import NamedTuple

import numpy as np
import pytest
import torch

from trainer.trees import detached, has_rows, joined, map_leaves, rows, to_device


class Pair(NamedTuple):
    left: object
    right: object


def test_leaves_are_mapped_and_the_shape_of_the_tree_stays():
    tree = {"a": [1, (2, Pair(3, {"b": 4}))]}
    assert map_leaves(lambda leaf: leaf * 10, tree) == {"a": [10, (20, Pair(30, {"b": 40}))]}


def test_everything_with_a_to_is_moved():
    class Custom:
        def to(self, device):
            return device

    meta = torch.device("meta")
    moved = to_device({"x": torch.ones(2), "y": [Custom(), "text", None]}, meta)
    assert moved["x"].device == meta
    assert moved["y"] == [meta, "text", None]


def test_a_tuple_with_a_to_is_moved_as_a_whole():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    moved = to_device((packed, [packed]), torch.device("meta"))
    for found in (moved[0], moved[1][0]):
        assert isinstance(found, type(packed))
        assert found.data.device.type == "meta"
        assert found.batch_sizes.device.type == "cpu"


def test_detached_tensors_keep_their_place():
    x = torch.ones(2, requires_grad=True)
    found = detached((x * 2, {"y": x * 3}, 5))
    assert not found[0].requires_grad
    assert not found[1]["y"].requires_grad
    assert found[2] == 5


X = torch.arange(8).reshape(4, 2)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (X, X[1:3]),
        ({"x": X, "scale": 7, "name": "all"}, {"x": X[1:3], "scale": 7, "name": "all"}),
        (UserDict(x=X), {"x": X[1:3]}),
        (Pair(X, [X, None]), Pair(X[1:3], [X[1:3], None])),
        ([X, X, X, X], [X[1:3]] * 4),  # four fields, though there are four samples
        ([X, X[0]], [X[1:3], X[0]]),  # what belongs to the whole batch stays
        ((X, ["a", "b", "c", "d"]), (X[1:3], ["b", "c"])),
        ([list("abcd"), list("efgh")], [["b", "c"], ["f", "g"]]),  # two fields of strings
        # One entry per sample, each of a size of its own: images, and what is in them.
        (
            (
                [torch.zeros(3, n) for n in range(4)],
                tuple({"box": torch.ones(n)} for n in range(4)),
            ),
            (
                [torch.zeros(3, 1), torch.zeros(3, 2)],
                ({"box": torch.ones(1)}, {"box": torch.ones(2)}),
            ),
        ),
    ],
)
def test_rows_are_cut_where_the_samples_are(batch, expected):
    found = rows(batch, 4, 1, 3)
    assert type(found) is type(expected)
    torch.testing.assert_close(found, expected) if isinstance(found, torch.Tensor) else None
    assert repr(found) == repr(expected)


def join_leaves(parts, sizes, path):
    return torch.cat(parts) if all(map(has_rows, parts, sizes)) else parts[0]


@pytest.mark.parametrize(
    "batch",
    [
        {"x": X, "scale": 7, "array": np.arange(4)},
        Pair(X, [X, None]),
        [X, X, X, X],
        (X, torch.ones(7), ["a", "b", None, "d"]),
        [X, X, X, torch.tensor(9)],  # a scalar beside rows: four fields
        tuple("abcd"),
        (0, 1, 1, 0),
        ([torch.zeros(3, n) for n in range(4)], tuple({"box": torch.ones(n)} for n in range(4))),
        [torch.ones(2), torch.ones(4), torch.ones(1), torch.ones(3)],  # one of 4 by chance
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_cut_is_joined_again(batch, size):
    starts = range(0, 4, size)
    stops = [min(start + size, 4) for start in starts]
    parts = [rows(batch, 4, start, stop) for start, stop in zip(starts, stops, strict=True)]
    sizes = [stop - start for start, stop in zip(starts, stops, strict=True)]
    found = joined(parts, sizes, join_leaves)
    assert type(found) is type(batch)
    assert repr(found) == repr(batch)


def test_as_many_fields_as_samples_are_fields_if_one_is_the_same_in_all_parts():
    table = torch.ones(7, 2)
    for kind in (list, tuple):
        found = joined([kind((X[:2], table)), kind((X[2:], table))], [2, 2], join_leaves)
        assert type(found) is kind
        assert found[0].equal(X)
        assert found[1] is table


def test_two_samples_of_two_different_fields_are_fields():
    # As long as the batch, but not one entry per sample.
    batch = [{"x": torch.tensor([[1], [2]])}, torch.tensor([5, 6])]
    first, second = rows(batch, 2, 1, 2)
    assert first["x"].tolist() == [[2]]
    assert second.tolist() == [6]


def test_arrays_are_cut():
    assert rows(np.arange(4), 4, 2, 4).tolist() == [2, 3]


def test_what_cannot_be_cut_is_refused_unless_one_rank_has_it_all():
    class Graph:
        pass

    graph = Graph()
    assert rows([graph], 4, 0, 4) == [graph]
    with pytest.raises(ValueError, match="a batch of 4 samples holds a Graph, which cannot be cut"):
        rows([graph, X], 4, 0, 2)
