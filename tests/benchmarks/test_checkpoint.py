"""The benchmark of checkpoints: what it times. The faults are tried beside the writer."""

import time
from typing import Any

import pytest

from benchmarks.checkpoint import slowdowns, stalls
from trainer.checkpoint.saving import Saver


def test_a_save_that_holds_the_loop_up_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    save = Saver.save

    def slow(saver: Saver, shared: Any) -> None:
        begun = time.thread_time()
        while time.thread_time() < begun + 0.05:
            pass
        save(saver, shared)

    monkeypatch.setattr(Saver, "save", slow)
    found = stalls(mebibytes=1, rounds=2)
    copies = "copy to new memory", "copy to used memory"
    assert found.keys() == {
        f"{which} : {copy}" for which in ("first save", "save") for copy in copies
    }
    for name, ratios in found.items():  # of two fits of two steps, and at the end of each
        assert len(ratios) == (2 if name.startswith("first") else 4)
        assert min(ratios) > 5, "a copy of 1 MiB takes less than a millisecond"


def test_steps_are_timed_beside_every_write() -> None:
    found = slowdowns(mebibytes=1, rounds=2)
    assert {name: len(ratios) for name, ratios in found.items()} == {
        "tiny steps, beside a write : alone": 2,
        "large steps, beside a write : alone": 2,
    }
