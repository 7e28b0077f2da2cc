"""What a dataset or sampler holds is found: who wants to know the epoch, and random generators."""

import io
import random
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    default_collate,
)

from trainer.data import held
from trainer.data.held import (
    Generators,
    generator_state,
    kind_of_state,
    sampler_generators,
    set_epoch,
    set_generator_state,
)
from trainer.data.loading import Source
from trainer.seeding import seed_generators

DATASET = TensorDataset(torch.arange(6))


class Epochs:
    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class EpochDataset(Epochs, Dataset):
    pass


class EpochSampler(Epochs, Sampler):
    pass


class Holder(Dataset):
    def __init__(self, **parts):
        vars(self).update(parts)


def test_epochs_reach_everything_that_is_held():
    inner = [EpochDataset() for _ in range(100)]
    many = ConcatDataset.__new__(ConcatDataset)
    many.datasets = inner
    sampler, wrapped, plain = EpochSampler(), EpochSampler(), Epochs()
    by_name = {"a": Subset(EpochDataset(), [0]), "b": [EpochDataset()]}
    root = Holder(many=many, sampler=BatchSampler(sampler, 2, False), plain=plain, by_name=by_name)
    root.ring = root
    set_epoch(root, 3)
    found = [*inner, sampler, plain, by_name["a"].dataset, *by_name["b"]]
    assert [thing.epochs for thing in found] == [[3]] * len(found)

    class Batches:  # no torch class and without set_epoch, but it holds a sampler that has it
        def __init__(self):
            self.sampler = wrapped

    set_epoch(Batches(), 4)
    assert wrapped.epochs == [4]


KINDS = {
    "random": lambda: random.Random(3),
    "legacy": lambda: np.random.RandomState(3),
    "numpy": lambda: np.random.default_rng(3),
    "philox": lambda: np.random.Generator(np.random.Philox(3)),
    "torch": lambda: torch.Generator().manual_seed(3),
}


def draw(generator):
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    if isinstance(generator, random.Random):
        return generator.gauss(0, 1)
    return float(generator.standard_normal())


def look(dataset, collate=default_collate, loader=None):
    return Generators(Source(dataset, collate, loader))


def test_of_a_long_list_the_first_entries_are_looked_at():
    class Counting(list):
        looks = 0

        def __iter__(self):
            for self.looks, entry in enumerate(super().__iter__(), 1):
                yield entry

    samples = Counting(SimpleNamespace() for _ in range(100_000))
    found = look(Holder(samples=samples, deep=Holder(rng=random.Random(1))))
    assert len(found.own) == 1
    assert samples.looks <= 1001


def test_as_many_things_are_looked_at_as_there_is_time_for(monkeypatch):
    monkeypatch.setattr(held, "MOST", 100)
    chain = Holder(rng=random.Random(1))
    for _ in range(50):
        chain = Holder(inner=chain)
    assert len(look(chain).own) == 1
    for _ in range(50):
        chain = Holder(inner=chain)
    assert look(chain).own == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_generator_is_put_at_its_key(kind):
    holder = Holder(rng=KINDS[kind]())
    found = look(holder)
    assert found.own == [holder.rng]

    def stream(key):
        found.seed(key)
        return [draw(holder.rng) for _ in range(3)]

    draw(holder.rng)  # a second Gaussian number may be kept
    first = stream(1)
    assert stream(2) != first
    assert stream(1) == first
    again = Holder(rng=KINDS[kind]())  # in another process
    look(again).seed(1)
    assert draw(again.rng) == first[0]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_generator_goes_on_from_what_a_checkpoint_holds(kind):
    generator, other, file = KINDS[kind](), KINDS[kind](), io.BytesIO()
    draw(generator)  # a second Gaussian number may be kept
    torch.save(generator_state(generator), file)
    expected = [draw(generator) for _ in range(3)]
    file.seek(0)
    state = torch.load(file, weights_only=True)
    set_generator_state(other, state)
    assert [draw(other) for _ in range(3)] == expected
    names = {"random": "random.Random", "legacy": "MT19937", "numpy": "PCG64", "philox": "Philox"}
    assert kind_of_state(state) == names.get(kind, "torch.Generator")


def test_the_global_generators_are_put_there_too():
    look(Holder(rng=random.Random(1))).seed(7)
    numbers = random.random(), np.random.rand(), torch.rand(())
    seed_generators(7)
    assert (random.random(), np.random.rand(), torch.rand(())) == numbers


class Jitter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()


class Collator:
    """Any class."""

    def __init__(self):
        self.rng = random.Random(1)

    def __call__(self, samples):
        return samples

    collate = __call__


@pytest.mark.parametrize(
    ("dataset", "collate"),
    [
        (Subset(Holder(rng=random.Random(1)), [0]), default_collate),
        (Holder(transforms=[Collator()]), default_collate),
        (Holder(transforms={"train": torch.nn.Sequential(Jitter())}), default_collate),
        (Holder(transforms=(Collator().collate,)), default_collate),
        (DATASET, Collator()),
        (DATASET, Collator().collate),
    ],
)
def test_generators_are_found_in_what_a_dataset_or_collate_function_holds(dataset, collate):
    assert len(look(dataset, collate).own) == 1


SHARED = random.Random(1)


class InCode(Dataset):
    rng: ClassVar = random.Random(2)

    def __getitem__(self, index):
        return SHARED.random() + self.rng.random()


def test_code_is_left_alone():
    rng = random.Random(1)
    dataset = InCode()
    dataset.kind, dataset.module = InCode, random
    assert look(Subset(dataset, []), lambda samples: rng.random()).own == []


def test_each_has_a_stream_of_its_own_and_one_that_is_shared_is_one():
    one, other = random.Random(1), random.Random(1)
    image, mask = Holder(rng=one), Holder(rng=one)
    found = look(Holder(image=image, mask=mask, other=other))
    assert len(found.own) == 2
    found.seed(5)
    assert one.random() != other.random()


def test_one_that_was_made_since_is_found_when_asked_again():
    holder = Holder(rng=random.Random(1))
    found = look(holder)
    holder.rng = random.Random(9)
    shard = Holder(rng=random.Random(2))
    assert found.own != [holder.rng]
    found.look(shard)
    assert found.own == [holder.rng, shard.rng]


class Sampled(Sampler):
    """Draws from what it was given, and knows the dataset, as many samplers do."""

    def __init__(self, dataset, rng):
        self.dataset, self.helper = dataset, SimpleNamespace(rng=rng)


def test_what_a_sampler_holds_is_the_samplers():
    shared, own = random.Random(1), random.Random(2)
    inner = Holder(shared=shared, own=own)
    for dataset, known in ((inner, inner), (Subset(inner, [0]), inner)):
        sampler = Sampled(known, shared)
        batched = BatchSampler(sampler, 2, False)
        for how in ({"batch_size": 2, "sampler": sampler}, {"batch_sampler": batched}):
            loader = DataLoader(dataset, **how)
            assert sampler_generators(loader) == [shared]
            assert look(dataset, loader=loader).own == [own]
    generator = torch.Generator()
    loader = DataLoader(DATASET, 2, sampler=RandomSampler(DATASET, generator=generator))
    assert sampler_generators(loader) == [generator]
    assert sampler_generators(DataLoader(DATASET, batch_sampler=[[0, 1], [2]])) == []


def test_the_epoch_of_a_sampler_is_not_told_to_the_dataset():
    """The dataset has been told, and may have made new generators then."""
    sampler = EpochSampler()
    sampler.dataset = EpochDataset()
    set_epoch(DataLoader(sampler.dataset, 2, sampler=sampler), 3)
    assert (sampler.epochs, sampler.dataset.epochs) == ([3], [])


def test_one_that_cannot_be_seeded_is_named(capsys):
    odd = {"own": random.SystemRandom(), "old": np.random.RandomState(np.random.PCG64(1))}
    found = look(Holder(**odd))
    assert found.own == []
    found.seed(1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("note: Holder holds a SystemRandom that no seed reaches")
    assert lines[1].startswith("note: Holder holds a RandomState that no seed reaches")
