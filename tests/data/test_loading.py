"""The user's data taken apart; what torch's loader is told."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)
from torch.utils.data._utils.pin_memory import pin_memory

from trainer.data.loading import (
    MicroBatch,
    has_state,
    length,
    open_source,
)

DATASET = TensorDataset(torch.arange(6))


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(6)


class Buckets:
    """A batch sampler that is no torch class."""

    def __iter__(self):
        yield [0]
        yield [1, 2, 3]


def own_collate(items):
    return items


def test_a_dataset_gets_the_collate_function_of_the_data_module():
    assert open_source(DATASET, None, "train").collate is default_collate
    assert open_source(DATASET, own_collate, "train").collate is own_collate
    assert open_source([1, 2], None, "train").dataset == [1, 2]
    assert open_source(Stream(), own_collate, "train").collate is own_collate
    assert open_source(Stream(), None, "train").is_stream


def test_a_loader_keeps_its_own():
    loader = DataLoader(DATASET, batch_size=3, collate_fn=own_collate)
    source = open_source(loader, default_collate, "train")
    assert source.dataset is DATASET
    assert source.collate is own_collate
    assert source.batch_size == 3
    assert not source.yields_batches


@pytest.mark.parametrize(
    ("loader", "size", "yields_batches"),
    [
        (DataLoader(Stream(), batch_size=3), 3, False),
        (DataLoader(Stream(), batch_size=None), None, True),
        (DataLoader(DATASET, batch_sampler=Buckets()), None, False),
        (
            DataLoader(DATASET, batch_sampler=BatchSampler(SequentialSampler(DATASET), 4, False)),
            4,
            False,
        ),
    ],
)
def test_the_global_batch_size_of_a_loader(loader, size, yields_batches):
    source = open_source(loader, None, "train")
    assert source.batch_size == size
    assert source.yields_batches == yields_batches


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "the val data is a NoneType; it must be a Dataset"),
        (7, "the val data is a int"),
        ({"a": DATASET}, "the val data is a dict"),
        ("path", "the val data is a str"),
        (
            DataLoader(DATASET, sampler=DistributedSampler(DATASET, 2, 0)),
            "the val DataLoader has a DistributedSampler, which drops the other ranks' samples",
        ),
        (
            DataLoader(
                DATASET, batch_sampler=BatchSampler(DistributedSampler(DATASET, 2, 0), 3, False)
            ),
            "the val DataLoader has a DistributedSampler",
        ),
        (
            DataLoader(DATASET, batch_size=None),
            "the val DataLoader has batch_size=None over an indexed dataset",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        open_source(data, None, "val")


def test_a_distributed_sampler_of_one_replica_is_harmless():
    loader = DataLoader(DATASET, sampler=DistributedSampler(DATASET, 1, 0))
    assert open_source(loader, None, "train").loader is loader


def test_length():
    class Undecided:
        def __len__(self):
            raise NotImplementedError

    assert length([1, 2]) == 2
    assert length(Undecided()) is None
    assert length(Stream()) is None
    assert length(RandomSampler([1, 2, 3])) == 3


class Page:
    """Stands for a tensor, which cannot be pinned without CUDA."""

    def pin_memory(self):
        return "pinned"


def test_only_the_batch_is_pinned():
    indices = range(3)
    micro = MicroBatch([Page(), 1], 3, 0, 0, 3, True, indices)
    for found in (pin_memory(micro), pin_memory([micro])[0]):
        assert found == micro._replace(batch=["pinned", 1])
        assert found.indices is indices


@pytest.mark.parametrize(("kind", "expected"), [("both", True), ("save", False), ("none", False)])
def test_what_can_be_taken_up_again(kind, expected):
    methods = {"both": ["state_dict", "load_state_dict"], "save": ["state_dict"], "none": []}
    thing = type("Thing", (), {name: lambda self: None for name in methods[kind]})()
    assert has_state(thing) == expected
