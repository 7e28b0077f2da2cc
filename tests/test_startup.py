"""Where the time of a start goes."""

import re
import time
from pathlib import Path

import pytest
from support import Regression, fit_on, samples

from trainer import startup
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
