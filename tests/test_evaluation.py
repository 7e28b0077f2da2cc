"""Evaluation's parts in one process; the numbers are shown on real ranks elsewhere."""

import pytest
import torch
from support import Regression, fit, samples
from torch import nn

from trainer import TaskModule, Trainer
from trainer.evaluation import evaluating


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
