"""The global-batch plan is arithmetic: shown for any sizes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.plan import GlobalBatchPlan, ceil_div, epoch_order
from trainer.seeding import stream_key

settings.register_profile("plan", deadline=None, max_examples=150)
settings.load_profile("plan")

plans = st.builds(
    GlobalBatchPlan,
    global_batch_size=st.none() | st.integers(1, 70),
    micro_batch_size=st.none() | st.integers(1, 20),
)
sizes = st.integers(1, 90)
world_sizes = st.integers(1, 9)


def cuts(plan, size, world_size):
    return [plan.cut(size, rank, world_size) for rank in range(world_size)]


@given(plans, sizes, world_sizes)
def test_every_sample_is_in_one_micro_batch_in_rank_order(plan, size, world_size):
    found = [part for rank in cuts(plan, size, world_size) for part in rank]
    assert [i for part in found for i in range(part.start, part.stop)] == list(range(size))
    assert [part.number for part in found] == list(range(len(found)))


@given(plans, sizes, world_sizes)
def test_micro_batches_keep_the_limit_and_only_the_last_is_smaller(plan, size, world_size):
    lengths = [p.stop - p.start for rank in cuts(plan, size, world_size) for p in rank]
    full = plan.global_batch_size or size
    limit = plan.micro_batch_size or ceil_div(full, world_size)
    assert set(lengths[:-1]) <= {limit}
    assert 0 < lengths[-1] <= limit


@given(plans, sizes, world_sizes)
def test_accumulation_steps_are_what_the_busiest_rank_does(plan, size, world_size):
    full = plan.global_batch_size or size
    busiest = max(map(len, cuts(plan, full, world_size)))
    assert busiest == plan.accumulation_steps(full, world_size)
    without_a_limit = GlobalBatchPlan(plan.global_batch_size)
    assert without_a_limit.accumulation_steps(full, world_size) == 1


@given(st.integers(1, 70), st.none() | st.integers(1, 20), world_sizes, st.data())
def test_a_shorter_global_batch_is_a_full_one_without_its_end(full, micro, world_size, data):
    plan = GlobalBatchPlan(full, micro)
    size = data.draw(st.integers(1, full))
    for whole, short in zip(
        cuts(plan, full, world_size), cuts(plan, size, world_size), strict=True
    ):
        expected = [part._replace(stop=min(part.stop, size)) for part in whole if part.start < size]
        assert short == expected


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 4))
def test_a_fixed_micro_batch_is_cut_alike_at_every_world_size(full, micro, world_size):
    plan = GlobalBatchPlan(full, micro)
    alone = plan.cut(full, 0, 1)
    assert [part for rank in cuts(plan, full, world_size) for part in rank] == alone


@given(st.integers(0, 500), st.integers(1, 70))
def test_steps_per_epoch_count_the_global_batches(num_samples, size):
    plan = GlobalBatchPlan(size)
    starts = range(0, num_samples, size)
    assert plan.steps_per_epoch(num_samples, drop_last=False) == len(starts)
    whole = [start for start in starts if start + size <= num_samples]
    assert plan.steps_per_epoch(num_samples, drop_last=True) == len(whole)


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


def test_streams_are_told_apart():
    keys = {
        stream_key(seed, step, n) for seed in range(20) for step in range(20) for n in range(20)
    }
    keys |= {stream_key(a, b) for a in range(20) for b in range(20)}
    assert len(keys) == 20**3 + 20**2
    assert all(0 <= key < 2**63 for key in keys)
    # A run that goes on with a newer version needs the same streams.
    assert stream_key(0, 1, 2) == stream_key(0, 1, 2) != stream_key(0, 2, 1)


@pytest.mark.parametrize(("a", "b", "expected"), [(0, 3, 0), (1, 3, 1), (3, 3, 1), (4, 3, 2)])
def test_ceil_div(a, b, expected):
    assert ceil_div(a, b) == expected
