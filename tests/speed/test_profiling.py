"""The trace of chosen steps: a file per rank, with the phases of each step named in it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from support import Regression, assert_equal_bits, fit_on, samples, weights

from trainer.config import TrainerConfig
from trainer.watch import watch

pytestmark = pytest.mark.timeout(60)

OPTIONS: dict[str, Any] = {"global_batch_size": 4, "micro_batch_size": 1, "max_steps": 6}


def events(run_dir: Path, rank: int) -> list[dict[str, Any]]:
    with gzip.open(run_dir / "profile" / f"rank-{rank}.json.gz") as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


def named(found: list[dict[str, Any]]) -> list[str]:
    """The names of steps and phases, in order of time."""
    ours = [event for event in found if event.get("cat") == "user_annotation"]
    names = [str(event["name"]) for event in sorted(ours, key=lambda event: float(event["ts"]))]
    return [name for name in names if name.islower() and ":" not in name]


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_rank_writes_the_steps_asked_for(
    world_size: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plain, traced = Regression(), Regression()
    fit_on(world_size, plain, tmp_path / "plain", train=samples(24), **OPTIONS)
    fit_on(world_size, traced, tmp_path / "t", train=samples(24), profile="3-4", **OPTIONS)
    assert_equal_bits(weights(traced), weights(plain))
    micro = ["data", "forward", "backward"] * (4 // world_size)
    for rank in range(world_size):
        found = events(tmp_path / "t", rank)
        phases = [name for name in named(found) if name not in ("waiting", "logging")]
        assert phases[: len(micro) + 2] == ["step 3", *micro, "optimizer"]
        assert [name for name in phases if name.startswith("step")] == ["step 3", "step 4"]
        operations = {event["name"] for event in found if event.get("cat") == "cpu_op"}
        assert {"aten::linear", "aten::mse_loss"} <= operations
    assert len(list((tmp_path / "t" / "profile").iterdir())) == world_size
    shown = capfd.readouterr()
    assert f"profile: steps 3 to 4 in {tmp_path / 't' / 'profile'}/rank-<n>.json.gz" in shown.out
    assert shown.err == ""
    assert not (tmp_path / "plain" / "profile").exists()


def test_a_run_that_ends_before_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fit_on(1, Regression(), tmp_path, train=samples(24), profile="9-12", **OPTIONS)
    assert "profile: none of steps 9 to 12 was trained" in capfd.readouterr().out
    assert not (tmp_path / "profile").exists()


class Failing(Regression):
    def after_optimizer_step(self) -> None:
        if self.run.step == 3:
            raise ValueError("enough")


def test_a_run_that_fails_leaves_what_was_traced(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="enough"):
        fit_on(1, Failing(), tmp_path, train=samples(24), profile="2-9", **OPTIONS)
    assert [name for name in named(events(tmp_path, 0)) if name.startswith("step")] == [
        "step 2",
        "step 3",
        "step 4",
    ]
    assert not watch.listeners


@pytest.mark.parametrize(
    ("given", "steps"),
    [("10-14", range(10, 15)), (7, range(7, 8)), ("startup", None), (None, None)],
)
def test_steps_are_the_first_and_the_last(given: Any, steps: range | None) -> None:
    assert TrainerConfig(profile=given).profiled_steps == steps


@pytest.mark.parametrize("given", ["14-10", "0-3", "10:14", "start", True])
def test_other_steps_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"profile=(true|'?[\w:-]+'?)( is|: the first step)"):
        TrainerConfig(profile=given)
