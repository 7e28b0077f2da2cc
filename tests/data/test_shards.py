"""Iterable datasets that shard themselves: each rank and loader worker reads its own part."""

import random

import pytest
from torch.utils.data import IterableDataset

from trainer import distributed
from trainer.data.batches import evaluation_batches, train_batches
from trainer.data.loading import LoaderOptions, open_source
from trainer.data.plan import GlobalBatchPlan
from trainer.data.shards import ShardedStreamBatches


class Shards(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))

    def shard(self, *, rank, world_size):
        return range(rank, self.count, world_size)


class Shard:
    """Uneven parts that draw by chance and can be taken up again where they were."""

    def __init__(self, samples):
        self.samples, self.next, self.read = samples, 0, 0

    def __iter__(self):
        while self.next < len(self.samples):
            self.next += 1
            self.read += 1
            yield self.samples[self.next - 1] * 1000 + random.randrange(1000)

    def state_dict(self):
        return self.__dict__

    def load_state_dict(self, state):
        self.next = state["next"]


class Resumable(Shards):
    """The second of three shards has the most, the third one a few."""

    def shard(self, *, rank, world_size):
        weights = [2, 5, 1, 1][:world_size]
        ends = [self.count * sum(weights[:i]) // sum(weights) for i in range(world_size + 1)]
        self.opened = Shard(list(range(ends[rank], ends[rank + 1])))
        return self.opened


class Forgetful(Resumable):
    def shard(self, *, rank, world_size):
        return iter(super().shard(rank=rank, world_size=world_size))


def stream(data, size=4, micro=None, *, workers=0, drop_last=False, limit=None, reproducible=False):
    return train_batches(
        open_source(data, None, "train"),
        GlobalBatchPlan(size, micro),
        LoaderOptions(workers, False, 5, len, reproducible),
        shuffle=True,
        drop_last=drop_last,
        limit=limit,
        overfit=0,
        indices=None,
    )


def steps(batches, epoch=0, start_step=0):
    """The samples of each global batch."""
    found = [[]]
    for micro in batches.epoch(epoch, start_step):
        found[-1] += micro.batch.tolist()
        if micro.is_last:
            found.append([])
    return found[:-1]


def split(count, size):
    return [list(range(count))[i : i + size] for i in range(0, count, size)]


def test_a_stream_may_shard_itself(capsys):
    assert steps(stream(Shards(7))) == split(7, 4)
    line = "Shards is asked for its shards (it has a shard method), so the order of its samples"
    assert capsys.readouterr().out.count(line) == 1
    limited = stream(Shards(10**9), limit=2)
    assert (limited.steps_per_epoch, steps(limited)) == (2, split(8, 4))
    assert steps(limited, start_step=1) == [[4, 5, 6, 7]]
    assert steps(stream(Shards(7), drop_last=True)) == [[0, 1, 2, 3]]


def test_another_shard_method_is_left_alone():
    class Other(Shards):
        def shard(self, num_shards, index):
            raise AssertionError

    assert not isinstance(stream(Other(3)), ShardedStreamBatches)
    assert steps(stream(Other(3))) == [[0, 1, 2]]


def test_evaluation_cuts_it_by_position(play):
    play(1, 2)
    source = open_source(Shards(7), None, "val")
    plan, options = GlobalBatchPlan(4), LoaderOptions(0, False, 5, len, False)
    batches = evaluation_batches(source, plan, options, limit=None)
    assert [m.batch.tolist() for m in batches.epoch(0)] == [[2, 3], [6]]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_it_goes_on_where_every_shard_was(capsys, workers):
    def make(kind=Resumable):
        return stream(kind(23), 3, 2, workers=workers)

    expected = steps(make(), 2)
    assert sorted(i // 1000 for step in expected for i in step) == list(range(23))
    assert len({i % 1000 for step in expected for i in step}) > 15
    capsys.readouterr()
    for stop in (1, 4, 6):
        batches = make()
        found = batches.epoch(2)
        done = 0
        while done < stop:
            done += next(found).is_last
        state = batches.state_dict()
        found.close()
        resumed = make()
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert steps(resumed, 2, stop) == expected[stop:]
        if not workers:
            assert resumed._dataset.opened.read == 23 - 3 * stop
    assert steps(resumed, 3) == steps(make(), 3)  # a new epoch starts anew
    assert "resume" not in capsys.readouterr().out


@pytest.mark.parametrize("workers", [0, 2])
def test_without_state_it_is_read_again_and_says_so(capsys, workers):
    expected = steps(stream(Forgetful(23), 3, workers=workers))
    batches = stream(Forgetful(23), 3, workers=workers)
    for number, _ in enumerate(batches.epoch(0), 1):
        if number == 2:
            break
    resumed = stream(Forgetful(23), 3, workers=workers)
    resumed.load_state_dict(batches.state_dict())
    capsys.readouterr()
    assert steps(resumed, 0, 2) == expected[2:]
    line = "resume: reading past the first 2 global batches of epoch 0, which are done; give the s"
    assert capsys.readouterr().out.count(line) == 1


class Owning(Shards):
    """Its shards share a generator of its own."""

    def __init__(self, count):
        super().__init__(count)
        self.rng = random.Random(1)

    def shard(self, *, rank, world_size):
        return (self.rng.randrange(2**40) for _ in range(rank, self.count, world_size))


def test_shards_draw_differently_and_alike_in_every_run():
    first = steps(stream(Owning(8), workers=2))
    assert len({number for step in first for number in step}) == 8
    assert steps(stream(Owning(8), workers=2)) == first


def test_another_number_of_shards_is_refused(monkeypatch):
    batches = stream(Resumable(9))
    assert batches.order_facts() == {"num_samples": None, "shards": 1}
    assert batches.state_dict() == {}
    steps(batches)
    state = batches.state_dict()
    assert stream(Shards(9), workers=2).order_facts()["shards"] == 2
    with pytest.raises(ValueError, match="the run was on 1 ranks with 1 shards each, and here are"):
        stream(Resumable(9), workers=2).load_state_dict(state)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    with pytest.raises(ValueError, match="Resumable shards itself, so the order of its samples"):
        stream(Resumable(9)).load_state_dict(state)
    stream(Resumable(9)).load_state_dict({})


def test_equal_bits_on_any_ranks_are_more_than_it_can_promise():
    with pytest.raises(ValueError, match="reproducible=true with Shards, which shards itself: "):
        stream(Shards(9), reproducible=True)
