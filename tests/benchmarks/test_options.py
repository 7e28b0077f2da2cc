"""What the benchmarks refuse on their command lines, and files there that are no programs."""

from __future__ import annotations

import importlib
import runpy
import sys

import pytest


@pytest.mark.parametrize(
    "given",
    [
        "checkpoint --rounds 0",
        "checkpoint --mebibytes 0",
        "compiled recipes --rounds -1",
        "compiled recipes --ranks 1 0",
        "compiled overlap --mbit 0",
        "compiled overlap --compute-ms nan",
        "compression --rounds 0",
        "compression --seeds 0",
        "memory --data 0",
        "network steps --steps 0",
        "network steps --hosts 1",
        "network steps --mbit none -5",
        "network steps --timeout-s inf",
        "overhead.__main__ --rounds 0",
        "parity --epochs 0",
        "planning --mbit 0",
        "reproducible --ranks 0",
        "soak --times 0",
        "soaking.agreement --steps 1.5",
        "startup --rounds few",
        "startup --ranks 0",
        "world_size --seeds 0",
    ],
)
def test_what_cannot_be_done_is_refused_at_once(
    given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *arguments = given.split()
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(f"benchmarks.{name}").main()
    value, option = arguments[-1], next(a for a in arguments if a.startswith("--"))
    assert f"argument {option}: {value} is not a " in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", ["faults", "survival"])
def test_a_part_says_which_program_uses_it(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, code in {("--help",): 0, (): 2}.items():
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as end:
            runpy.run_module(f"benchmarks.{name}", run_name="__main__")
        assert end.value.code == code
        said = capsys.readouterr()
        assert "python -m benchmarks.checkpoint --only faults" in said.out + said.err
