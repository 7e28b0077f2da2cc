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
from trainer.speed import pace as pace_module
from trainer.speed.pace import Pace
from trainer.speed.step_times import Steps, StepTimes
from trainer.strategies.comm_clock import CommTimes

pytestmark = pytest.mark.timeout(60)

CPU = torch.device("cpu")


TEN_STEPS = Steps(
    StepTimes(0.03, 0.001, 0.001, 0.027, 0.001), np.ones(10), np.full(10, 0.003), np.full(10, 0.027)
)


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
            (Sleeper(0, 0.06, 0), samples(60), "ddp"),
            (Regression(), SlowSamples(60, 0, 0, 0.06), "ddp"),
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


def steps_of(mean: StepTimes, before: list[float], *, counts: Any = 1) -> Steps:
    """Steps with these seconds before the backward of each, which all take the same."""
    each = np.ones(len(before))
    return Steps(mean, each * counts, np.array(before), each * mean.backward)


def add_up(event: dict[str, float]) -> None:
    """The parts are of 0 to 100 % of the step, and are it together."""
    found = {name.removeprefix("perf/").removesuffix("_ms"): ms for name, ms in event.items()}
    names = ("data", "forward", "backward", "optimizer", "wait", "comm")
    parts = [found.get(name, 0.0) for name in names]
    parts[-1] -= found.get("comm_hidden", 0.0)
    assert min(parts) > -1e-4  # rounding to nanoseconds
    assert sum(parts) == pytest.approx(found["step"], abs=1e-4)


def logged(
    steps: Steps | None, comm: CommTimes | None, pace: Pace | None = None
) -> dict[str, float]:
    """What is logged where this rank measures this."""
    pace = Pace(CPU) if pace is None else pace
    has_waited = False

    def measure() -> Any:
        nonlocal has_waited
        has_waited = True
        return steps

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
    mean = StepTimes(0.012, 0.0005, 0.0015, 0.009, 0.001)
    return logged(steps_of(mean, own), CommTimes(0.007, 0.003))


def slow_backward() -> dict[str, float]:
    """Rank 1 takes 6 ms longer for each backward, so the others wait 6 ms longer."""
    wait = 0.0 if distributed.rank() == 1 else 0.006
    return logged(TEN_STEPS, CommTimes(0.005 + wait, 0.003))


def slow_while_looked_at() -> dict[str, float]:
    """What is looked at for communication are slow steps, that wait longer than the mean step."""
    backward = np.where(np.arange(10) % 5 == 4, 0.060, 0.020)
    mean = StepTimes(0.031, 0.001, 0.001, 0.028, 0.001)
    steps = steps_of(mean, [0.003] * 10)._replace(backward=backward)
    return logged(steps, CommTimes(0.053, 0.003, steps_ago=(0, 5)))


def slow_after_logging() -> list[dict[str, float]]:
    """Rank 1 takes 0.4 s in the step after a log event: where others count, and where none do."""
    late = 0.4 if distributed.rank() == 1 else 0.0
    first = np.array([0.0] + [1.0] * 9)
    backward = 0.027 if distributed.rank() == 1 else 0.427
    alone = StepTimes(0.003 + backward, 0.001, 0.001, backward, 0.001)
    comm = CommTimes(backward - 0.017, 0.003)
    return [
        logged(steps_of(TEN_STEPS.mean, [0.003 + late] + [0.003] * 9, counts=first), None),
        logged(steps_of(alone, [0.003 + late]), comm),
    ]


def more_to_wait_than_backward() -> list[dict[str, float]]:
    """Rank 1 is 90 ms late for a backward of 27 ms: the others wait elsewhere, in forward say."""
    before = [0.093 if distributed.rank() == 1 else 0.003] * 10
    steps = steps_of(TEN_STEPS.mean, before)
    return [logged(steps, comm) for comm in (None, CommTimes(0.005, 0.003), CommTimes(1.0, 0.0))]


def now_and_then() -> list[list[str]]:
    """The names of what is logged where a strategy tells communication in the second interval."""
    pace = Pace(CPU)
    found = [logged(TEN_STEPS, comm, pace) for comm in (None, CommTimes(0.005, 0.003), None)]
    return [[name.removeprefix("perf/") for name in event] for event in found]


def memory_of_each() -> tuple[list[float], float]:
    pace_module.peak_bytes = lambda device: 10**6 * (100 + distributed.rank())
    pace = Pace(CPU)
    found = logged(TEN_STEPS, None, pace)
    return pace.memory_mb, found["perf/memory_mb"]


def test_on_three_ranks(tmp_path: Path) -> None:
    (*slow, asleep), turns, uneven, others, (never, known, lacking), memory = on_ranks(
        3,
        lambda: (
            fits(tmp_path),
            taking_turns(),
            slow_backward(),
            (slow_while_looked_at(), *slow_after_logging(), *more_to_wait_than_backward()),
            now_and_then(),
            memory_of_each(),
        ),
    )[0]
    # What the network takes is in backward always, or never.
    rest = ["memory_mb", "wait_ms", "slowest_rank", "slowest_by_ms"]
    assert never == ["step_ms", "data_ms", "forward_ms", "backward_ms", "optimizer_ms", *rest]
    assert known == [*never, "comm_ms", "comm_hidden_ms"]
    assert lacking == ["step_ms", "data_ms", "forward_ms", "optimizer_ms", "memory_mb"]
    assert memory == ([100, 101, 102], 102)

    slow_forward, slow_loading = map(usual, slow)
    assert slow_forward["perf/slowest_rank"] == 1
    assert slow_loading["perf/slowest_rank"] == 2
    for event in (slow_forward, slow_loading):
        # 60 ms, less what the others take on a machine that has other work to do as well.
        assert 45 < event["perf/slowest_by_ms"] < 120
        # Two ranks of three wait.
        assert event["perf/wait_ms"] == pytest.approx(event["perf/slowest_by_ms"] * 2 / 3, rel=0.5)

    slept = {"forward": 10, "backward": 20, "optimizer": 5, "comm": 50, "comm_hidden": 20}
    for name, least in slept.items():
        assert least - 1 <= usual(asleep)[f"perf/{name}_ms"] < 2 * least + 5
    for event in (*slow[0], *slow[1], *asleep, turns, uneven, *others):
        add_up(event)

    assert turns["perf/wait_ms"] == pytest.approx(2 * 2 / 3, rel=0.01)
    assert turns["perf/slowest_by_ms"] == pytest.approx(0, abs=0.01)

    assert uneven.pop("perf/memory_mb") > 50  # a process with torch in it
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

    looked_at, after_logging, all_after_logging, *more_to_wait = others
    assert looked_at["perf/backward_ms"] == pytest.approx(10)  # 60 ms without 50 of waiting
    assert looked_at["perf/comm_ms"] == pytest.approx(3 + 18)
    assert after_logging["perf/wait_ms"] == pytest.approx(0, abs=1e-4)
    assert after_logging["perf/slowest_by_ms"] == pytest.approx(0, abs=1e-4)
    assert all_after_logging["perf/wait_ms"] == pytest.approx(400 * 2 / 3)
    assert all_after_logging["perf/slowest_rank"] == 1
    assert all_after_logging["perf/backward_ms"] == pytest.approx(20)
    assert [event["perf/wait_ms"] for event in more_to_wait] == pytest.approx([27, 2, 27])


def test_one_rank_waits_for_nobody() -> None:
    times = StepTimes(0.02, 0.001, 0.002, 0.013, 0.004)
    expected = {"step": 20, "data": 1, "forward": 2, "backward": 13, "optimizer": 4}
    found = logged(steps_of(times, [0.007] * 5), None)
    assert found.pop("perf/memory_mb") > 50
    assert found == pytest.approx({f"perf/{name}_ms": ms for name, ms in expected.items()})
    assert logged(None, None) == {}
