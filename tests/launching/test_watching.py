"""When a rank counts as late. What follows is in ``distributed/test_hangs.py``."""

from __future__ import annotations

import time

import pytest

from trainer.launching.watching import _Patience
from trainer.watch import Note, Phase


def test_time_in_which_the_watcher_was_stopped_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    patience = _Patience()
    rank = Note(Phase.FORWARD, since=now, step=1, limit_s=30.0)
    other = Note(Phase.FORWARD, since=now + 25, step=1, limit_s=30.0)

    def is_over_after(seconds: int, *notes: Note) -> bool:
        """Look every second."""
        nonlocal now
        found = False
        for _ in range(seconds):
            now += 1
            found = patience.is_over(notes)
        return found

    assert not is_over_after(30, rank, other)
    assert is_over_after(1, rank, other)
    assert not is_over_after(1, other)

    now += 60  # Ctrl-Z, and fg a minute later
    assert not is_over_after(30, rank)
    assert is_over_after(2, rank)
