"""Evaluation's parts in one process; the numbers are shown on real ranks elsewhere."""

from typing import NamedTuple

import pytest
import torch
from support import Regression, fit, samples
from torch import nn

from trainer import TaskModule, Trainer
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


def test_a_list_has_one_entry_per_sample_even_if_these_have_as_many():
    assert join([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], [2, 2]) == [[1, 2], [3, 4], [5, 6], [7, 8]]
    with pytest.raises(ValueError, match="predict returned a list for a batch of 3 samples"):
        join([[torch.ones(3), torch.ones(3)]] * 2, [3, 3])


def test_tensors_are_joined_by_sample():
    assert join([torch.ones(2, 3), torch.zeros(1, 3)], [2, 1]).shape == (3, 3)


@pytest.mark.parametrize(
    "parts", [[torch.ones(2), torch.ones(2)], [["a", "b"], ["c", "d"]], [1, 2]]
)
def test_outputs_of_another_length_are_refused(parts):
    with pytest.raises(ValueError, match="for a batch of 2 samples; it must return tensors whose"):
        join(parts, [2, 1])


class Noting(Regression):
    """Notes whether its methods run under autocast."""

    def __init__(self):
        super().__init__()
        self.float()
        self.seen = set()

    def note(self, method):
        self.seen.add((self.run.split, method, torch.is_autocast_enabled("cpu")))

    def loss(self, outputs, batch):
        self.note("loss")
        return super().loss(outputs, batch)

    def build_metrics(self, split):
        from torchmetrics import MeanMetric

        return {"mean": MeanMetric()}

    def update_metrics(self, metrics, outputs, batch):
        self.note("update_metrics")
        assert not outputs.requires_grad
        metrics["mean"].update(outputs)


@pytest.mark.parametrize("global_loss", [False, True])
def test_metrics_are_updated_without_autocast_in_training_and_in_evaluation(global_loss, tmp_path):
    task = Noting()
    task.global_loss = global_loss
    data = samples(4, torch.float32)
    fit(task, tmp_path, train=data, val=data, global_batch_size=4, max_steps=1, precision="bf16")
    expected = [("loss", True), ("update_metrics", False)]
    assert task.seen == {(split, *each) for split in ("train", "val") for each in expected}


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


class Knowing(Regression):
    """Notes which set it is evaluated on, and logs a value under a name of its own."""

    def eval_forward(self, batch):
        self.sets = {*getattr(self, "sets", ()), self.run.evaluated_set}
        self.log("/plain", len(batch[0]))
        return super().eval_forward(batch)


def test_a_task_knows_the_set_it_is_evaluated_on(tmp_path):
    task = Knowing()
    trainer = Trainer(accelerator="cpu", run_dir=str(tmp_path))
    assert trainer.validate(task, val=samples(2))["plain"] == 2
    assert task.sets == {None}
    trainer.validate(task, val={"clean": samples(2), "noisy": samples(3)})
    assert task.sets == {None, "clean", "noisy"}
    assert task.run.evaluated_set is None
