"""What a user may give as data, and what is refused."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from trainer import DataModule
from trainer.data.module import as_data_module, evaluation_sets, prepare

DATASET = TensorDataset(torch.arange(4))


def test_datasets_given_by_name():
    data = as_data_module(None, train=DATASET, val={"a": DATASET, "b": DATASET}, test=None)
    assert data.train_dataset() is DATASET
    assert evaluation_sets(data, "val") == {"val/a": DATASET, "val/b": DATASET}
    assert evaluation_sets(data, "test") == {}
    assert data.predict_dataset() is None
    assert not data.orders_epochs


def test_a_data_module_is_taken_as_it_is():
    class Own(DataModule):
        def val_dataset(self):
            return DATASET

        def train_indices(self, seed, epoch):
            return [0]

    own = Own()
    assert as_data_module(own) is own
    assert own.orders_epochs
    assert evaluation_sets(own, "val") == {"val": DATASET}
    with pytest.raises(ValueError, match=r"Own defines no train_dataset\(\), which fit needs"):
        own.train_dataset()


@pytest.mark.parametrize(
    ("data", "given", "message"),
    [
        (None, {}, "no data was given; pass a trainer.DataModule, or datasets by name"),
        (None, {"train": None}, "no data was given"),
        (DataModule(), {"val": DATASET}, r"given twice: as a DataModule and by name \(val\)"),
        (DATASET, {}, r"data is a TensorDataset; say what it is for: fit\(task, train="),
        (DataLoader(DATASET), {}, "data is a DataLoader; say what it is for"),
        ([1, 2], {}, "data is a list; it must be a trainer.DataModule"),
    ],
)
def test_mistakes_are_named(data, given, message):
    with pytest.raises(ValueError, match=message):
        as_data_module(data, **given)


def test_missing_training_data_is_named():
    with pytest.raises(ValueError, match=r"call fit\(task, train=dataset\)"):
        as_data_module(None, val=DATASET).train_dataset()


class Prepared(DataModule):
    def __init__(self, change):
        self.kept, self.dropped, self._change = [1], 0, change

    def prepare(self):
        self._change(self)


def test_prepare_may_not_set_attributes():
    prepare(Prepared(lambda data: data.kept.append(2)))
    for change, name in [
        (lambda data: setattr(data, "new", 1), "new"),
        (lambda data: setattr(data, "kept", [1]), "kept"),
        (lambda data: delattr(data, "dropped"), "dropped"),
    ]:
        with pytest.raises(ValueError, match=rf"Prepared.prepare\(\) set {name}; it runs in one"):
            prepare(Prepared(change))
