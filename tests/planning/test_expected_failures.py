from __future__ import annotations

import math

import pytest

from trainer.planning.expected_failures import checkpoint_interval_s, lost_share


def test_cheap_checkpoints_follow_young() -> None:
    assert checkpoint_interval_s(1.0, 1e9) == pytest.approx(math.sqrt(2e9), rel=1e-3)


def test_the_interval_is_the_best_one() -> None:
    cost_s, mtbf_s = 60.0, 24 * 3600.0

    def total_s(interval_s: float) -> float:  # Daly 2006, equation 20, for a unit of work
        return mtbf_s * math.expm1((interval_s + cost_s) / mtbf_s) / interval_s

    best = checkpoint_interval_s(cost_s, mtbf_s)
    assert total_s(best) <= min(total_s(best * factor) for factor in (0.9, 0.99, 1.01, 1.1))


def test_a_run_that_fails_all_the_time_saves_as_often_as_it_fails() -> None:
    assert checkpoint_interval_s(100.0, 50.0) == 50.0


def test_lost_time_is_saving_and_doing_again() -> None:
    assert lost_share(99.0, 1.0, 0.0, math.inf) == pytest.approx(0.01)
    assert lost_share(100.0, 0.0, 50.0, 1000.0) == pytest.approx(0.1)
    assert lost_share(100.0, 0.0, 50.0, 1.0) == 1.0
