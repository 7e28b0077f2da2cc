"""Whether contestants of the overhead benchmark can be compared."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from benchmarks.nets import Graded
from benchmarks.overhead.measuring import measure, report
from benchmarks.overhead.parts import EVERYTHING, PARTS, REFERENCE, tiny
from trainer.config import TrainerConfig


@pytest.mark.parametrize("name", ["tiny", "evaluate", "predict"])
def test_the_trainer_does_as_many_forwards_as_the_loop_by_hand(name: str) -> None:
    part, names = PARTS[name], (REFERENCE, EVERYTHING, "Trainer")
    few = {who: how for who, how in part.contestants.items() if who in names}
    work = tiny("little", Graded, steps=(2, 4))
    found = measure(replace(part, contestants=few), work, rounds=1, clock=time.perf_counter)
    assert len(found) == 2  # it checks the number of forwards itself
    assert all(seconds > 0 for rounds in found.values() for seconds in rounds)
    assert f"{REFERENCE}  " in report(part, work, found, markdown=False)


@pytest.mark.parametrize("name", PARTS)
def test_what_counts_lies_in_one_epoch_behind_the_first_log_event(name: str) -> None:
    part, every = PARTS[name], TrainerConfig().log_every_n_steps
    work = part.work()
    first, last = work.steps
    assert first > every
    assert (last - first) % every == 0
    assert len(work.data) >= work.total_steps * work.accumulation * work.batch_size
