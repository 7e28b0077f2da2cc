"""The global-batch plan is arithmetic: shown for any sizes, and for what is loaded by it."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from trainer import distributed
from trainer.data.batches import train_batches
from trainer.data.loading import LoaderOptions, open_source
from trainer.data.plan import GlobalBatchPlan, ceil_div, epoch_order

settings.register_profile("plan", deadline=None, max_examples=150)
settings.load_profile("plan")

sizes = st.integers(1, 90)
world_sizes = st.integers(1, 9)
plans = st.builds(
    GlobalBatchPlan,
    global_batch_size=st.none() | st.integers(1, 70),
    micro_batch_size=st.none() | st.integers(1, 20),
)
# Any plan with any number of ranks, and the plans of a fixed tree with powers of two.
ranked_plans = st.tuples(plans, world_sizes) | st.tuples(
    plans.map(lambda plan: replace(plan, halving=True)), st.sampled_from([1, 2, 4, 8])
)


def cuts(plan, size, world_size):
    return [plan.cut(size, rank, world_size) for rank in range(world_size)]


@given(ranked_plans, sizes)
def test_every_sample_is_in_one_micro_batch_in_rank_order(ranked, size):
    plan, world_size = ranked
    found = [part for rank in cuts(plan, size, world_size) for part in rank]
    assert [i for part in found for i in range(part.start, part.stop)] == list(range(size))
    assert [part.number for part in found] == list(range(len(found)))


@given(ranked_plans, sizes)
def test_micro_batches_keep_the_limit_and_only_the_last_is_smaller(ranked, size):
    plan, world_size = ranked
    lengths = [p.stop - p.start for rank in cuts(plan, size, world_size) for p in rank]
    full = plan.global_batch_size or size
    limit = plan.micro_batch_size or ceil_div(full, world_size)
    assert set(lengths[:-1]) <= {limit}
    assert 0 < lengths[-1] <= limit


@given(ranked_plans, sizes)
def test_accumulation_steps_are_what_the_busiest_rank_does(ranked, size):
    plan, world_size = ranked
    busiest = max(map(len, cuts(plan, size, world_size)))
    assert busiest == plan.accumulation_steps(size, world_size)
    full = plan.global_batch_size or size
    without_a_limit = GlobalBatchPlan(plan.global_batch_size)
    assert without_a_limit.accumulation_steps(full, world_size) == 1


@given(ranked_plans, st.data())
def test_a_shorter_global_batch_is_a_full_one_without_its_end(ranked, data):
    plan, world_size = ranked
    full = plan.global_batch_size or data.draw(st.integers(1, 70))
    plan = replace(plan, global_batch_size=full)
    size = data.draw(st.integers(1, full))
    for whole, short in zip(
        cuts(plan, full, world_size), cuts(plan, size, world_size), strict=True
    ):
        expected = [part._replace(stop=min(part.stop, size)) for part in whole if part.start < size]
        assert short == expected


@given(ranked_plans, sizes, st.integers(1, 20))
def test_a_fixed_micro_batch_is_cut_alike_at_every_world_size(ranked, size, micro):
    plan, world_size = ranked
    plan = replace(plan, micro_batch_size=micro)
    alone = plan.cut(size, 0, 1)
    assert [part for rank in cuts(plan, size, world_size) for part in rank] == alone


@given(plans, sizes, st.sampled_from([1, 2, 4, 8]))
def test_halving_leaves_the_ranks_at_most_one_micro_batch_apart(plan, size, world_size):
    plan = replace(plan, halving=True)
    lengths = [len(plan.block(size, rank, world_size)) for rank in range(world_size)]
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(0, 500), st.integers(1, 70))
def test_steps_per_epoch_count_the_global_batches(num_samples, size):
    plan = GlobalBatchPlan(size)
    starts = range(0, num_samples, size)
    assert plan.steps_per_epoch(num_samples, drop_last=False) == len(starts)
    whole = [start for start in starts if start + size <= num_samples]
    assert plan.steps_per_epoch(num_samples, drop_last=True) == len(whole)


class Indices(Dataset):
    """Yields its indices."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


def steps_of_epoch(plan, world_size, data, *, epoch=3, drop_last=False, workers=0, load=False):
    """The micro-batches of each step of a shuffled epoch, over all ranks in order.

    A rank is played by this process. Without ``load`` they are requested only.
    """
    steps = []
    for rank in range(world_size):
        with (
            patch.object(distributed, "rank", lambda rank=rank: rank),
            patch.object(distributed, "world_size", lambda: world_size),
        ):
            batches = train_batches(
                open_source(data, None, "train"),
                plan,
                LoaderOptions(workers, pin_memory=False, seed=5, count=len, reproducible=False),
                shuffle=True,
                drop_last=drop_last,
                limit=None,
                overfit=0,
                indices=None,
            )
            step = 0
            for micro in batches.epoch(epoch) if load else batches.requests(epoch):
                if step == len(steps):
                    steps.append([])
                indices = list(micro.indices)
                assert not load or (micro.batch is None) == (indices == [])
                assert not load or micro.batch is None or micro.batch.tolist() == indices
                if indices:
                    steps[step].append((micro.position, micro.number, indices))
                step += micro.is_last
            assert step == len(steps) == batches.steps_per_epoch  # as many on every rank
    return steps


@given(st.integers(1, 200), ranked_plans, st.booleans())
def test_an_epoch_has_every_sample_once_in_an_order_that_no_rank_count_changes(
    num_samples, ranked, drop_last
):
    plan, world_size = ranked
    size = min(plan.global_batch_size or 7, num_samples)
    plan = replace(plan, global_batch_size=size)
    steps = steps_of_epoch(plan, world_size, Indices(num_samples), drop_last=drop_last)
    order = [i for step in steps for _, _, indices in step for i in indices]
    kept = num_samples - num_samples % size if drop_last else num_samples
    assert order == epoch_order(num_samples, 5, 3, shuffle=True)[:kept].tolist()
    if not drop_last:
        assert sorted(order) == list(range(num_samples))
    positions = [
        position + i for step in steps for position, _, part in step for i in range(len(part))
    ]
    assert positions == list(range(kept))
    alone = steps_of_epoch(plan, 1, Indices(num_samples), drop_last=drop_last)
    if plan.micro_batch_size is not None:  # the same micro-batches
        assert steps == alone
    else:  # the same global batches
        assert [sorted(i for _, _, part in step for i in part) for step in steps] == [
            sorted(i for _, _, part in step for i in part) for step in alone
        ]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("plan", [GlobalBatchPlan(7, 2), GlobalBatchPlan(7, 2, halving=True)])
def test_loader_workers_change_nothing(plan, workers):
    for world_size in (1, 2):
        expected = steps_of_epoch(plan, world_size, Indices(17))
        assert expected == steps_of_epoch(plan, world_size, Indices(17), workers=workers, load=True)


@given(st.integers(0, 300), st.integers(0, 2**40), st.integers(0, 1000))
def test_an_epoch_is_a_permutation_and_a_pure_function(num_samples, seed, epoch):
    order = epoch_order(num_samples, seed, epoch, shuffle=True)
    torch.rand(3)  # the global generator plays no part
    assert torch.equal(order, epoch_order(num_samples, seed, epoch, shuffle=True))
    assert sorted(order.tolist()) == list(range(num_samples))
    assert epoch_order(num_samples, seed, epoch, shuffle=False).tolist() == list(range(num_samples))


def test_every_epoch_and_seed_has_an_order_of_its_own():
    orders = {
        tuple(epoch_order(50, seed, epoch, shuffle=True).tolist())
        for seed in range(10)
        for epoch in range(10)
    }
    assert len(orders) == 100


@pytest.mark.parametrize(("a", "b", "expected"), [(0, 3, 0), (1, 3, 1), (3, 3, 1), (4, 3, 2)])
def test_ceil_div(a, b, expected):
    assert ceil_div(a, b) == expected
