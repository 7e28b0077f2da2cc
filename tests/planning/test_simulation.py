"""A step on paper: where the answer is known in closed form, and what must only grow or shrink."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.planning.network import Link, Network
from trainer.planning.simulation import Bucket, Compute, Step, simulate

LINK = Link(1e-4, 1e8)
FLAT = Network(LINK, LINK)
COMPUTE = Compute(before_s=0.1, backward_s=0.2, ready_s=[0.2, 0.15, 0.1, 0.05], after_s=0.01)
ONE_BUCKET = [Bucket((0, 1, 2, 3), 4e6)]
FOUR_BUCKETS = [Bucket((number,), 1e6) for number in (3, 2, 1, 0)]


def on(ranks: int, buckets: list[Bucket], network: Network = FLAT) -> Step:
    return simulate(COMPUTE, buckets, lambda size: network.ring_s(size, ranks))


@pytest.mark.parametrize("ranks", [2, 3, 64])
def test_one_bucket_is_not_hidden(ranks: int) -> None:
    sent_s = 2 * (ranks - 1) * 1e-4 + 2 * (ranks - 1) / ranks * 4e6 / 1e8
    step = on(ranks, ONE_BUCKET)
    assert step.step_s == pytest.approx(0.31 + sent_s)
    assert step.exposed_s == pytest.approx(sent_s) == step.communication_s


def test_links_without_limits_cost_nothing() -> None:
    free = Link(0.0, math.inf)
    assert on(8, FOUR_BUCKETS, Network(free, free)) == Step(COMPUTE.total_s, 0.0, 0.0)


def test_one_rank_sends_nothing() -> None:
    assert FLAT.ring_s(1e9, 1) == FLAT.tree_s(1e9, 1) == 0


def test_only_the_last_bucket_is_seen_where_the_others_fit_into_backward() -> None:
    each_s = FLAT.ring_s(1e6, 2)
    assert each_s < 0.05
    step = on(2, FOUR_BUCKETS)
    assert step.exposed_s == pytest.approx(each_s)
    assert step.communication_s == pytest.approx(4 * each_s)


def test_buckets_wait_for_each_other_where_the_network_is_the_limit() -> None:
    slow = Network(Link(0.0, 1e7), Link(0.0, 1e7))
    each_s = slow.ring_s(1e6, 2)
    assert each_s > 0.05
    assert on(2, FOUR_BUCKETS, slow).step_s == pytest.approx(0.1 + 0.05 + 4 * each_s + 0.01)


def test_a_ring_crosses_each_machine_once() -> None:
    network = Network(Link(1e-6, 1e11), Link(1e-5, 1e9), ranks_per_node=4)
    within_s = 6 * 1e-6 + 6 / 4 * 1e6 / 1e11
    assert network.ring_s(1e6, 4) == pytest.approx(within_s)
    # Of 14 messages one after the other 2 go between the machines, whose link is the narrow one.
    assert network.ring_s(1e6, 8) == pytest.approx(12e-6 + 2e-5 + 14 / 8 * 1e6 / 1e9)


def test_a_tree_is_as_deep_as_the_logarithm() -> None:
    network = Network(Link(1e-6, 1e11), Link(1e-5, 1e9), ranks_per_node=4)
    assert network.tree_s(1e6, 4096) == pytest.approx(2 * (3e-6 + 10 * 1e-5 + 1e6 / 1e9))
    assert FLAT.tree_s(0, 1024) < FLAT.ring_s(0, 1024)


seconds, sizes = st.floats(0, 1), st.floats(1, 1e9)
links = st.builds(Link, seconds, st.floats(1e6, 1e12))
steps = st.lists(st.tuples(seconds, sizes), min_size=1, max_size=8)


@settings(deadline=None, max_examples=50)
@given(steps=steps, link=links, ranks=st.integers(2, 10_000), factor=st.floats(1, 100))
def test_more_never_takes_less(
    steps: list[tuple[float, float]], link: Link, ranks: int, factor: float
) -> None:
    ready_s, amounts = zip(*steps, strict=True)
    compute = Compute(0.5, max(ready_s), ready_s, 0.1)
    buckets = [Bucket((number,), size) for number, size in enumerate(amounts)]
    network = Network(link, link)
    rounding = 1e-12 * (2 + sum(network.ring_s(factor * size, ranks + 1) for size in amounts))
    for kind in (Network.ring_s, Network.tree_s):

        def step_s(n: int, times: float, network: Network = network, kind=kind) -> float:  # type: ignore[no-untyped-def]
            more = [Bucket(b.parameters, b.size * times) for b in buckets]
            step = simulate(compute, more, lambda size: kind(network, size, n))
            assert step.step_s == pytest.approx(compute.total_s + step.exposed_s)
            assert step.exposed_s <= step.communication_s + rounding
            return step.step_s

        least = step_s(ranks, 1)
        faster = Network(*[Link(link.latency_s / factor, link.bandwidth * factor)] * 2)
        assert step_s(ranks, factor) >= least - rounding
        assert step_s(ranks + 1, 1) >= least - rounding
        assert step_s(ranks, 1, network=faster) <= least + rounding
        assert least >= compute.total_s
