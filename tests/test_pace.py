"""Where the time of a step goes, measured on real ranks in the collective of the logbook."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from support import Regression, fit, on_ranks, samples
from torch import Tensor
from torch.utils.data import Dataset

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


class SlowForward(Regression):
    """Rank 1 needs 20 ms more in every forward."""

    def forward(self, batch: Any) -> Tensor:
        time.sleep(0.02 * (self.run.rank == 1))
        return super().forward(batch)


class SlowLoading(Dataset[Any]):
    """Rank 2 needs 20 ms more for its sample."""

    def __init__(self) -> None:
        self.samples = samples(60)

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02 * (distributed.rank() == 2))
        return self.samples[index]


class Sleeper(Regression):
    """Needs 10 ms for a forward, 20 in the middle of a backward and 5 for the optimizer."""

    def forward(self, batch: Any) -> Tensor:
        time.sleep(0.01)
        first, activation, last = self.net
        hidden = activation(first(batch[0]))
        if hidden.requires_grad:
            hidden.register_hook(lambda _: time.sleep(0.02))
        result: Tensor = last(hidden).squeeze(1)
        return result

    def before_optimizer_step(self) -> None:
        time.sleep(0.005)


def fits(folder: Path) -> list[list[dict[str, float]]]:
    """The log events of each fit, without the first: some things only the first steps need."""
    found = []
    slow_network = {"_target_": "slow_network.SlowNetwork", "seconds": 0.03, "bucket_cap_mb": 1e-6}
    for number, (task, train, strategy) in enumerate(
        [
            (SlowForward(), samples(60), "ddp"),
            (Regression(), SlowLoading(), "ddp"),
            (Sleeper(), samples(60), slow_network),
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


def logged(own: list[float], times: StepTimes | None, comm: CommTimes | None) -> dict[str, float]:
    """What is logged where this rank measures this."""
    pace = Pace(CPU)
    pace._clock.take = lambda: (np.array(own), times)  # type: ignore[method-assign]
    logbook = Logbook()
    logbook.begin(1, 0, 1)
    logbook.add(f"of {distributed.rank()}", 2.0)  # the others do not know this name
    table = pace.table(comm)
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


def test_on_three_ranks(tmp_path: Path) -> None:
    (*slow, asleep), turns, uneven = on_ranks(
        3, lambda: (fits(tmp_path), taking_turns(), slow_backward())
    )[0]
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
