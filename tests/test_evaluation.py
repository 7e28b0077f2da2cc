"""Evaluation's parts in one process; the numbers are shown on real ranks elsewhere."""

from typing import NamedTuple

import pytest
import torch
from torch import nn

from trainer import TaskModule
from trainer.evaluation import evaluating, join


class Pair(NamedTuple):
    left: object
    right: object


@pytest.mark.parametrize(
    ("parts", "sizes", "expected"),
    [
        ([], [], []),
        ([None, None], [2, 1], None),
        ([["a", "b"], ["c"]], [2, 1], ["a", "b", "c"]),
        ([(["a"], None), (["b"], None)], [1, 1], (["a", "b"], None)),
        (
            [Pair(["a"], {"x": [1]}), Pair(["b"], {"x": [2]})],
            [1, 1],
            Pair(["a", "b"], {"x": [1, 2]}),
        ),
    ],
)
def test_outputs_are_joined_by_their_kind(parts, sizes, expected):
    found = join(parts, sizes)
    assert found == expected
    assert type(found) is type(expected)


def test_tensors_are_joined_by_sample():
    assert join([torch.ones(2, 3), torch.zeros(1, 3)], [2, 1]).shape == (3, 3)


@pytest.mark.parametrize(
    "parts", [[torch.ones(2), torch.ones(2)], [["a", "b"], ["c", "d"]], [1, 2]]
)
def test_outputs_of_another_length_are_refused(parts):
    with pytest.raises(ValueError, match="for a batch of 2 samples; it must return tensors whose"):
        join(parts, [2, 1])


class Task(TaskModule):
    def __init__(self):
        super().__init__()
        self.frozen, self.live = nn.Dropout(), nn.Dropout()
        self.frozen.eval()


def test_everything_is_as_before_after_an_error():
    task = Task()
    run = task.run

    def fail():
        with evaluating(task, "val", None):
            assert not any(module.training for module in task.modules())
            assert not torch.is_grad_enabled()
            assert task.run.split == "val"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (task.training, task.frozen.training, task.live.training) == (True, False, True)
    assert torch.is_grad_enabled()
    assert task.run is run
