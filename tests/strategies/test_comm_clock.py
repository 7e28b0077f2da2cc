"""Which steps are looked at, with a DDP that counts how often its timers are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer.strategies.comm_clock import CommClock, CommTimes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Timed:
    """A DDP whose communication takes as many seconds as it has done steps.

    Like torch's, it looks at the first ten steps and at the multiples of its rate, when it is asked
    to and before the next forward; on an accelerator that waits, in a step without a log event.
    """

    def __init__(self, device: torch.device) -> None:
        self.logger = self
        self.step, self.rate = 0, 100
        self.found: dict[str, Any] = {"bucket_sizes": "1"}
        self.waits: list[int] = []
        self.clock = CommClock(self, device)  # type: ignore[arg-type]
        self._read_step = 0

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self.rate = rate

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return self.found

    def set_runtime_stats_and_log(self) -> None:
        if self.step and (self.step <= 10 or self.step % self.rate == 0):
            nanos = self.step * 1_000_000_000
            self.found |= {
                "iteration": self.step,
                "backward_comm_time": nanos,
                "backward_compute_comm_overlap_time": nanos // 2,
            }
            if self._read_step != self.step:
                self._read_step = self.step
                self.waits.append(self.step)

    def train(self, steps: int) -> CommTimes | None:
        """Train to the next log event."""
        for _ in range(steps):
            self.set_runtime_stats_and_log()
            self.step += 1
            self.clock.after_step()
        before = len(self.waits)
        found = self.clock.take()
        del self.waits[before:]  # the host waits at a log event in any case
        return found


def test_an_accelerator_is_waited_for_at_log_events_only() -> None:
    ddp = Timed(CUDA)
    assert ddp.train(50) is not None  # one of torch's first ten
    ddp.waits.clear()
    # Logging every 50 steps, and at the end of epochs of 117: at 100, 117, 150, 200, 234, ...
    found = [ddp.train(steps) for steps in (50, 17, 33, 50, 34, 16, 50)]
    assert ddp.waits == []
    assert [None if times is None else times.total for times in found] == (
        [100, None, None, 200, None, None, 300]
    )


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_equal_intervals_are_all_measured(device: torch.device) -> None:
    for steps in (1, 2, 7, 50):
        ddp = Timed(device)
        for event in range(1, 5):
            found = ddp.train(steps)
            assert found is not None, (steps, event)
            assert steps * (event - 1) < found.total <= steps * event or event == 1
            assert found.hidden == pytest.approx(found.total / 2)
            looked_at = [ddp.step - ago for ago in found.steps_ago]
            assert sum(looked_at) / len(looked_at) == found.total


def test_a_ddp_that_has_just_been_wrapped_knows_nothing() -> None:
    ddp = Timed(CUDA)
    assert ddp.train(0) is None
    ddp.train(20)
    assert ddp.rate == 40
