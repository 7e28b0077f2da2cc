"""What fit, validate, test and predict set up alike."""

import pytest
import torch
from support import Regression, fit, samples
from torch.utils.data import DataLoader

from trainer import DataModule, Trainer, distributed
from trainer.config import TrainerConfig
from trainer.data.module import as_data_module
from trainer.session import Session


def session(task=None, data=None, *, train=None, **options):
    config = TrainerConfig.from_options({"accelerator": "cpu", **options})
    return Session(config, task or Regression(), as_data_module(data, train=train))


def test_the_global_batch_size_comes_from_the_option_the_loader_or_the_default():
    loader = DataLoader(samples(9), batch_size=5)
    for options, expected in [
        ({"train": samples(9)}, 128),
        ({"train": samples(9), "global_batch_size": 4}, 4),
        ({"train": loader}, 5),
    ]:
        assert session(**options).train_batches()[1].global_batch_size == expected
    with pytest.raises(
        ValueError, match="global_batch_size=4 is given, and the training data is a "
    ):
        session(train=loader, global_batch_size=4).train_batches()


class TwoSets(DataModule):
    def val_dataset(self):
        return {"a": samples(9), "b": DataLoader(samples(9), batch_size=2)}


def test_evaluation_sets_by_prefix_with_their_sizes():
    sets = session(data=TwoSets(), limit_val_batches=2, global_batch_size=3).evaluation_sets("val")
    counts = {
        prefix: [micro.num_samples for micro in found.batches.epoch(0)]
        for prefix, found in sets.items()
    }
    assert counts == {"val/a": [3, 3], "val/b": [2, 2]}
    once = session(data=TwoSets()).evaluation_sets("val", limit=1)
    assert [m.num_samples for m in once["val/b"].batches.epoch(0)] == [2]


def test_metrics_are_checked():
    class Wrong(Regression):
        def build_metrics(self, split):
            return {split: len}

    with pytest.raises(ValueError, match="returned a builtin_function_or_method for 'train'"):
        session(Wrong(), train=samples(9)).train_metrics()


def test_missing_training_data_ends_a_fit(tmp_path):
    with pytest.raises(ValueError, match=r"defines no train_dataset\(\), which fit needs"):
        fit(Regression(), tmp_path, train=None, val=samples(3), max_epochs=1)


def test_synchronised_batch_norm_is_refused_on_the_cpu():
    with pytest.raises(ValueError, match="sync_batchnorm=true"):
        session(train=samples(9), sync_batchnorm=True).train_batches()


@pytest.mark.parametrize(
    ("world_size", "options", "message"),
    [
        (2, {"static_graph": True, "micro_batch_size": 1}, r"static_graph=true with 2 micro-batch"),
        (2, {"global_batch_size": 1}, "global_batch_size=1 is smaller than the world size of 2"),
        (1, {"static_graph": True, "micro_batch_size": 1}, None),
        (2, {"static_graph": True}, None),
    ],
)
def test_sizes_that_cannot_work_are_refused(monkeypatch, world_size, options, message):
    found = session(train=samples(9), **{"global_batch_size": 4, **options})
    monkeypatch.setattr(distributed, "world_size", lambda: world_size)
    if message is None:
        found.train_batches()
    else:
        with pytest.raises(ValueError, match=message):
            found.train_batches()


def test_prepare_that_sets_attributes_ends_every_kind_of_run():
    class Setting(TwoSets):
        def prepare(self):
            self.rows = 3

    with pytest.raises(ValueError, match=r"Setting.prepare\(\) set rows"):
        Trainer(accelerator="cpu").validate(Regression(), Setting())


def test_a_task_keeps_no_facts_of_a_run(tmp_path):
    task = Regression()
    facts = task.run
    fit(task, tmp_path, train=samples(4), max_epochs=1)
    assert task.run == facts
    with pytest.raises(ValueError, match="there is no test data"):
        Trainer(accelerator="cpu").test(task, TwoSets())
    assert task.run == facts
    assert torch.is_grad_enabled()
