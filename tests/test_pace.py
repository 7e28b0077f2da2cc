"""Which rank is slow, measured on real ranks in the collective of the logbook."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Regression, fit, on_ranks, samples
from torch import Tensor
from torch.utils.data import Dataset

from trainer import Callback, distributed
from trainer.logbook import Logbook
from trainer.pace import Pace

pytestmark = pytest.mark.timeout(60)


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
        self.samples = samples(30)

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02 * (distributed.rank() == 2))
        return self.samples[index]


def fits(folder: Path) -> list[dict[str, float]]:
    events = []
    for number, (task, train) in enumerate(
        [(SlowForward(), samples(30)), (Regression(), SlowLoading())]
    ):
        seen = Seen()
        fit(
            task,
            folder / str(number),
            train=train,
            val=samples(3),
            global_batch_size=3,
            max_epochs=1,
            log_every_n_steps=5,
            validate_every_n_steps=5,
            callbacks=[seen] if distributed.rank() == 0 else [],
        )
        events += seen.events[1:]  # without what only the first steps need
    return events


def unequal(_: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Three ranks take turns at being slow, for more steps than the table has columns."""
    rank, steps = distributed.rank(), 240
    pace = Pace([0.003 if step // 80 == rank else 0.001 for step in range(steps)])
    logbook = Logbook()
    logbook.begin(1, 0, 1)
    logbook.add(f"of {rank}", 2.0 + rank)  # each rank has a name that the others do not know
    means = logbook.reduce(beside=pace.table)
    return means, pace.measured()


def test_on_three_ranks(tmp_path: Path) -> None:
    events, (means, measured) = on_ranks(3, lambda: (fits(tmp_path), unequal(tmp_path)))[0]
    slow_forward, slow_loading = events
    assert slow_forward["perf/slowest_rank"] == 1
    assert slow_loading["perf/slowest_rank"] == 2
    for event in events:  # two ranks of three wait
        assert event["perf/wait_ms"] == pytest.approx(20 * 2 / 3, rel=0.5)

    assert means == {"of 0": 2.0, "of 1": 3.0, "of 2": 4.0}
    assert measured["perf/wait_ms"] == pytest.approx(2 * 2 / 3, rel=0.01)


def test_one_rank_waits_for_nobody() -> None:
    pace = Pace([0.1, 0.2])
    assert torch.equal(pace.table, torch.tensor([[100_000, 200_000]]))
    assert pace.measured() == {}
