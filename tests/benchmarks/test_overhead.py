"""Whether contestants of the overhead benchmark can be compared."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from benchmarks.nets import Graded
from benchmarks.overhead.measuring import measure, report
from benchmarks.overhead.parts import EVERYTHING, PARTS, REFERENCE, tiny


@pytest.mark.parametrize("name", ["tiny", "evaluate", "predict"])
def test_the_trainer_does_as_many_forwards_as_the_loop_by_hand(name: str) -> None:
    part, names = PARTS[name], (REFERENCE, EVERYTHING, "Trainer")
    few = {who: how for who, how in part.contestants.items() if who in names}
    work = tiny("little", Graded, steps=(2, 4))
    found = measure(replace(part, contestants=few), work, rounds=1, clock=time.perf_counter)
    assert len(found) == 2  # it checks the number of forwards itself
    assert all(seconds > 0 for rounds in found.values() for seconds in rounds)
    assert f"{REFERENCE}  " in report(part, work, found, markdown=False)
