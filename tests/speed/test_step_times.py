"""What the parts of a step take, by a clock that the test turns."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import trainer.speed.step_times
from trainer.speed.step_times import StepClock, StepTimes
from trainer.watch import Phase, Watch

CPU = torch.device("cpu")
STEP = (Phase.LOADING, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


class Rank:
    """A rank whose phases last as long as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.watch = Watch()
        monkeypatch.setattr(trainer.speed.step_times, "watch", self.watch)
        self.watch.step = 0

    def do(self, phase: Phase, seconds: float) -> None:
        self.watch.enter(phase)
        self.now += seconds

    def steps(self, count: int, *seconds: float) -> None:
        for _ in range(count):
            for phase, each in zip(STEP, seconds, strict=True):
                self.do(phase, each)
            self.watch.step += 1


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


def test_a_step_after_something_else_does_not_count(rank: Rank) -> None:
    clock = StepClock(CPU)
    rank.do(Phase.EPOCH_START, 1.0)
    rank.steps(1, 9, 9, 9, 4)
    rank.steps(2, 1, 2, 3, 4)
    rank.do(Phase.VALIDATION, 1.0)
    rank.steps(1, 1, 2, 30, 4)  # waits for the others in its backward
    rank.steps(1, 1, 2, 3, 4)
    rank.do(Phase.LOGGING, 1.0)
    steps = clock.take()
    assert steps is not None
    assert steps.mean == pytest.approx(StepTimes(10, 1, 2, 3, 4))
    assert steps.counts.tolist() == [0, 1, 1, 0, 1]
    assert steps.before.tolist() == pytest.approx([19, 7, 7, 8, 7])
    assert steps.backward.tolist() == pytest.approx([9, 3, 3, 30, 3])
    assert clock.take() is None

    rank.steps(1, 1, 2, 30, 4)  # there is no other
    rank.do(Phase.LOGGING, 1.0)
    steps = clock.take()
    assert steps is not None
    assert steps.mean == pytest.approx(StepTimes(37, 1, 2, 30, 4))
    assert steps.counts.tolist() == [1]
    assert steps.before.tolist() == pytest.approx([8]), "with the logging it begins with"


def test_micro_batches_are_added_up(rank: Rank) -> None:
    clock = StepClock(CPU)
    rank.steps(1, 1, 1, 1, 1)
    clock.take()
    for _ in range(3):
        for phase in STEP[:3]:
            rank.do(phase, 1.0)
    rank.do(Phase.OPTIMIZER, 1.0)
    rank.watch.step += 1
    steps = clock.take()
    assert steps is not None
    assert steps.mean == StepTimes(10, 3, 3, 3, 1)
    assert steps.before.tolist() == [7]


class Device:
    """Computes behind the host: as a stream of an accelerator, with its events."""

    def __init__(self, rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank = rank
        self.done = 0.0  # when it will have done all it was given
        self.num_events = 0
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                device.num_events += 1

            def record(self, stream: Any) -> None:
                assert stream is device, "of another device"
                self.time = max(device.done, rank.now)

            def elapsed_time(self, end: Event) -> float:
                assert device.done <= rank.now, "would wait"
                return (end.time - self.time) * 1000

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self)

    def synchronize(self) -> None:
        self.rank.now = max(self.rank.now, self.done)

    def steps(self, count: int, loading: float) -> None:
        """The host gives it 7 s of work in each step, in a second and a half."""
        for _ in range(count):
            self.rank.do(Phase.LOADING, loading)
            for phase, work in zip(STEP[1:], (2, 4, 1), strict=True):
                self.rank.do(phase, 0.5)
                self.done = max(self.done, self.rank.now) + work
            self.rank.watch.step += 1
        self.rank.do(Phase.LOGGING, 0.0)


def test_a_device_that_computes_behind_the_host(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(rank, monkeypatch)
    clock = StepClock(torch.device("cuda"))
    device.steps(5, loading=0.5)
    assert clock.take() is None  # which step would be logged, nobody knew
    assert device.num_events == 0

    device.steps(5, loading=0.5)
    steps = clock.take()
    assert device.num_events == 5  # of one step
    assert steps is not None
    # The device waits for the host in the first step after a log event, and then no more.
    assert steps.mean == pytest.approx(StepTimes(7.2, 0.2, 2, 4, 1))
    assert steps.counts.tolist() == [1] * 5
    assert steps.before.tolist() == pytest.approx([3.2] * 5)
    assert steps.backward.tolist() == pytest.approx([4] * 5)

    device.steps(5, loading=9.5)  # longer than the device computes
    steps = clock.take()
    assert steps is not None
    assert steps.mean == pytest.approx(StepTimes(12.2, 4.7, 2.5, 4, 1))

    device.steps(3, loading=0.5)  # another log event comes first
    assert clock.take() is None
    rank.do(Phase.BACKWARD, 60.0)  # waits for the rank that did the most while logging
    device.steps(3, loading=0.5)
    steps = clock.take()
    assert steps is not None
    assert steps.mean == pytest.approx(StepTimes(7.5, 0.5, 2, 4, 1)), "the parts add up"

    num_events = device.num_events
    rank.do(Phase.FINISHING, 1.0)  # the end of this fit
    assert not rank.watch.listeners
    device.steps(9, loading=0.5)
    assert device.num_events == num_events
    clock.take()  # as if it went on
    StepClock(CPU)  # a later fit
    device.steps(9, loading=0.5)
    assert device.num_events == num_events


def test_an_evaluation_before_the_step_to_time_leaves_no_events(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(rank, monkeypatch)
    clock = StepClock(torch.device("cuda"))
    device.steps(1, loading=0.5)
    clock.take()
    for _ in range(3):  # each step is logged
        for _ in range(10):
            for phase in (Phase.EVALUATION_LOADING, Phase.VALIDATION):
                rank.do(phase, 0.5)
        assert device.num_events == 0
        device.steps(1, loading=0.5)
        assert device.num_events == 5
        assert not rank.watch.listeners, "nothing is left to time"
        steps = clock.take()
        assert steps is not None
        assert steps.mean.forward == pytest.approx(2.5)
        assert steps.mean.optimizer == pytest.approx(1)
        device.num_events = 0
