"""Where the time of a step goes, measured on real ranks in the collective of the logbook."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from support import Regression, Sleeper, SlowSamples, fit, on_ranks, samples

from trainer import Callback, distributed
from trainer.logbook import Logbook
from trainer.pace import Pace
from trainer.step_times import StepTimes
from trainer.strategies.comm_clock import CommTimes

pytestmark = pytest.mark.timeout(60)

CPU = torch.device("cpu")


class Seen(Callback):
    def __init__(self) -> None:
        self.events: list[dict[str, float]] = []

    def on_log(self, run: Any, metrics: dict[str, float]) -> None:
        self.events.append(
            {name: value for name, value in metrics.items() if name.startswith("perf/")}
        )


def fits(folder: Path) -> list[list[dict[str, float]]]:
    """The log events of each fit, without the first: some things only the first steps need."""
    found = []
    asleep = Sleeper(0.01, 0.01, 0.01, backward_s=0.02, update_s=0.005)
    slow_network = {"_target_": "slow_network.SlowNetwork", "seconds": 0.03, "bucket_cap_mb": 1e-6}
    for number, (task, train, strategy) in enumerate(
        [
            (Sleeper(0, 0.02, 0), samples(60), "ddp"),
            (Regression(), SlowSamples(60, 0, 0, 0.02), "ddp"),
            (asleep, samples(60), slow_network),
        ]
    ):
        seen = Seen()
        fit(
            task,
            folder / str(number),
            train=train,
            val=samples(3),
            strategy=strategy,
            global_batch_size=3,
            max_epochs=1,
            log_every_n_steps=5,
            validate_every_n_steps=5,
            callbacks=[seen] if distributed.rank() == 0 else [],
        )
        found.append(seen.events[1:])
    return found


def usual(events: list[dict[str, float]]) -> dict[str, float]:
    """The median of each value, for a machine may be busy with other things now and then."""
    return {name: median(event[name] for event in events) for name in events[0]}


def logged(
    own: list[float], times: StepTimes | None, comm: CommTimes | None, pace: Pace | None = None
) -> dict[str, float]:
    """What is logged where this rank measures this."""
    pace = Pace(CPU) if pace is None else pace
    has_waited = False

    def measure() -> Any:
        nonlocal has_waited
        has_waited = True
        return np.array(own), times

    def take_comm_times() -> CommTimes | None:
        assert has_waited, "a strategy's events are not there yet"
        return comm

    pace._clock.take = measure  # type: ignore[method-assign]
    logbook = Logbook()
    logbook.begin(1, 0, 1)
    logbook.add(f"of {distributed.rank()}", 2.0)  # the others do not know this name
    table = pace.table(take_comm_times)
    logbook.reduce(beside=table)
    return pace.measured(table)


def taking_turns() -> dict[str, float]:
    """Three ranks take turns at being slow, for more steps than the table has columns."""
    own = [0.003 if step // 80 == distributed.rank() else 0.001 for step in range(240)]
    return logged(own, StepTimes(0.012, 0.0005, 0.0015, 0.009, 0.001), CommTimes(0.007, 0.003))


def slow_backward() -> dict[str, float]:
    """Rank 1 takes 6 ms longer for each backward, so the others wait 6 ms longer."""
    wait = 0.0 if distributed.rank() == 1 else 0.006
    return logged(
        [0.002] * 10, StepTimes(0.03, 0.001, 0.001, 0.027, 0.001), CommTimes(0.005 + wait, 0.003)
    )


def now_and_then() -> list[list[str]]:
    """The names of what is logged where a strategy tells communication in the second interval."""
    pace, times = Pace(CPU), StepTimes(0.03, 0.001, 0.001, 0.027, 0.001)
    found = [
        logged([0.002] * 10, times, comm, pace) for comm in (None, CommTimes(0.005, 0.003), None)
    ]
    return [[name.removeprefix("perf/") for name in event] for event in found]


def test_on_three_ranks(tmp_path: Path) -> None:
    (*slow, asleep), turns, uneven, (never, known, lacking) = on_ranks(
        3, lambda: (fits(tmp_path), taking_turns(), slow_backward(), now_and_then())
    )[0]
    # What the network takes is in backward always, or never.
    waits = ["wait_ms", "slowest_rank", "slowest_by_ms"]
    assert never == ["step_ms", "data_ms", "forward_ms", "backward_ms", "optimizer_ms", *waits]
    assert known == [*never, "comm_ms", "comm_hidden_ms"]
    assert lacking == ["step_ms", "data_ms", "forward_ms", "optimizer_ms"]

    slow_forward, slow_loading = map(usual, slow)
    assert slow_forward["perf/slowest_rank"] == 1
    assert slow_loading["perf/slowest_rank"] == 2
    for event in (slow_forward, slow_loading):
        assert 18 < event["perf/slowest_by_ms"] < 50
        # Two ranks of three wait.
        assert event["perf/wait_ms"] == pytest.approx(event["perf/slowest_by_ms"] * 2 / 3, rel=0.5)

    slept = {"forward": 10, "backward": 20, "optimizer": 5, "comm": 50, "comm_hidden": 20}
    for name, least in slept.items():
        assert least - 1 <= usual(asleep)[f"perf/{name}_ms"] < 2 * least + 5
    for event in asleep:
        step, data, forward, backward, optimizer, wait, _, _, comm, hidden = event.values()
        parts = data + forward + backward + (comm - hidden) + wait + optimizer
        assert step == pytest.approx(parts, rel=0.01)

    assert turns["perf/wait_ms"] == pytest.approx(2 * 2 / 3, rel=0.01)
    assert turns["perf/slowest_by_ms"] == pytest.approx(0, abs=0.01)

    assert uneven == pytest.approx(
        {
            "perf/step_ms": 30,
            "perf/data_ms": 1,
            "perf/forward_ms": 1,
            "perf/backward_ms": 21,
            "perf/optimizer_ms": 1,
            "perf/wait_ms": 6 * 2 / 3,
            "perf/slowest_rank": 1,
            "perf/slowest_by_ms": 6,
            "perf/comm_hidden_ms": 3,
            "perf/comm_ms": 5,  # without the wait
        }
    )


def test_one_rank_waits_for_nobody() -> None:
    times = StepTimes(0.02, 0.001, 0.002, 0.013, 0.004)
    expected = {"step": 20, "data": 1, "forward": 2, "backward": 13, "optimizer": 4}
    found = logged([0.003] * 5, times, None)
    assert found == pytest.approx({f"perf/{name}_ms": ms for name, ms in expected.items()})
    assert logged([], None, None) == {}
