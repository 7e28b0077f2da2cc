"""Where the time of a start goes."""

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from support import Regression, fit_on, samples
from torch import Tensor

from trainer import Callback, startup
from trainer.run import Run
from trainer.startup import Start


def rows(text: str) -> dict[str, tuple[float, float]]:
    """Seconds and the end of each part, from what was printed."""
    table = text[text.index("start          seconds") :].splitlines()[1:]
    found = (re.fullmatch(r"(\w[\w ]*?)  +([\d.]+) +([\d.]+)(?: +\d+)?", line) for line in table)
    return {m[1]: (float(m[2]), float(m[3])) for m in found if m}


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_table_comes_after_the_first_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], world_size: int
) -> None:
    class Slow(Regression):
        def after_optimizer_step(self) -> None:
            time.sleep(0.03)
            print(f"STEP {self.run.step + 1}", flush=True)

    startup.begin()
    time.sleep(0.02)
    options = {"train": samples(8), "global_batch_size": 4, "max_steps": 4, "profile": "startup"}
    fit_on(world_size, Slow(), tmp_path, **options)
    before, after = re.split("STEP 2", capfd.readouterr().out)[:2]
    assert "start  " not in after
    found = rows(before)
    assert found["script"][0] >= 0.02
    assert found["update"][0] >= 0.03
    assert ("launch" in found) == ("join" in found) == (world_size > 1)
    ends = [end for _, end in found.values()]
    assert ends == sorted(ends)
    if world_size == 1:
        assert sum(seconds for seconds, _ in found.values()) == pytest.approx(ends[-1], abs=0.01)


def test_parts_are_named_by_what_they_hold(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Slow(Regression):
        def on_epoch_start(self) -> None:
            time.sleep(0.2)

        def forward(self, batch: Any) -> Tensor:
            time.sleep(0.0 if self.training else 0.3)
            return super().forward(batch)

    class Late(Callback):
        def on_fit_start(self, run: Run) -> None:
            time.sleep(0.1)

    options = {"train": samples(4), "val": samples(4), "max_steps": 1, "num_sanity_val_steps": 1}
    fit_on(1, Slow(), tmp_path, **options, callbacks=[Late()], profile="startup")
    found = rows(capfd.readouterr().out)
    least = {"callbacks": 0.1, "validate": 0.3, "epoch start": 0.2}
    assert [name for name in found if name in least] == list(least)
    for name, seconds in least.items():
        assert found[name][0] >= seconds
    assert found.get("wrap", (0.0,))[0] < 0.2


def test_after_a_restart_the_table_begins_with_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Failing(Regression):
        def after_optimizer_step(self) -> None:
            if not (tmp_path / "failed").exists():
                (tmp_path / "failed").touch()
                os._exit(3)

    startup.begin()
    time.sleep(0.02)
    options = {"train": samples(8), "global_batch_size": 4, "max_steps": 2, "max_restarts": 1}
    fit_on(1, Failing(), tmp_path / "run", **options, profile="startup")
    assert next(iter(rows(capfd.readouterr().out))) == "launch"


def test_nothing_is_printed_unless_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fit_on(1, Regression(), tmp_path, train=samples(4), max_steps=1)
    assert "start  " not in capfd.readouterr().out


def test_the_slowest_rank_counts() -> None:
    fast, slow = (startup._Part(seconds, 2 * seconds) for seconds in (1.0, 1.5))
    short = startup._Part(0.0, 3.0)
    ranks = [{"wrap": fast, "same": fast, "no time": short}, {"wrap": slow, "same": fast}]
    ranks[1]["no time"] = short
    assert startup._table(ranks).splitlines()[1:] == [
        "wrap             1.500   3.000   1",
        "same             1.000   2.000",
    ]


def test_a_start_goes_on_in_another_process() -> None:
    start = Start(1.0, [("import", 2.0)])
    startup.go_on(start)
    startup.note("launch")
    assert startup.noted() is start
    assert [name for name, _ in start.ends] == ["import", "launch"]
    startup.begin()
