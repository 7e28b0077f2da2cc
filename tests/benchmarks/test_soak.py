"""The benchmark that attacks runs: one killed rank and one flipped bit, and that it can tell."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from benchmarks import soak
from benchmarks.soak import FAULTS, Row, report
from benchmarks.soaking.checks import Undisturbed, has_fallen_back
from benchmarks.soaking.program import SAVE_EVERY, Spec, train
from benchmarks.soaking.running import Broken, Running, measured
from benchmarks.soaking.storage import damage

FAST_S = 0.002


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("soak")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Undisturbed:
    """One rank in this process: at any world size the bits are the same."""
    spec = Spec(str(folder / "undisturbed"), options={"devices": 1}, pace_s=0)
    return Undisturbed(train(spec), measured(spec.run_dir))


def test_a_killed_rank_and_a_flipped_bit(undisturbed: Undisturbed, folder: Path) -> None:
    (kill,) = (fault for fault in FAULTS if fault.name == "kill-rank")
    flipped = Spec(str(folder / "undisturbed"), options={"resume": "auto"}, pace_s=FAST_S)
    damage(flipped.run_dir, Random(1), "flip")
    with ThreadPoolExecutor() as pool, Running(flipped) as resumed:
        killed = pool.submit(kill.attempt, undisturbed, folder / "killed", Random(1), "backward")
        fallen_back = has_fallen_back(resumed, undisturbed)
        moment, went_on = killed.result()
    assert fallen_back.lost == SAVE_EVERY
    assert went_on.lost <= 2 * SAVE_EVERY
    row = Row()
    row.held.append(went_on)
    row.broken = 1
    assert "| 2     | 1    |" in report({(kill, moment): row}, markdown=True).splitlines()[-1]

    other = replace(undisturbed, bits="0" * 64)
    with pytest.raises(Broken, match="weights"):
        other.check(resumed)
    other = replace(undisturbed, measured=[*undisturbed.measured, {}])
    with pytest.raises(Broken, match="metrics"):
        other.check(resumed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--moment", "bakward"], "invalid choice: 'bakward'"),
        (["--faults", "stop", "foo"], "no row's name begins with 'foo'"),
        (["--only", "hang-worker", "--moment", "backward"], "nothing is left to try"),
    ],
)
def test_a_choice_that_leaves_nothing_to_try_is_refused(
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(soak, "_enter_namespace", lambda: None)
    monkeypatch.setattr(sys, "argv", ["soak", *options])
    with pytest.raises(SystemExit, match="2"):
        soak.main()
    assert message in capsys.readouterr().err
