"""What fit, validate, test and predict set up alike."""

import pytest
import torch
from support import Regression, fit, samples
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from trainer import DataModule, Trainer, distributed
from trainer.config import TrainerConfig
from trainer.data.module import as_data_module
from trainer.session import Session
from trainer.strategies import Strategy


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
        found = session(**options).train_batches()
        assert found[1].global_batch_size == expected
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


def test_a_global_batch_smaller_than_the_world_is_refused(monkeypatch):
    found = session(train=samples(9), global_batch_size=1)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "all_gather_object", lambda value: [value, value])
    with pytest.raises(ValueError, match="global_batch_size=1 is smaller than the world size of 2"):
        found.train_batches()


class Ordered(DataModule):
    def train_dataset(self):
        return samples(8)

    def train_indices(self, seed, epoch):
        return range(7)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(samples(8))


class Growing(BatchSampler):
    """Has a batch size and does not keep to it."""

    def __iter__(self):
        return iter([[0], [1, 2]])


def loader(**options):
    return DataLoader(samples(9), **options)


@pytest.mark.parametrize(
    ("data", "options", "expected"),
    [
        (samples(8), {}, True),
        (samples(9), {}, False),
        (samples(9), {"drop_last": True}, True),
        (Ordered(), {}, False),
        (Ordered(), {"drop_last": True}, True),
        (Stream(), {"drop_last": True}, False),
        (loader(batch_size=4), {"drop_last": True}, False),
        (loader(batch_size=4, drop_last=True), {}, True),
        (loader(batch_sampler=BatchSampler(range(7), 4, drop_last=True)), {}, True),
        (loader(batch_sampler=Growing(range(7), 4, drop_last=True)), {}, False),
    ],
)
def test_a_strategy_learns_whether_every_global_batch_is_full(data, options, expected):
    class Asking(Strategy):
        def check(self, plan, device, always_full):
            self.found = plan.global_batch_size, device.type, always_full

    strategy = Asking()
    if not isinstance(data, DataLoader):
        options = {"global_batch_size": 4, **options}
    given = {"data": data} if isinstance(data, DataModule) else {"train": data}
    found = session(**given, **options)
    found.train_batches()
    found.check_strategy(strategy)
    assert strategy.found == (4, "cpu", expected)


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
