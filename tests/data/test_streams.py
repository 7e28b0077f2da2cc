"""Iterable datasets: cut by position, over ranks and loader workers.

A rank is played by this process: cutting by position needs no collective.
"""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from trainer import distributed
from trainer.data.batches import evaluation_batches
from trainer.data.loading import LoaderOptions, open_source
from trainer.data.plan import GlobalBatchPlan
from trainer.data.streams import ShardedStreamBatches, stream_batches


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


class Chance(Numbers):
    """Shuffles with every global generator, as it goes."""

    def __iter__(self):
        for number in torch.randperm(self.count).tolist():
            yield number * 10_000 + random.randrange(100) * 100 + np.random.randint(100)


class Epochs(Numbers):
    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([self.epoch] * self.count)


class Shards(Numbers):
    def shard(self, *, rank, world_size):
        return range(rank, self.count, world_size)


@pytest.fixture
def play(monkeypatch):
    def become(rank, world_size):
        monkeypatch.setattr(distributed, "rank", lambda: rank)
        monkeypatch.setattr(distributed, "world_size", lambda: world_size)

    return become


def stream(data, size=4, micro=None, *, workers=0, drop_last=False, limit=None):
    source = open_source(data, None, "train")
    plan = GlobalBatchPlan(size if source.loader is None else source.batch_size, micro)
    options = LoaderOptions(workers, pin_memory=False, seed=5, count=len)
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


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_shuffles_by_chance_is_the_same_everywhere(play, workers):
    made = {}

    def make():
        rank = distributed.rank()
        if rank not in made:
            made[rank] = stream(Chance(11), workers=workers)
        torch.manual_seed(rank)  # as dropout leaves it: different on every rank
        random.seed(rank)
        np.random.seed(rank)
        return made[rank]

    epochs = [over_ranks(play, 2, make, epoch) for epoch in (0, 1)]
    for found in epochs:
        assert sorted(i // 10_000 for step in found for i in step) == list(range(11))
    assert epochs[0] != epochs[1]
    # Also without knowing the epoch, as in evaluation.
    assert over_ranks(play, 2, make, 0) not in epochs
    play(0, 1)
    assert steps(stream(Chance(11)), 1) == epochs[1]


def test_micro_batches_say_what_they_are(play):
    play(1, 2)
    assert [tuple(m[1:]) for m in stream(Numbers(7), 5, 2).epoch(0)] == [
        (1, 4, 2, 5, True),
        (0, 5, 0, 2, True),
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


def test_a_stream_may_shard_itself(capsys):
    assert steps(stream(Shards(7))) == split(7, 4)
    line = "Shards is asked for its shards (it has a shard method), so the order of its samples"
    assert capsys.readouterr().out.count(line) == 1
    limited = stream(Shards(10**9), limit=2)
    assert (limited.steps_per_epoch, steps(limited)) == (2, split(8, 4))
    assert steps(limited, start_step=1) == [[4, 5, 6, 7]]
    assert steps(stream(Shards(7), drop_last=True)) == [[0, 1, 2, 3]]


def test_another_shard_method_is_left_alone():
    class Other(Numbers):
        def shard(self, num_shards, index):
            raise AssertionError

    assert not isinstance(stream(Other(3)), ShardedStreamBatches)
    assert steps(stream(Other(3))) == [[0, 1, 2]]


@pytest.mark.parametrize("kind", [Numbers, Shards])
@pytest.mark.parametrize("micro", [None, 1, 9])
def test_evaluation_is_in_stream_order_and_every_rank_has_work(play, kind, micro):
    found = []
    for rank in (0, 1):
        play(rank, 2)
        options = LoaderOptions(0, pin_memory=False, seed=5, count=len)
        source = open_source(kind(11), None, "val")
        batches = evaluation_batches(source, GlobalBatchPlan(4, micro), options, limit=None)
        mine = [(m.position, m.batch.tolist()) for m in batches.epoch(0) if m.batch is not None]
        assert sum(len(batch) for _, batch in mine) >= 5
        found += mine
    assert [i for _, batch in sorted(found) for i in batch] == list(range(11))
