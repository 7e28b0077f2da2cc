"""Datasets with indices: which samples are loaded for what, and by which calls."""

import copy
import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import Regression, fit, samples
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, get_worker_info

from trainer.data import orders
from trainer.data.batches import evaluation_batches, train_batches
from trainer.data.fetching import plain
from trainer.data.loading import LoaderOptions, open_source
from trainer.data.plan import GlobalBatchPlan, epoch_order


class Items(Dataset):
    """Yields its indices, and may fail."""

    def __init__(self, size, bad=()):
        self.size, self.bad = size, bad

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index in self.bad:
            raise KeyError(f"no file {index}")
        return index


class Batched(Items):
    """Fetches many items at once."""

    def __getitem__(self, index):
        raise AssertionError("one by one")

    def __getitems__(self, indices):
        assert type(indices) is list
        for index in indices:
            super().__getitem__(index)
        return list(indices)


class Ready(Batched):
    """Collates what it fetches."""

    def __getitems__(self, indices):
        return torch.tensor(super().__getitems__(indices)) + 100


class Picky(Items):
    def __getitems__(self, indices):
        if len(indices) > 1:
            raise OSError("too many at once")
        return indices


def options(num_workers=0):
    return LoaderOptions(num_workers, pin_memory=False, seed=5, count=len, reproducible=False)


def training(data, size=4, micro=None, *, workers=0, collate=None, **changes):
    source = open_source(data, collate, "train")
    plan = GlobalBatchPlan(size if source.loader is None else source.batch_size, micro)
    own = {"shuffle": False, "drop_last": False, "limit": None, "overfit": 0, "indices": None}
    return train_batches(source, plan, options(workers), **{**own, **changes})


def evaluation(data, size=4, micro=None, limit=None):
    source = open_source(data, None, "val")
    return evaluation_batches(source, GlobalBatchPlan(size, micro), options(), limit=limit)


def contents(batches, epoch=0, start_step=0):
    return [
        None if micro.batch is None else micro.batch.tolist()
        for micro in batches.epoch(epoch, start_step)
    ]


def test_micro_batches_say_what_they_are(play):
    play(1, 2)
    found = list(training(Items(7), size=5, micro=2).epoch(0))
    assert [tuple(m[1:]) for m in found] == [
        # samples, position, number, samples in the global batch, last one, indices
        (1, 4, 2, 5, True, [4]),
        (0, 5, 0, 2, True, ()),
    ]
    assert found[0].batch.tolist() == [4]
    assert found[1].batch is None


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_positions_are_the_same_at_every_world_size(play, world_size):
    steps = {}
    for rank in range(world_size):
        play(rank, world_size)
        batches = training(Items(23), size=6, micro=2, shuffle=True)
        assert batches.steps_per_epoch == 4
        step = 0
        for micro in batches.epoch(3):
            steps.setdefault(step, []).extend([] if micro.batch is None else micro.batch.tolist())
            step += micro.is_last
        assert step == 4
    expected = epoch_order(23, 5, 3, shuffle=True).tolist()
    assert steps == {i: expected[i * 6 : i * 6 + 6] for i in range(4)}


def test_an_epoch_can_start_at_any_step():
    batches = training(Items(11), shuffle=True)
    assert contents(batches, 1, start_step=1) == contents(batches, 1)[1:]
    assert [m.position for m in batches.epoch(1, 2)] == [8]


def test_limits_and_drop_last():
    assert contents(training(Items(10), drop_last=True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    limited = training(Items(10), limit=1)
    assert (limited.steps_per_epoch, contents(limited)) == (1, [[0, 1, 2, 3]])
    overfit = training(Items(10), overfit=2, shuffle=True)
    assert contents(overfit, 0) == contents(overfit, 5) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_train_indices_replace_the_shuffle():
    def indices(seed, epoch):
        return torch.tensor([9, 9, epoch, seed, 0])

    batches = training(Items(10), size=3, shuffle=True, indices=indices)
    assert batches.steps_per_epoch == 2
    assert contents(batches, 2) == [[9, 9, 2], [5, 0]]

    growing = training(Items(10), indices=lambda seed, epoch: range(3 + epoch))
    with pytest.raises(ValueError, match=r"epoch=1\) returned 4 indices, but 3 for epoch 0"):
        list(growing.epoch(1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: training(Items(0)), "the training set is empty: its length is 0"),
        (lambda: training(DataLoader(Items(0))), "the training set is empty"),
        (
            lambda: training(Items(3), drop_last=True),
            "no global batch: the training set has 3 samples, with global_batch_size=4 and "
            "drop_last=True; lower global_batch_size to at most 3",
        ),
        (
            lambda: training(Items(3), indices=lambda seed, epoch: []),
            r"train_indices\(seed, epoch=0\) returned 0 samples",
        ),
        (
            lambda: training(DataLoader(Items(3), batch_size=4, drop_last=True)),
            "the training DataLoader yields no batch: 3 samples, batch_size=4, drop_last=True",
        ),
    ],
)
def test_too_little_data_is_an_error(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("kind", [Items, Batched, Ready])
def test_items_are_fetched_together_where_the_dataset_can(kind):
    offset = 100 if kind is Ready else 0
    expected = [[i + offset for i in part] for part in ([0, 1, 2, 3], [4, 5])]
    assert contents(training(kind(6))) == expected
    assert contents(evaluation(kind(6))) == expected


def test_the_collate_function_is_used():
    batches = training(Items(3), collate=lambda items: ("own", items))
    assert [micro.batch for micro in batches.epoch(0)] == [("own", [0, 1, 2])]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Items, Batched])
def test_an_item_that_raises_is_named(kind, workers):
    batches = training(kind(6, bad=[4]), workers=workers)
    with pytest.raises(ValueError, match=rf"{kind.__name__}\[4\] raised KeyError: 'no file 4'; "):
        list(batches.epoch(0))
    if workers:  # left to the garbage collector, torch waits for 5 s
        batches._loader._iterator._shutdown_workers()


def test_items_that_only_fail_together_are_named():
    with pytest.raises(ValueError, match=r"OSError: too many at once for the indices \[0, 1\], "):
        list(training(Picky(2)).epoch(0))


def test_a_loaders_batches_are_the_global_batches():
    loader = DataLoader(
        Items(10),
        batch_size=4,
        sampler=[3, 1, 4, 1, 5, 9],
        collate_fn=lambda b: torch.tensor(b) * 2,
    )
    batches = training(loader, micro=3)
    assert batches.steps_per_epoch == 2
    assert contents(batches) == [[6, 2, 8], [2], [10, 18]]


class Varying:
    """Batches of different sizes, in an order that follows the epoch; counts its iterations."""

    def __init__(self, sizes=(3, 1, 0, 2), length=None):
        self.sizes, self.iterations, self.epoch, self.length = sizes, 0, 0, length

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.iterations += 1
        for size in self.sizes:
            yield torch.arange(size) + self.epoch


class Sized(Varying):
    def __len__(self):
        return self.length


def test_a_batch_sampler_of_varying_sizes_is_iterated_once_per_epoch():
    sampler = Varying()
    batches = training(DataLoader(Items(9), batch_sampler=sampler), micro=2)
    assert batches.steps_per_epoch is None
    # The empty batch is no step.
    assert contents(batches, 0) == [[0, 1], [2], [0], [0, 1]]
    assert contents(batches, 4) == [[4, 5], [6], [4], [4, 5]]
    assert sampler.iterations == 2


def test_an_endless_batch_sampler_is_read_as_far_as_needed():
    class Endless(Varying):
        def __iter__(self):
            for number in itertools.count():
                yield [number % 9, (number + 1) % 9]

    batches = training(DataLoader(Items(9), batch_sampler=Endless()))
    found = list(itertools.islice(batches.epoch(0), 1000))
    assert [m.batch.tolist() for m in found] == [[i % 9, (i + 1) % 9] for i in range(1000)]
    limited = training(DataLoader(Items(9), batch_sampler=Endless()), limit=3)
    assert limited.steps_per_epoch == len(contents(limited)) == 3


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 9])
def test_many_batches_travel_in_chunks(monkeypatch, count, workers):
    monkeypatch.setattr(orders, "SHARED_BATCHES", 4)
    sampler = [[i % 9] for i in range(count + 1)]
    batches = training(DataLoader(Items(9), batch_sampler=sampler, num_workers=workers))
    assert contents(batches) == sampler
    assert contents(batches, 0, start_step=count) == sampler[count:]


def test_a_batch_sampler_with_a_wrong_length_is_refused():
    loader = DataLoader(Items(9), batch_sampler=Sized((1, 1, 1), length=2))
    with pytest.raises(ValueError, match=r"yields more batches than the 2 that its len\(\) says"):
        list(training(loader).epoch(0))
    # With a limit the rest is of no interest.
    assert contents(training(loader, limit=2)) == [[0], [0]]


def test_overfitting_repeats_the_batches_that_a_random_sampler_drew():
    loader = DataLoader(Items(100), batch_size=4, shuffle=True)
    batches = training(loader, overfit=2)
    first = contents(batches)
    assert contents(batches, 1) == first
    assert sorted(map(len, first)) == [4, 4]


def test_an_index_may_be_a_key():
    class ByName(Dataset):
        def __getitem__(self, name):
            return len(name)

    loader = DataLoader(ByName(), batch_sampler=[["one", "three"], ["seven"]])
    assert contents(training(loader)) == [[3, 5], [5]]
    assert contents(evaluation(loader)) == [[3, 5], [5]]


class Epochs(Items):
    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return self.epoch


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_reach_a_dataset_in_workers_that_live_on(workers):
    batches = training(Epochs(3), size=1, workers=workers)
    for epoch in (0, 1, 5):
        assert contents(batches, epoch) == [[epoch]] * 3


def test_workers_know_the_users_dataset():
    class Opened(Items):
        def __getitem__(self, index):
            info = get_worker_info()
            assert info.dataset is self
            return 10 * self.number + info.num_workers

    def open_in_worker(number):
        get_worker_info().dataset.number = number + 1

    loader = DataLoader(Opened(4), num_workers=2, worker_init_fn=open_in_worker)
    assert contents(training(loader)) == [[12], [22], [12], [22]]


@pytest.mark.parametrize("size", range(18))
def test_evaluation_is_cut_into_blocks_in_order(play, size):
    shuffled = DataLoader(Items(size), batch_sampler=list(BatchSampler(range(size), 5, False)))
    for world_size, data in itertools.product((1, 2, 3, 4), (Items(size), shuffled)):
        found = []
        for rank in range(world_size):
            if data is shuffled and rank:
                break  # needs a collective: shown on real ranks
            play(rank, 1 if data is shuffled else world_size)
            found += list(evaluation(data, micro=3).epoch(0))
        assert [i for m in found for i in m.batch.tolist()] == list(range(size))
        assert [i for m in found for i in range(m.position, m.position + m.num_samples)] == list(
            range(size)
        )


def test_evaluation_limits_count_global_batches(play):
    assert contents(evaluation(Items(10), limit=2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    loader = DataLoader(Items(10), sampler=SequentialSampler(range(10)), batch_size=3)
    assert contents(evaluation(loader, size=3, limit=2)) == [[0, 1, 2], [3, 4, 5]]
    play(1, 2)
    assert contents(evaluation(Items(10), limit=1)) == [[2, 3]]


def test_an_error_in_collating_names_the_samples_and_ends_nothing_silently(tmp_path: Path) -> None:
    def stopping(batch: list[Any]) -> Any:
        return next(iter(()))

    loader = DataLoader(samples(4), batch_size=2, collate_fn=stopping)
    with pytest.raises(ValueError, match=r"collating the samples \[0, 1\] raised StopIteration"):
        fit(Regression(), tmp_path, train=loader, max_epochs=1)

    def no_room(batch: list[Any]) -> Any:
        raise RuntimeError("unable to write to file </torch_1>: unable to allocate shared memory")

    loader = DataLoader(samples(4), batch_size=2, collate_fn=no_room)
    with pytest.raises(ValueError, match=r"/dev/shm: make it larger .* or use fewer num_workers"):
        fit(Regression(), tmp_path, train=loader, max_epochs=1)


def test_a_resumed_epoch_loads_nothing_that_is_done():
    class Lookups(Items):
        def __init__(self, size):
            super().__init__(size)
            self.fetched = []

        def __getitem__(self, index):
            self.fetched.append(index)
            return index

    for make in (
        lambda data: training(data, shuffle=True),
        lambda data: training(DataLoader(data, 4, sampler=list(range(999, -1, -1)))),
    ):
        data = Lookups(1000)
        expected = contents(make(data), 1)
        data.fetched.clear()
        assert contents(make(data), 1, start_step=248) == expected[248:]
        assert data.fetched == [i for step in expected[248:] for i in step]


def test_requests_are_what_an_epoch_loads(play):
    for rank in (0, 1):
        play(rank, 2)
        batches = training(Items(11), size=5, micro=2, shuffle=True)
        for start in (0, 2):
            requests = list(batches.requests(1, start))
            found = list(batches.epoch(1, start))
            assert [(plain(request.indices), *request[1:5]) for request in requests] == [
                (plain(micro.indices), *micro[2:6]) for micro in found
            ]
            assert [batches.fetch(request).num_samples for request in requests] == [
                micro.num_samples for micro in found
            ]


def test_requests_follow_a_users_sampler(monkeypatch):
    monkeypatch.setattr(orders, "SHARED_BATCHES", 2)
    batches = training(DataLoader(Items(9), batch_sampler=Varying((3, 1, 2, 2, 1, 3, 2))), micro=2)
    asked = [(list(r.indices), r.position) for r in batches.requests(2)]
    assert asked == [(m.batch.tolist(), m.position) for m in batches.epoch(2)]


def test_positions_count_the_samples_of_varying_batches():
    def make():
        return training(DataLoader(Items(9), batch_sampler=Varying((3, 1, 0, 2, 4))), micro=2)

    found = [(m.position, m.batch.tolist()) for m in make().epoch(0)]
    assert [position for position, _ in found] == [0, 2, 3, 4, 6, 8]
    assert [(m.position, m.batch.tolist()) for m in make().epoch(0, 2)] == found[3:]


class DrawsAsItGoes:
    """A sampler that draws from every global generator, an index at a time."""

    def __iter__(self):
        for _ in range(24):
            found = random.random() + np.random.rand() + float(torch.rand(()))
            yield int(found * 30) % 9


@pytest.mark.parametrize("overfit", [0, 2])
def test_what_a_users_sampler_draws_is_its_own(monkeypatch, overfit):
    monkeypatch.setattr(orders, "SHARED_BATCHES", 2)

    def make(**own):
        return training(DataLoader(Items(9), 2, sampler=DrawsAsItGoes()), overfit=overfit, **own)

    def drawn(batches, epoch, start_step=0):
        found = []
        for micro in batches.epoch(epoch, start_step):
            found.append(micro.batch.tolist())
            random.seed(len(found))  # as the forward of a micro-batch does
            np.random.seed(len(found))
            torch.manual_seed(len(found))
        return found

    alone = make()
    epochs = [drawn(alone, epoch) for epoch in (0, 1)]
    assert (epochs[0] == epochs[1]) == (overfit > 0)
    assert [len(epoch) for epoch in epochs] == [overfit or 12] * 2
    assert drawn(make(), 1) == epochs[1]
    assert drawn(make(), 1, start_step=1) == epochs[1][1:]
    random.seed(7)
    expected = random.random()
    random.seed(7)
    list(make().requests(0))
    assert random.random() == expected


class Shuffled:
    """A sampler that draws the order of each epoch from one generator."""

    def __init__(self, generator):
        self.generator = generator

    def __iter__(self):
        if isinstance(self.generator, random.Random):
            return iter(self.generator.sample(range(23), 23))
        return iter(self.generator.permutation(23))


GENERATORS = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "numpy": lambda: np.random.default_rng(3),
    "legacy": lambda: np.random.RandomState(3),
    "random": lambda: random.Random(3),
}


def shuffled(kind):
    """A loader whose sampler draws from a generator of its own."""
    own = GENERATORS[kind]()
    if kind == "torch":
        return DataLoader(Items(23), 4, shuffle=True, generator=own)
    return DataLoader(Items(23), 4, sampler=Shuffled(own))


@pytest.mark.parametrize("kind", GENERATORS)
def test_the_generator_of_a_users_sampler_goes_on(kind):
    def make():
        return training(shuffled(kind))

    alone = make()
    epochs = []
    states = {}
    for epoch in range(3):
        epochs.append([])
        for step, micro in enumerate(alone.epoch(epoch), 1):
            epochs[-1].append(micro.batch.tolist())
            states[epoch, step] = copy.deepcopy(alone.state_dict())
    assert epochs[0] != epochs[1] != epochs[2]
    for place in ((0, 1), (1, 3), (1, 6)):
        resumed = make()
        resumed.load_state_dict(states[place])
        epoch, step = place
        if step == 6:  # at an epoch's end the next one starts
            assert contents(resumed, 2) == epochs[2]
        else:
            assert contents(resumed, epoch, step) == epochs[epoch][step:]
            assert contents(resumed, epoch + 1) == epochs[epoch + 1]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_generator_that_dataset_and_sampler_share_is_the_samplers(workers):
    """If it were seeded where samples are loaded, the order would follow from who loads them."""

    def order(is_shared):
        own, data = torch.Generator().manual_seed(3), Items(16)
        if is_shared:
            data.generator = own
        loader = DataLoader(data, 4, shuffle=True, generator=own, num_workers=workers)
        batches = training(loader)
        return [contents(batches, epoch) for epoch in (0, 1)]

    assert order(is_shared=True) == order(is_shared=False)


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("overfit", [0, 2])
def test_a_loader_is_left_as_it_was(overfit, kind):
    loader = shuffled(kind)
    orders = []
    for _ in range(2):
        batches = training(loader, overfit=overfit)
        orders.append([contents(batches, epoch) for epoch in (0, 1)])
        batches.close()
    assert orders[0] == orders[1]
    evaluated = [contents(evaluation(loader, limit=2), 0) for _ in range(2)]
    assert evaluated[0] == evaluated[1]


def test_a_sampler_with_other_generators_is_refused():
    batches = training(shuffled("torch"))
    list(batches.epoch(0))
    for loader, here in (
        (DataLoader(Items(23), 4), r"\[\]"),
        (shuffled("numpy"), r"\[PCG64\]"),
    ):
        message = rf"holds the random generators {here}, .*has the state of \[torch.Generator\]"
        with pytest.raises(ValueError, match=message):
            training(loader).load_state_dict(batches.state_dict())
    assert training(Items(9)).state_dict() == {}


def test_a_checkpoint_without_the_state_of_a_samplers_generators_is_said(capsys):
    """As one from before these of NumPy and Python were kept."""
    for kind, place, is_said in (
        ("numpy", (0, 0), False),
        ("numpy", (1, 2), True),
        ("numpy", (1, 0), True),
    ):
        list(training(shuffled(kind)).epoch(*place))
        assert ("samples may come twice or never" in capsys.readouterr().out) == is_said
    list(training(DataLoader(Items(9), 4)).epoch(1, 1))
    assert not capsys.readouterr().out


def test_order_facts_tell_the_number_of_samples():
    assert training(Items(9)).order_facts() == {"num_samples": 9}
    assert training(DataLoader(Items(9))).order_facts() == {"num_samples": 9}
