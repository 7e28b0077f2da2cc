"""What a rank notes of itself, and that another process reads it."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest

from trainer.watch import Board, Phase, Watch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the time is, for the test to turn."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_seconds_are_added_up_by_phase(clock: list[float]) -> None:
    watch = Watch()
    for phase in (Phase.LOADING, Phase.FORWARD, Phase.LOADING, Phase.SAVING):
        watch.enter(phase)
        clock[0] += 2
    assert watch.seconds[Phase.LOADING] == 4
    assert watch.seconds[Phase.FORWARD] == 2
    assert watch.seconds[Phase.SAVING] == 0  # still in it


def test_another_process_reads_the_notes(tmp_path: Path) -> None:
    board = Board(tmp_path / "notes", 3, 60.0)
    before = time.monotonic()
    child = os.fork()
    if child == 0:
        watch = Watch()
        watch.share(tmp_path / "notes", 1)
        watch.limit_s = 5.0
        watch.step = 12
        watch.enter(Phase.BACKWARD)
        os._exit(0)
    os.waitpid(child, 0)
    first, second, third = board.read()
    assert (first.phase, first.step, first.limit_s) == (Phase.STARTING, 0, 60.0)
    assert first == third
    assert first.since <= before <= second.since <= time.monotonic()
    assert (second.phase, second.step, second.limit_s) == (Phase.BACKWARD, 12, 5.0)


def test_a_shared_watch_begins_with_the_limit_of_the_board(tmp_path: Path) -> None:
    Board(tmp_path / "notes", 2, 60.0)
    watch = Watch()
    watch.step = 7
    watch.enter(Phase.SAVING)
    watch.share(tmp_path / "notes", 1)
    assert watch.note[0] == Phase.STARTING
    assert watch.note[2:] == (0, 60.0)


def test_loading_is_what_happens_between_the_batches() -> None:
    watch = Watch()

    def batches() -> list[Phase]:
        return [watch.phase for _ in watch.loading(phases(), then=Phase.FORWARD)]

    def phases():  # type: ignore[no-untyped-def]
        for _ in range(2):
            seen.append(watch.phase)
            yield None
        seen.append(watch.phase)

    seen: list[Phase] = []
    assert batches() == [Phase.FORWARD] * 2
    assert seen == [Phase.LOADING] * 3
    list(watch.loading([1], then=Phase.VALIDATION))
    assert watch.phase == Phase.EVALUATION_LOADING


def test_a_phase_without_a_limit() -> None:
    watch = Watch()
    watch.limit_s = 5.0
    with watch.excused(Phase.PREPARING):
        assert (watch.phase, watch.limit_s) == (Phase.PREPARING, math.inf)
    assert (watch.phase, watch.limit_s) == (Phase.STARTING, 5.0)


def test_what_is_known_of_the_ends_of_backwards(clock: list[float]) -> None:
    watch = Watch()
    watch.step = 3  # resumed
    for step, phases in enumerate(
        [
            (Phase.LOADING, Phase.BACKWARD, Phase.FORWARD, Phase.OPTIMIZER),
            (Phase.EVALUATION_LOADING, Phase.VALIDATION, Phase.LOADING, Phase.OPTIMIZER),
        ],
        start=4,
    ):
        for phase in phases:
            watch.enter(phase)
            clock[0] += 2
        watch.step = step
    _, first, second = watch.take_ends()
    # The time, then loading, forward, backward, and the optimizer of the step before.
    assert [b - a for a, b in zip(first, second, strict=True)] == [8, 2, 0, 0, 2]
    assert watch.take_ends() == [second]
    watch.step = 9
    assert len(watch.take_ends()) == 1  # this one: what was before belongs to no step


def test_the_last_ends_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.watch._MOST_ENDS", 3)
    watch = Watch()
    for watch.step in range(9):
        watch.enter(Phase.LOADING)
    times = [end[0] for end in watch.take_ends()]
    assert len(times) <= 3
    assert times == sorted(times)
    assert times[-1] < watch.since


def test_whoever_wants_to_know_is_told_of_phases() -> None:
    watch, told = Watch(), []
    watch.listen(told.append)
    watch.listen(told.append)  # once is enough
    watch.enter(Phase.FORWARD)
    assert told == [Phase.FORWARD]
    watch.unlisten(told.append)
    watch.enter(Phase.BACKWARD)
    assert told == [Phase.FORWARD]
