from __future__ import annotations

import pytest

from trainer.planning.links import fit, network
from trainer.planning.network import Link, Network
from trainer.planning.options import PlanConfig

SIZES = [4**power for power in range(6, 13)]
FAST, SLOW = Link(1e-6, 1e10, "fast"), Link(5e-4, 2.4e7, "slow")


@pytest.mark.parametrize("ranks", [2, 5])
def test_what_was_measured_on_few_ranks_tells_of_more(ranks: int) -> None:
    real = Network(SLOW, SLOW)
    found = fit([(size, real.ring_s(size, ranks)) for size in SIZES], ranks)
    expected = Network(found, found)
    for more in (3, 4, 100):
        assert expected.ring_s(8e6, more) == pytest.approx(real.ring_s(8e6, more), rel=0.1)


def test_one_message_that_was_held_up_changes_little() -> None:
    samples = [(size, Network(SLOW, SLOW).ring_s(size, 2)) for size in SIZES]
    samples[-1] = (samples[-1][0], 3 * samples[-1][1])
    assert fit(samples, 2).bandwidth == pytest.approx(SLOW.bandwidth, rel=0.1)


def test_small_messages_that_go_through_at_once_tell_nothing_of_the_bandwidth() -> None:
    samples = [(n, Network(SLOW, SLOW).ring_s(n if n > 2**18 else 0, 2)) for n in SIZES]
    assert fit(samples, 2).bandwidth == pytest.approx(SLOW.bandwidth, rel=0.01)


def test_a_link_too_fast_to_measure_has_a_latency() -> None:
    assert fit([(size, 1e-4) for size in SIZES], 2).latency_s == pytest.approx(5e-5)


def test_what_is_given_counts_most_then_what_was_measured() -> None:
    both = network(PlanConfig(), {"within": FAST, "between": SLOW}, 8)
    assert both == Network(FAST, SLOW, 8)
    one = network(PlanConfig(bandwidth_gbps=100, ranks_per_node=4), {"within": FAST}, 2)
    assert (one.within, one.ranks_per_node) == (FAST, 4)
    assert (one.between.latency_s, one.between.bandwidth) == (1e-6, 12.5e9)
    assert "bandwidth given" in one.between.source
    none = network(PlanConfig(latency_us=3, bandwidth_gbps=8), {}, 1)
    assert none.between == Link(3e-6, 1e9, "given")
    assert "assumed" in network(PlanConfig(), {}, 1).between.source
