"""The simulation of a benchmark that others have published."""

from __future__ import annotations

import pytest

from benchmarks.published import NETS, rows


def test_the_networks_have_the_parameters_they_are_known_for() -> None:
    known = [25_557_032, 44_549_160, 25_028_904, 88_791_336]
    assert [sum(count for count, _ in net.parameters()) for net in NETS] == known
    assert sum(work for _, work in NETS[0].parameters()) == pytest.approx(4.09e9, rel=1e-3)


def test_every_row_of_resnet50_is_within_five_per_cent() -> None:
    for _, published_ms, simulated_ms, serial_ms in rows(NETS[0]):
        assert simulated_ms == pytest.approx(published_ms, rel=0.05)
        assert NETS[0].ddp_ms < simulated_ms < serial_ms
