"""The words in which a hang is told, for more ranks than a test can start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainer.diagnosis.flight_recorder import Collective
from trainer.diagnosis.hang_report import told
from trainer.diagnosis.rank_report import RankReport
from trainer.watch import Phase

BUCKET = Collective("all_reduce", "", 57, ((1000, 300), (8,)), 1_200_032, 0.0, False)
WAITS = RankReport(
    0, 100, Phase.BACKWARD, 29.0, 12, 30.0, "  in backward\n", BUCKET, bucket=2, num_buckets=5
)
LOADS = RankReport(0, 100, Phase.LOADING, 30.2, 12, 30.0, "  in load\n")


def of(ranks: Any, report: RankReport) -> list[RankReport]:
    return [replace(report, rank=rank, pid=100 + rank) for rank in ranks]


def without_time(text: str) -> str:
    return "\n".join(
        f"{line.partition(' (since ')[0]}{line.partition(' (since ')[2][9:]}"
        for line in text.splitlines()
    )


def test_ranks_that_do_the_same_are_told_together() -> None:
    late = replace(LOADS, rank=3, pid=103)
    others = of([0, 1, 2, 4, 7], WAITS) + of([5, 6], replace(WAITS, waits_for=None, bucket=1))
    assert without_time(told([late, *others], 30.0)) == (
        "rank 3 hangs loading data for 30.2 s, at step 12, and the others wait for it. "
        "timeout_s=30 allows no more: raise it if this may take longer\n"
        "rank 3, process 103:\n"
        "  in load\n"
        "ranks 5, 6: in backward for 29.0 s, at step 12, after bucket 1 of 5\n"
        "ranks 0-2, 4, 7: in backward for 29.0 s, at step 12, waits for bucket 2 of 5, "
        "all_reduce #57 (2 tensors, 1.2 MB)"
    )


def test_the_limit_of_the_start_has_its_own_name() -> None:
    starts = replace(LOADS, phase=Phase.STARTING, step=0, seconds=600.1, limit_s=600.0)
    assert "start_timeout_s=600 allows no more" in told(of([0], starts), 300.0)


def test_the_cause_may_be_on_another_machine() -> None:
    here = of([2, 3], WAITS)
    assert told(here, 30.0, elsewhere=[0, 1]).startswith(
        "ranks 2, 3 waited too long for others in all_reduce #57 (2 tensors, 1.2 MB): the cause is "
        "on another machine, which has ranks 0, 1, or in the network\n"
    )
    late = replace(LOADS, rank=3, pid=103)
    assert told([WAITS, late], 30.0, elsewhere=[4]).startswith("rank 3 hangs loading data")


def test_who_is_waited_for_may_not_be_late_itself() -> None:
    saves = replace(LOADS, phase=Phase.SAVING, seconds=4.0)
    others = of([1, 2], replace(WAITS, seconds=30.1))
    text = without_time(told([saves, *others], 30.0))
    assert text.startswith("rank 0 is late, saving for 4.0 s, at step 12, and the others wait")
    assert "  in load\n" in text


def test_a_collective_that_all_have_started() -> None:
    text = told(of(range(4), WAITS), 30.0)
    assert text.startswith("all ranks wait in the same collective, all_reduce #57 (")


def test_few_stacks_of_many_are_shown() -> None:
    reports = [replace(LOADS, rank=rank, stack=f"  in load {rank}\n") for rank in range(8)]
    text = told(reports, 30.0)
    assert text.startswith("ranks 0-7 hang loading data for 30.2 s")
    assert text.count("  in load") == 3


def test_ranks_that_cannot_be_reached() -> None:
    text = told(of([0, 2], WAITS), 30.0, absent=[1, 3])
    assert text.startswith("ranks 1, 3 did not answer: stopped, gone, or without the GIL\nranks 0,")
    text = told([*of([0], WAITS), replace(LOADS, rank=2)], 30.0, absent=[1])
    assert text.startswith("rank 2 hangs loading data for 30.2 s")
    assert "; rank 1 did not answer" in text.splitlines()[0]
