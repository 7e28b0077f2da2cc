"""The line that says what limits a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Regression, Sleeper, SlowSamples, fit, on_ranks, samples
from torch import nn

from trainer import Callback, distributed
from trainer.config import TrainerConfig
from trainer.run import Run
from trainer.speed.verdict import Verdict
from trainer.watch import STEP_PHASES, Phase, Watch

pytestmark = pytest.mark.timeout(60)

COMPUTE = {"step": 10, "data": 1, "forward": 3, "backward": 5, "optimizer": 0.5}
PARALLEL = {**COMPUTE, "wait": 0.2, "slowest_by": 0.1, "comm": 5, "comm_hidden": 4.7}


def verdict(
    run: Run, *events: dict[str, float], rank: int | tuple[int, ...] = 0, every: int = 50
) -> str | None:
    """What is said after a first event that must not count, and these."""
    told = Verdict(run)
    ranks = (rank,) * len(events) if isinstance(rank, int) else rank
    for values, slowest in zip(({"step": 1e9, "data": 1e9}, *events), (0, *ranks), strict=True):
        run._state.step += every
        metrics = {f"perf/{name}_ms": value for name, value in values.items()}
        if "slowest_by" in values:
            metrics["perf/slowest_rank"] = slowest
        told.add(run, {**metrics, "train/loss": 1.0})
    return told.line(run)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)


@pytest.mark.usefixtures("no_compiler")
def test_each_limit(make_run: Callable[..., Run]) -> None:
    alone: dict[str, Any] = {"world_size": 1}
    assert verdict(make_run(**alone), COMPUTE, COMPUTE) == "compute: 85 % of the step"
    waiting = {**COMPUTE, "step": 20, "data": 11}
    assert verdict(make_run(**alone, faster_loading=("a", "b", "c")), COMPUTE, waiting) == (
        "data: 40 % of the step waits for the next batch; try a, b or c"
    )
    slow = {**PARALLEL, "step": 20, "comm": 15}
    assert verdict(make_run(), slow) == (
        "communication: 52 % of the step waits for gradients (31 % of communication is hidden); "
        "try a larger global batch"
    )
    uneven = {**PARALLEL, "step": 14, "wait": 4.2, "slowest_by": 8}
    assert verdict(make_run(), uneven, uneven, rank=1) == (
        "imbalance: 60 % of the step waits for rank 1, which takes 8 ms longer than the others; "
        "look at its data, and at what else runs on its machine"
    )
    assert verdict(make_run(), uneven, uneven, rank=(0, 1)) == (
        "imbalance: 60 % of the step waits for the slowest rank, now this one, now that; try "
        "batches that cost all ranks as much (DataModule.train_indices)"
    )


def test_too_little_to_tell(make_run: Callable[..., Run]) -> None:
    assert verdict(make_run()) is None
    assert verdict(make_run(), COMPUTE, every=19) is None
    assert verdict(make_run(), COMPUTE, COMPUTE, every=19) is not None
    assert verdict(make_run(), *[COMPUTE] * 28, every=1) is None, "the first ten do not count"
    assert verdict(make_run(), *[COMPUTE] * 29, every=1) is not None
    assert verdict(make_run(), {}, {}) is None, "a device that has not been timed"


@pytest.mark.parametrize(
    ("spent", "named"),
    [
        (
            {Phase.CALLBACKS: 3.0, Phase.LOGGING: 1.0, Phase.VALIDATION: 3.5},
            "logging and callbacks: 47 %",
        ),
        ({Phase.EVALUATION_LOADING: 1.0, Phase.VALIDATION: 1.0}, "evaluation: 67 %"),
        ({Phase.EPOCH_START: 1.0}, "starting epochs: 50 %"),
        ({Phase.SAVING: 1.0}, "saving: 50 %"),
        (
            {Phase.BACKWARD: 2.0, Phase.SAVING: 1.0},
            "first steps after a log event, validation or save: 50 %",
        ),
        ({Phase.SAVING: 0.26}, "saving: 21 %"),
        ({Phase.SAVING: 0.24}, "compute: 85 %"),
        # A device is waited for while logging.
        ({Phase.LOGGING: 0.9, Phase.FORWARD: -0.9}, "compute: 85 %"),
        ({Phase.LOGGING: 0.9, Phase.FORWARD: -0.9, Phase.VALIDATION: 0.5}, "evaluation: 33 %"),
    ],
)
def test_what_is_outside_of_steps(
    spent: dict[Phase, float],
    named: str,
    make_run: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = Watch()
    monkeypatch.setattr("trainer.speed.verdict.watch", watch)
    run = make_run()
    told = Verdict(run)
    values = {f"perf/{name}_ms": value for name, value in COMPUTE.items()}
    watch.seconds[Phase.STARTING] = watch.seconds[Phase.SAVING] = 1e3
    for _ in range(3):  # of which the first does not count
        run._state.step += 50
        told.add(run, values)
        watch.seconds[Phase.BACKWARD] += 0.5 if run.step < 150 else 0  # 50 steps of 10 ms
    assert sum(watch.seconds[STEP_PHASES]) == 1
    for phase, seconds in spent.items():
        watch.seconds[phase] += seconds
    line = told.line(run)
    assert line is not None
    assert line.startswith(f"{named} of the ")


def test_what_to_try_outside_of_steps(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch()
    monkeypatch.setattr("trainer.speed.verdict.watch", watch)
    for asynchronous, tries in (
        (True, "saving less often"),
        (False, "checkpoint.asynchronous=true or saving less often"),
    ):
        config = TrainerConfig(max_epochs=1, checkpoint={"asynchronous": asynchronous})
        run = make_run(config=config)
        told = Verdict(run)
        for _ in range(2):
            run._state.step += 50
            told.add(run, {"perf/step_ms": 10.0})
        watch.seconds[Phase.BACKWARD] += 0.5
        watch.seconds[Phase.SAVING] += 0.5
        expected = f"saving: 50 % of the time, ordinary steps 50 %; try {tries}"
        assert told.line(run) == expected


class Large(nn.Linear):
    """More than the first bucket of torch's own layout."""

    def __init__(self) -> None:
        super().__init__(1000, 1000)


@pytest.mark.parametrize(
    ("options", "tries"),
    [
        ({}, "comm_hook=bf16, bucket_cap_mb=auto or"),
        ({"comm_hook": "bf16"}, "comm_hook=powersgd+bf16, bucket_cap_mb=auto or"),
        ({"comm_hook": "powersgd", "bucket_cap_mb": "auto"}, ""),
        ({"reproducible": True, "micro_batch_size": 1}, "bucket_cap_mb=auto or"),
        ({"strategy": {"_target_": "a.Strategy"}}, ""),
    ],
)
def test_what_is_on_or_refused_is_not_advised(
    options: dict[str, Any], tries: str, make_run: Callable[..., Run]
) -> None:
    run = make_run(task=Large(), config=TrainerConfig(max_epochs=1, **options))
    line = verdict(run, {**PARALLEL, "step": 20, "comm": 15})
    assert line is not None
    assert line.split("; try ")[1] == f"{tries} a larger global batch".strip()


def test_faster_computing(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def tries(**fields: Any) -> list[str]:
        line = verdict(make_run(**fields), PARALLEL)
        assert line is not None
        return line.split("; try ")[1:]

    (tmp_path / "c++").touch(mode=0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    assert tries() == [], "no headers"
    (tmp_path / "Python.h").touch()
    assert tries() == ["compile=true"]
    assert tries(config=TrainerConfig(max_epochs=1, compile=True)) == []
    task = Large()
    task._compiled_call_impl = print
    assert tries(task=task) == []

    monkeypatch.setattr("trainer.speed.verdict.find_spec", lambda _: object())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    two = {"device": "cuda:0", "config": TrainerConfig(max_epochs=1, devices=2)}
    assert tries(**two) == ["precision=bf16, devices=4 or compile=true"]
    half = TrainerConfig(max_epochs=1, devices="auto", precision="bf16")
    assert tries(**{**two, "config": half}) == ["compile=true"]


# --- real ranks -----------------------------------------------------------------------------------


class Judge(Callback):
    line: str | None = None

    def on_fit_start(self, run: Run) -> None:
        self.verdict = Verdict(run)

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        self.verdict.add(run, metrics)
        self.line = self.verdict.line(
            run
        )  # before the last save, which takes long for so few steps


def judged(folder: Path) -> dict[str, str]:
    """What is said of fits in which one thing takes most of the time, also on a busy machine."""
    slow_network = {"_target_": "slow_network.SlowNetwork", "seconds": 0.03}
    found = {}
    for limit, task, train, strategy in (
        ("data", Regression(), SlowSamples(60, 0.01, 0.01), "ddp"),
        ("communication", Regression(), samples(60), slow_network),
        ("imbalance", Sleeper(0.001, 0.041), samples(60), "ddp"),
        ("compute", Sleeper(0.06, 0.06), samples(60), "ddp"),
    ):
        judge = Judge()
        fit(
            task,
            folder / limit,
            train=train,
            strategy=strategy,
            global_batch_size=2,
            max_epochs=1,
            log_every_n_steps=10,
            callbacks=[judge] if distributed.rank() == 0 else [],
        )
        found[limit] = distributed.broadcast_object(judge.line)
    return found


def test_real_ranks(tmp_path: Path) -> None:
    found = on_ranks(2, judged, tmp_path)[0]
    for limit, line in found.items():
        assert line.startswith(f"{limit}: ")
    assert "; try num_workers=" in found["data"]
    assert "waits for rank 1, which takes" in found["imbalance"]
