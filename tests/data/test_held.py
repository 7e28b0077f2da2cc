"""What a dataset or sampler holds is found: who wants to know the epoch, and random generators."""

import functools
import random
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from trainer.data.held import Generators, generators, set_epoch
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


def test_long_lists_of_samples_are_not_searched():
    class Counting(list):
        looks = 0

        def __iter__(self):
            raise AssertionError("searched to the end")

    set_epoch(Holder(samples=Counting(range(100_000))), 1)


def test_generators_are_found_in_what_holds_them():
    own = torch.Generator()
    sampler = RandomSampler(DATASET, generator=own)
    assert generators(BatchSampler(sampler, 2, False)) == [own]
    assert generators([[0, 1], [2]]) == []
    assert generators(BatchSampler(SequentialSampler(DATASET), 2, False)) == []


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


def look(dataset, collate=default_collate):
    return Generators(dataset, collate)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_generator_is_put_at_its_key(kind):
    holder = Holder(rng=KINDS[kind]())
    found = look(holder)
    assert found

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


def test_the_global_generators_are_put_there_too_but_are_not_its_own():
    shared = Holder(
        parts=[random.random, np.random.rand, np.random.mtrand._rand, torch.default_generator]
    )
    found = look(shared)
    assert not found
    found.seed(7)
    numbers = random.random(), np.random.rand(), torch.rand(())
    seed_generators(7)
    assert (random.random(), np.random.rand(), torch.rand(())) == numbers


@dataclass
class Crop:
    """A transform: any class."""

    rng: random.Random = field(default_factory=lambda: random.Random(1))


class Jitter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()


SHARED = np.random.default_rng(4)


class OfItsClass(Dataset):
    rng: ClassVar = random.Random(2)


class OfItsModule(Dataset):
    def __getitem__(self, index):
        return SHARED.random()


class Collator:
    def __init__(self):
        self.rng = random.Random(1)

    def collate(self, samples):
        return samples


def in_a_closure():
    rng = random.Random(1)
    return lambda samples: rng.random()


@pytest.mark.parametrize(
    ("dataset", "collate"),
    [
        (Subset(Holder(rng=random.Random(1)), [0]), default_collate),
        (Holder(transforms=[Crop()]), default_collate),
        (Holder(transforms={"train": torch.nn.Sequential(Jitter())}), default_collate),
        (Holder(transform=functools.partial(draw, random.Random(1))), default_collate),
        (Holder(draw=np.random.default_rng(1).random), default_collate),
        (Holder(many=[0] * 10 + [random.Random(1)] + [0] * 1000), default_collate),
        (OfItsClass(), default_collate),
        (OfItsModule(), default_collate),
        (DATASET, Collator().collate),
        (DATASET, in_a_closure()),
    ],
)
def test_generators_are_found_wherever_they_are_held(dataset, collate):
    assert look(dataset, collate)


def test_each_has_a_stream_of_its_own_unless_they_start_alike():
    image, mask, other = random.Random(1), random.Random(1), random.Random(2)
    found = look(Holder(image=image, mask=mask, other=other))
    found.seed(5)
    assert image.random() == mask.random() != other.random()
    image.random()  # they belong together for good
    assert not found.look()
    found.seed(6)
    assert image.random() == mask.random()


def test_one_that_was_made_since_is_found_and_draws_as_if_it_had_always_been_there():
    holder = Holder(rng=random.Random(1), late=None)
    found = look(holder)
    assert not found.look()
    holder.rng = random.Random(9)
    assert found.look()
    holder.late = random.Random(9)
    assert found.look()
    found.seed(3)
    drawn = holder.rng.random(), holder.late.random()
    always = Holder(rng=random.Random(1), late=random.Random(2))
    look(always).seed(3)
    assert drawn == (always.rng.random(), always.late.random())


def test_one_that_cannot_be_seeded_is_named(capsys):
    odd = {"own": random.SystemRandom(), "old": np.random.RandomState(np.random.PCG64(1))}
    found = look(Holder(**odd))
    assert not found
    found.seed(1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("note: Holder.own is a SystemRandom that no seed reaches")
    assert lines[1].startswith("note: Holder.old is a RandomState that no seed reaches")
