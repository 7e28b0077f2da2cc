"""The benchmark of checkpoints measures what it says; the faults are tried beside the writer."""

from benchmarks.checkpoint import slowdowns, stalls


def test_ratios_are_measured() -> None:
    found = stalls(mebibytes=1, rounds=2) | slowdowns(mebibytes=1, rounds=1)
    assert len(found) == 6
    assert all(ratio > 0 for ratios in found.values() for ratio in ratios)
