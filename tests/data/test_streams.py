"""Iterable datasets: cut by position, over ranks and loader workers.

A rank is played by this process: cutting by position needs no collective.
"""

import copy
import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from trainer import distributed
from trainer.data.batches import evaluation_batches
from trainer.data.loading import LoaderOptions, open_source
from trainer.data.plan import GlobalBatchPlan
from trainer.data.streams import stream_batches


class Numbers(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


class Announced(Numbers):
    def __len__(self):
        return 7


class SplitsItself(Numbers):
    """As torch's pages show it: each loader worker reads its own part."""

    def __iter__(self):
        info = get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(number, self.count, count))


class BySeed(Numbers):
    """Shuffles by the seed of its worker."""

    def __iter__(self):
        rng = np.random.default_rng(get_worker_info().seed)
        return iter(rng.permutation(self.count).tolist())


class Chance(Numbers):
    """Shuffles with every global generator, as it goes."""

    def __iter__(self):
        for number in torch.randperm(self.count).tolist():
            yield number * 10_000 + random.randrange(100) * 100 + np.random.randint(100)


class Owning(Numbers):
    """Likewise, with generators of its own, which a process may have to itself."""

    def __init__(self, count):
        super().__init__(count)
        self.rng, self.held = np.random.default_rng(), [random.Random()]

    def __iter__(self):
        for number in self.rng.permutation(self.count).tolist():
            yield number * 10_000 + self.held[0].randrange(100) * 100 + self.rng.integers(100)


class Epochs(Numbers):
    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([self.epoch] * self.count)


def stream(data, size=4, micro=None, *, workers=0, drop_last=False, limit=None):
    source = open_source(data, None, "train")
    plan = GlobalBatchPlan(size if source.loader is None else source.batch_size, micro)
    options = LoaderOptions(workers, pin_memory=False, seed=5, count=len, reproducible=False)
    return stream_batches(source, plan, options, drop_last=drop_last, limit=limit)


def steps(batches, epoch=0, start_step=0):
    """The samples of each global batch."""
    found = [[]]
    for micro in batches.epoch(epoch, start_step):
        assert (micro.batch is None) == (micro.num_samples == 0)
        found[-1] += [] if micro.batch is None else micro.batch.tolist()
        if micro.is_last:
            found.append([])
    return found[:-1]


def over_ranks(play, world_size, make, epoch=0):
    """The samples of each global batch, over all ranks in order."""
    every = []
    for rank in range(world_size):
        play(rank, world_size)
        every.append(steps(make(), epoch))
    return [[i for part in parts for i in part] for parts in zip(*every, strict=True)]


def split(count, size):
    return [list(range(count))[i : i + size] for i in range(0, count, size)]


@pytest.mark.parametrize("count", range(18))
def test_every_sample_is_in_one_place(play, count):
    for world_size in (1, 2, 3, 4):
        found = over_ranks(play, world_size, lambda: stream(Numbers(count), 5, 2))
        assert found == split(count, 5)


@pytest.mark.parametrize("kind", [Numbers, SplitsItself])
@pytest.mark.parametrize("workers", [1, 2])
def test_loader_workers_change_nothing(play, kind, workers):
    assert over_ranks(play, 2, lambda: stream(kind(11), workers=workers)) == split(11, 4)


def test_workers_of_a_stream_can_be_fresh_processes(play):
    batches = stream(DataLoader(Numbers(5), 4, num_workers=1, multiprocessing_context="spawn"))
    assert steps(batches) == [[0, 1, 2, 3], [4]]


def test_a_worker_init_function_that_splits_changes_nothing(play):
    def split_stream(worker_id):
        info = get_worker_info()
        part = info.dataset.count // info.num_workers
        info.dataset.count = part

    def make():
        return stream(
            DataLoader(Numbers(11), batch_size=4, num_workers=2, worker_init_fn=split_stream)
        )

    assert over_ranks(play, 2, make) == split(11, 4)


def test_the_seed_of_a_worker_is_the_same_in_all_of_them(play):
    found = [over_ranks(play, 2, lambda: stream(BySeed(11), workers=2), epoch) for epoch in (0, 1)]
    assert [sorted(i for step in epoch for i in step) for epoch in found] == [list(range(11))] * 2
    assert found[0] != found[1]


@pytest.mark.parametrize("kind", [Chance, Owning])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_shuffles_by_chance_is_the_same_everywhere(play, workers, kind):
    made = {}

    def make():
        rank = distributed.rank()
        if rank not in made:
            made[rank] = stream(kind(11), workers=workers)
        torch.manual_seed(rank)  # as dropout leaves it: different on every rank
        random.seed(rank)
        np.random.seed(rank)
        return made[rank]

    epochs = [over_ranks(play, 2, make, epoch) for epoch in (0, 1)]
    for found in epochs:
        assert sorted(i // 10_000 for step in found for i in step) == list(range(11))
    assert epochs[0] != epochs[1]
    assert over_ranks(play, 2, make, 0) == epochs[0]
    play(0, 1)
    assert steps(stream(kind(11)), 1) == epochs[1]


def test_micro_batches_say_what_they_are(play):
    play(1, 2)
    assert [tuple(m[1:]) for m in stream(Numbers(7), 5, 2).epoch(0)] == [
        (1, 4, 2, 5, True, ()),
        (0, 5, 0, 2, True, ()),
    ]


def test_length_and_limits():
    unknown = stream(Numbers(7))
    assert (unknown.steps_per_epoch, steps(unknown)) == (None, split(7, 4))
    assert steps(unknown, start_step=1) == [[4, 5, 6]]
    assert stream(Announced(7)).steps_per_epoch == 2
    assert stream(Announced(7), drop_last=True).steps_per_epoch == 1
    assert steps(stream(Announced(7))) == split(7, 4)
    dropped = stream(Numbers(7), drop_last=True, workers=1)
    assert steps(dropped) == [[0, 1, 2, 3]]
    limited = stream(Numbers(10**9), limit=2)
    assert (limited.steps_per_epoch, steps(limited)) == (2, split(8, 4))
    assert stream(Announced(7), limit=9).steps_per_epoch == 2


def test_a_wrong_length_is_refused():
    with pytest.raises(ValueError, match=r"Announced yields more samples than the 7 that its len"):
        steps(stream(Announced(9)))
    # Fewer are no harm: the end of the data ends the epoch.
    assert steps(stream(Announced(3))) == [[0, 1, 2]]


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_reach_a_stream(workers):
    batches = stream(Epochs(5), workers=workers)
    for epoch in (0, 3):
        assert steps(batches, epoch) == [[epoch] * 4, [epoch]]


def test_a_loader_keeps_its_batch_size_and_collate_function(play):
    def make():
        return stream(
            DataLoader(Numbers(7), batch_size=3, collate_fn=lambda b: torch.tensor(b) * 2)
        )

    assert over_ranks(play, 2, make) == [[0, 2, 4], [6, 8, 10], [12]]


class ReadyBatches(IterableDataset):
    def __iter__(self):
        for size in (5, 1, 0, 3):
            yield torch.arange(size)


@pytest.mark.parametrize("workers", [0, 2])
def test_ready_batches_are_cut_by_rows(play, workers):
    def make(**own):
        return lambda: stream(
            DataLoader(ReadyBatches(), batch_size=None, num_workers=workers, **own)
        )

    expected = [list(range(size)) for size in (5, 1, 3)]
    assert over_ranks(play, 2, make()) == expected
    doubled = [[2 * i for i in step] for step in expected]
    assert over_ranks(play, 2, make(collate_fn=lambda batch: batch * 2)) == doubled


@pytest.mark.parametrize("micro", [None, 1, 9])
def test_evaluation_is_in_stream_order_and_every_rank_has_work(play, micro):
    found = []
    for rank in (0, 1):
        play(rank, 2)
        options = LoaderOptions(0, pin_memory=False, seed=5, count=len, reproducible=False)
        source = open_source(Numbers(11), None, "val")
        batches = evaluation_batches(source, GlobalBatchPlan(4, micro), options, limit=None)
        mine = [(m.position, m.batch.tolist()) for m in batches.epoch(0) if m.batch is not None]
        assert sum(len(batch) for _, batch in mine) >= 5
        found += mine
    assert [i for _, batch in sorted(found) for i in batch] == list(range(11))


class Counted(Numbers):
    """Shuffles by chance, counts what it reads, and can be taken up again where it was."""

    def __init__(self, count):
        super().__init__(count)
        self.next, self.order, self.read, self.is_loaded = 0, None, 0, False

    def __iter__(self):
        if not self.is_loaded:
            self.next, self.order = 0, torch.randperm(self.count).tolist()
        self.is_loaded = False
        while self.next < self.count:
            self.next += 1
            self.read += 1
            yield self.order[self.next - 1] * 100 + random.randrange(100)

    def state_dict(self):
        return self.__dict__  # alive: it goes on changing

    def load_state_dict(self, state):
        self.next, self.order, self.is_loaded = state["next"], list(state["order"]), True


def stopped_after(batches, epoch, count, start_step=0):
    """Train ``count`` steps and return what they had, and the state after them."""
    found, state = [[]], None
    for micro in batches.epoch(epoch, start_step):
        found[-1] += [] if micro.batch is None else micro.batch.tolist()
        if micro.is_last:
            if len(found) == count:  # as the loop saves: before it asks for the next one
                state = copy.deepcopy(batches.state_dict())
                break
            found.append([])
    return found, state


@pytest.mark.parametrize(("saved_by", "resumed_by"), [(0, 0), (0, 2), (2, 1), (1, 0)])
def test_a_stream_with_state_goes_on_at_once(play, capsys, saved_by, resumed_by):
    for stop, world_size in itertools.product((1, 3, 4), (1, 2)):
        expected = over_ranks(play, world_size, lambda: stream(Counted(23), 5, 2), epoch=1)
        every = []
        for rank in range(world_size):
            play(rank, world_size)
            before, state = stopped_after(stream(Counted(23), 5, 2, workers=saved_by), 1, stop)
            assert (state["epoch"], state["step"], state["position"]) == (1, stop, stop * 5)
            data = Counted(23)
            batches = stream(data, 5, 2, workers=resumed_by)
            batches.load_state_dict(state)
            assert batches.state_dict() == state  # saved again before anything is read
            every.append(before + steps(batches, 1, stop))
            assert data.read == (0 if resumed_by else 23 - stop * 5)
        assert [[i for part in parts for i in part] for parts in zip(*every, strict=True)] == (
            expected
        )
    assert "resume" not in capsys.readouterr().out


def test_the_state_of_another_place_is_of_no_use(capsys):
    _, state = stopped_after(stream(Counted(23), 5), 1, 3)
    for epoch, step in ((1, 2), (2, 3)):
        resumed = stream(Counted(23), 5)
        resumed.load_state_dict(state)
        assert steps(resumed, epoch, step) == steps(stream(Counted(23), 5), epoch)[step:]
        assert f"the first {step} global batches of epoch {epoch}" in capsys.readouterr().out


def test_a_new_epoch_starts_anew():
    batches = stream(Counted(8), 4)
    _, state = stopped_after(batches, 0, 2)
    resumed = stream(Counted(8), 4)
    resumed.load_state_dict(state)
    assert steps(resumed, 1) == steps(stream(Counted(8), 4), 1)


@pytest.mark.parametrize("kind", [Chance, Owning])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_without_state_is_read_again_and_says_so(play, capsys, workers, kind):
    expected = over_ranks(play, 2, lambda: stream(kind(23), 5, 2), epoch=1)
    capsys.readouterr()
    for rank in (0, 1):
        play(rank, 2)
        batches = stream(kind(23), 5, 2, workers=workers)
        before, state = stopped_after(batches, 1, 3)
        assert state == {}
        batches = stream(kind(23), 5, 2, workers=workers)
        batches.load_state_dict(state)
        after = steps(batches, 1, 3)
        if rank == 0:
            first = before + after
        else:
            both = [a + b for a, b in zip(first, before + after, strict=True)]
            assert both == expected
    line = (
        "resume: reading past the first 3 global batches of epoch 1, which are done; give "
        f"{kind.__name__} state_dict and load_state_dict to go on at once"
    )
    assert capsys.readouterr().out.splitlines() == [line]


class ReadyWithState(ReadyBatches):
    """Ready batches of different sizes."""

    next = 0

    def __iter__(self):
        sizes = (5, 1, 0, 3, 2)
        while self.next < len(sizes):
            self.next += 1
            yield torch.arange(sizes[self.next - 1])

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_position_in_a_stream_of_ready_batches_is_kept(workers):
    def make():
        return stream(DataLoader(ReadyWithState(), batch_size=None, num_workers=workers))

    found = [(m.position, m.num_samples) for m in make().epoch(0)]
    assert found == [(0, 5), (5, 1), (6, 3), (9, 2)]
    for stop in (1, 2, 3):
        _, state = stopped_after(make(), 0, stop)
        resumed = make()
        resumed.load_state_dict(state)
        assert [(m.position, m.num_samples) for m in resumed.epoch(0, stop)] == found[stop:]


def random_collate(samples):
    return torch.tensor(samples) * 1000 + random.randrange(1000)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_collating_draws_belongs_to_the_micro_batch(play, workers):
    def make():
        return stream(
            DataLoader(Chance(23), 6, num_workers=workers, collate_fn=random_collate), micro=2
        )

    alone = over_ranks(play, 1, make)
    assert over_ranks(play, 3, make) == alone
    play(0, 1)
    assert steps(make(), 0, start_step=2) == alone[2:]


def test_order_facts_tell_the_length():
    assert stream(Announced(7)).order_facts() == {"num_samples": 7}
    assert stream(Numbers(7)).order_facts() == {"num_samples": None}


@pytest.mark.parametrize("reproducible", [False, True])
def test_where_bits_count_evaluation_is_cut_alike_on_any_ranks(play, reproducible):
    found = []
    for world_size in (1, 2, 4):
        sizes = {}
        for rank in range(world_size):
            play(rank, world_size)
            options = LoaderOptions(0, False, 5, len, reproducible)
            source = open_source(Numbers(11), None, "val")
            batches = evaluation_batches(source, GlobalBatchPlan(8, 4), options, limit=None)
            sizes.update({m.position: m.num_samples for m in batches.epoch(0) if m.num_samples})
        found.append(sorted(sizes.items()))
    assert (found[1:] == found[:-1]) == reproducible
