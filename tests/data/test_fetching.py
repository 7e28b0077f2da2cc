"""What datasets draw by chance belongs to the sample, wherever and whenever it is loaded."""

import random

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from trainer.data.batches import evaluation_batches, train_batches
from trainer.data.fetching import Fetch, Request
from trainer.data.loading import LoaderOptions, open_source
from trainer.data.plan import GlobalBatchPlan
from trainer.diagnosis.failures import SampleError


def chance():
    """A number of which each generator has had its say."""
    return [random.random(), float(np.random.rand()), float(torch.rand(())), random.gauss(0, 1)]


def one_to_three(index):
    return index % 3 + 1


class Augmented(Dataset):
    """Samples are (index, random numbers): ``draws(index)`` says how many times it draws."""

    def __init__(self, size=23, draws=one_to_three):
        self.size, self.draws = size, draws
        self.loaded = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.loaded.append(index)
        found = [0.0] * 4
        for _ in range(self.draws(index)):
            found = chance()
        return torch.tensor([index, *found], dtype=torch.float64)


class Together(Augmented):
    """Draws for many samples at once."""

    def __getitems__(self, indices):
        self.loaded += indices
        return [torch.tensor([index, *chance()], dtype=torch.float64) for index in indices]


class Ready(Together):
    def __getitems__(self, indices):
        return default_collate(super().__getitems__(indices))


def mixing_collate(samples):
    """As mix-up does: draws once for the whole micro-batch."""
    batch = default_collate(samples)
    return torch.cat([batch, torch.tensor(chance(), dtype=torch.float64).expand(len(batch), 4)], 1)


class Owning(Augmented):
    """Draws from generators of its own, and from those of what it holds."""

    def __init__(self, size=23, draws=one_to_three):
        super().__init__(size, draws)
        self.rng = np.random.default_rng(0)
        self.held = Own(4)

    def chance(self):
        return [float(self.rng.random()), *self.held.chance()]

    def __getitem__(self, index):
        for _ in range(self.draws(index)):
            found = self.chance()
        return torch.tensor([index, *found], dtype=torch.float64)


class OwningTogether(Owning):
    def __getitems__(self, indices):
        return [torch.tensor([index, *self.chance()], dtype=torch.float64) for index in indices]


class OwningAnew(Owning):
    """Makes new generators in every epoch."""

    def set_epoch(self, epoch):
        self.rng = np.random.default_rng(epoch)
        self.held = Own(epoch)


class Own:
    """Transforms in all but name."""

    def __init__(self, seed):
        self.python = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.legacy = np.random.RandomState(seed)

    def chance(self):
        of_torch = float(torch.rand((), generator=self.torch))
        return [self.python.gauss(0, 1), of_torch, float(self.legacy.randn())]

    def collate(self, samples):
        batch = default_collate(samples)
        drawn = torch.tensor(self.chance(), dtype=torch.float64)
        return torch.cat([batch, drawn.expand(len(batch), 3)], 1)


def options(workers=0, seed=5):
    return LoaderOptions(workers, pin_memory=False, seed=seed, count=len, reproducible=False)


def loaded(play, world_size, data, *, epoch=0, start_step=0, workers=0, seed=5, collate=None):
    """What all ranks load of an epoch, by position: tuples of floats."""
    found = {}
    for rank in range(world_size):
        play(rank, world_size)
        random.seed(rank)  # the state of this process plays no part
        np.random.seed(rank)
        torch.manual_seed(rank)
        batches = train_batches(
            open_source(data, collate, "train"),
            GlobalBatchPlan(7, 2),
            options(workers, seed),
            shuffle=True,
            drop_last=False,
            limit=None,
            overfit=0,
            indices=None,
        )
        for micro in batches.epoch(epoch, start_step):
            if micro.batch is None:
                continue
            torch.rand(rank)  # dropout draws between the micro-batches
            rows = map(tuple, micro.batch.tolist())
            assert [int(i) for i in micro.batch[:, 0]] == list(micro.indices)
            found.update(enumerate(rows, micro.position))
    return found


KINDS = [
    (Augmented, None),
    (Together, None),
    (Ready, None),
    (Augmented, mixing_collate),
    (Together, mixing_collate),
    (lambda: Subset(Augmented(), range(23)), None),
]
OWN = [
    (Owning, None),
    (OwningTogether, None),
    (OwningAnew, None),
    (Augmented, Own(0).collate),
    (lambda: Subset(Owning(), range(23)), Own(0).collate),
]


@pytest.mark.parametrize(("kind", "collate"), KINDS + OWN)
def test_draws_are_the_same_on_any_ranks_and_after_a_resume(play, kind, collate):
    alone = loaded(play, 1, kind(), epoch=1, collate=collate)
    assert list(alone) == list(range(23))
    numbers = [row[1:] for row in alone.values()]
    assert len(set(numbers)) == 23  # no two samples share a stream
    for world_size in (2, 3, 4):
        assert loaded(play, world_size, kind(), epoch=1, collate=collate) == alone
    resumed = loaded(play, 2, kind(), epoch=1, start_step=2, collate=collate)
    assert resumed == {i: row for i, row in alone.items() if i >= 14}


def test_a_collate_function_draws_anew_for_every_micro_batch(play):
    quiet = Augmented(draws=lambda index: 0)
    found = loaded(play, 1, quiet, collate=mixing_collate)
    assert loaded(play, 3, quiet, collate=mixing_collate) == found
    # Of 7 samples and of the last 2, two at a time.
    assert len({row[-4:] for row in found.values()}) == 3 * 4 + 1


def test_a_subset_of_samples_draws_for_each_of_them(play):
    assert loaded(play, 1, Subset(Augmented(), range(23))) == loaded(play, 1, Augmented())


@pytest.mark.parametrize(("kind", "collate"), [KINDS[1], KINDS[3], *OWN[1:4]])
@pytest.mark.parametrize("workers", [1, 2])
def test_draws_are_the_same_in_loader_workers(play, kind, collate, workers):
    alone = loaded(play, 1, kind(), collate=collate)
    assert loaded(play, 2, kind(), workers=workers, collate=collate) == alone


def test_draws_are_the_same_in_workers_that_are_fresh_processes(play):
    data = Together()
    loader = DataLoader(data, 7, num_workers=1, multiprocessing_context="spawn")
    found = loaded(play, 1, loader)
    assert len(found) == 23
    assert found == loaded(play, 1, DataLoader(data, 7))


def test_a_dataset_that_a_sampler_knows_draws_as_without_it(play):
    """The sampler is told of the epoch when the dataset's new generators have been found."""
    data = OwningAnew(draws=lambda index: 1)
    with_sampler, without = (loaded(play, 1, d, epoch=1) for d in (DataLoader(data, 7), data))
    assert [row[1:] for row in with_sampler.values()] == [row[1:] for row in without.values()]


def test_draws_differ_between_epochs_and_seeds(play):
    found = [
        set(loaded(play, 1, Augmented(), **place).values())
        for place in ({}, {"epoch": 1}, {"seed": 6})
    ]
    assert len(set.union(*found)) == 3 * 23


def test_a_sample_that_draws_as_the_only_one_is_noticed(play):
    def rare(index):
        return index == 11

    alone = loaded(play, 1, Augmented(draws=rare))
    assert loaded(play, 3, Augmented(draws=rare)) == alone
    # It draws what it would if all the others did, too.
    everyone = loaded(play, 1, Augmented(draws=lambda index: 1))
    place = next(i for i, row in alone.items() if row[0] == 11)
    assert alone[place] == everyone[place]
    assert sum(any(row[1:]) for row in alone.values()) == 1


def test_samples_are_loaded_once_until_one_draws(play):
    quiet = Augmented(draws=lambda index: 0)
    loaded(play, 1, quiet)
    assert sorted(quiet.loaded) == list(range(23))
    drawing = Augmented()
    loaded(play, 1, drawing)
    # Seen at its first micro-batch, which is loaded again.
    assert drawing.loaded[:2] == drawing.loaded[2:4]
    assert sorted(drawing.loaded[2:]) == list(range(23))


def test_rows_of_tensors_are_taken_without_seeding(play):
    play(0, 1)
    data = TensorDataset(torch.arange(7.0))
    plan = GlobalBatchPlan(7, 2)
    batches = evaluation_batches(open_source(data, None, "val"), plan, options(), limit=None)
    random.seed(0)
    expected = random.random()
    random.seed(0)
    assert len(list(batches.epoch(0))) == 4
    assert random.random() == expected


class OneDevice(TorchFunctionMode):
    """Refuses an index that is not where the tensor is, as CUDA does; counts what is indexed."""

    found = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.index_select:
            tensor, _, index = args
            self.found += 1
            if tensor.device != index.device:
                raise RuntimeError("Expected all tensors to be on the same device")
        assert func is not torch.Tensor.__getitem__ or args[0].is_cpu, "sample by sample"
        return func(*args, **(kwargs or {}))


def rows_of(tensors, indices):
    fetch = Fetch(open_source(TensorDataset(*tensors), None, "train"), 5)
    return fetch[Request(indices, 0, 0, len(indices), True, 0)].batch


def test_rows_of_tensors_on_a_device_are_taken_together():
    there, here = torch.zeros(7, 2, device="meta"), torch.arange(7)
    with OneDevice() as mode:
        batch = rows_of([there, here], [5, 0, 1])
    assert mode.found == 2
    assert (batch[0].shape, batch[0].device) == ((3, 2), there.device)
    assert batch[1].tolist() == [5, 0, 1]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_another_index_than_a_row_is_looked_up_by_itself(device, monkeypatch):
    tensor = torch.arange(12, device=device).view(4, 3)
    assert rows_of([tensor], [-1, 2])[0].shape == (2, 3)
    assert rows_of([tensor], [(0, 1), (2, 2)])[0].shape == (2,)
    with pytest.raises(SampleError, match=r"TensorDataset\[4\] raised IndexError"):
        rows_of([tensor], [0, 4])
    with pytest.raises(SampleError, match=r"TensorDataset\[name\] raised"):
        rows_of([tensor], ["name"])

    def lost(*args):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch.Tensor, "index_select", lost)
    with pytest.raises(RuntimeError, match="CUDA error"):
        rows_of([tensor], [0, 1])


@pytest.mark.parametrize("kind", [Augmented, Together, Owning, OwningAnew])
def test_evaluation_draws_the_same_every_time_and_apart_from_training(play, kind):
    found = []
    for world_size in (1, 3):
        for _ in range(2):
            rows = []
            for rank in range(world_size):
                play(rank, world_size)
                source = open_source(kind(), None, "val")
                batches = evaluation_batches(
                    source, GlobalBatchPlan(7, 2), options(workers=rank == 1), limit=None
                )
                again = [micro.batch.tolist() for micro in batches.epoch(0)]
                assert [micro.batch.tolist() for micro in batches.epoch(0)] == again
                rows += [tuple(row) for batch in again for row in batch]
            found.append(rows)
    assert found[1:] == found[:-1]
    trained = {row[1:] for row in loaded(play, 1, kind()).values()}
    assert trained.isdisjoint(row[1:] for row in found[0])
