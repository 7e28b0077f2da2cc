"""Machines without a common disk; here each rank is one, with a folder of its own."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import Regression, fit, on_ranks, samples

from trainer import distributed
from trainer.checkpoint.disks import Witness, gather_newest
from trainer.config import TrainerConfig
from trainer.launching.attempt import Attempt, enter

pytestmark = pytest.mark.timeout(100)
CONFIG = TrainerConfig(resume="auto", accelerator="cpu")


def be_a_machine(name: str) -> None:
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    socket.gethostname = lambda: name


def train(run_dir: Path, steps: int) -> None:
    """Leave a checkpoint of this step."""
    fit(Regression(), run_dir, train=samples(512), max_steps=steps)


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(p.name for p in (run_dir / "checkpoints").glob("step-*"))


def outcome(job: Callable[..., Any], *args: Any) -> Any:
    try:
        return job(*args)
    except ValueError as error:
        return str(error)


def everything(root: Path) -> dict[str, Any]:
    """What happens, in turn, on a machine; all in one launch."""
    rank = distributed.rank()
    be_a_machine(f"machine{rank}")
    found: dict[str, Any] = {}

    def gather(name: str) -> None:
        problem = outcome(gather_newest, CONFIG, root / name / str(rank))
        found[name] = problem, checkpoints(root / name / str(rank))

    gather("newer elsewhere")
    gather("newer here")
    gather("damaged elsewhere")
    gather("not here")
    enter(Attempt("this", 1))
    gather("of another launch")
    enter(Attempt("this", 0))

    own = root / "witness" / str(rank)
    witness = Witness(CONFIG, own, step=2)
    found["aside"] = checkpoints(own), (own / "checkpoints" / "aside").exists()
    witness.saves(5)
    note = own / "elsewhere.json"
    found["note"] = json.loads(note.read_text()) if note.exists() else None
    Witness(CONFIG, own, step=5)
    found["old note"] = note.exists()

    shared = root / "shared"
    Witness(CONFIG, shared, step=0).saves(5)
    found["shared"] = (shared / "elsewhere.json").exists(), checkpoints(shared)
    return found


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("machines")
    for name in ("newer elsewhere", "newer here", "damaged elsewhere", "witness"):
        for rank in range(2):
            (root / name / str(rank)).mkdir(parents=True)
    for run_dir, steps in {
        "newer elsewhere/0": 1,
        "newer elsewhere/1": 3,
        "newer here/0": 3,
        "newer here/1": 2,
        "damaged elsewhere/0": 1,
        "damaged elsewhere/1": 3,
        "not here/1": 3,
        "of another launch/1": 3,
        "witness/0": 3,
        "witness/1": 3,
        "shared": 3,
    }.items():
        train(root / run_dir, steps)
    for name in ("not here", "of another launch"):
        (root / name / "0").mkdir()
    newest = root / "damaged elsewhere" / "1" / "checkpoints" / "step-00000003"
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    (root / "not here" / "0" / "elsewhere.json").write_text(json.dumps(["machine7", 9, "x"]))
    (root / "of another launch" / "0" / "elsewhere.json").write_text('["machine7", 9, "x"]')
    return on_ranks(2, everything, root)


def test_rank_0_gets_the_newest(machines: list[dict[str, Any]]) -> None:
    first, second = machines
    assert first["newer elsewhere"] == (None, ["step-00000001", "step-00000003"])
    assert second["newer elsewhere"] == (None, ["step-00000003"])
    assert first["newer here"] == (None, ["step-00000003"])
    assert second["newer here"] == (None, ["step-00000002"])


def test_what_is_damaged_is_not_sent(machines: list[dict[str, Any]]) -> None:
    assert machines[0]["damaged elsewhere"] == (None, ["step-00000001"])


def test_a_newer_one_that_nobody_has_is_named_on_every_rank(machines: list[Any]) -> None:
    for machine in machines:
        problem, names = machine["not here"]
        assert "machine7 began to save this run at step 9" in problem
        assert "if there is none of that step, remove" in problem
        assert "newest checkpoint of the machines that are: step-00000003" in problem
        assert names == ([] if machine is machines[0] else ["step-00000003"])


def test_a_restart_takes_its_own_launch_only(machines: list[dict[str, Any]]) -> None:
    assert machines[0]["of another launch"] == (None, [])


def test_other_machines_note_what_the_first_one_has(machines: list[dict[str, Any]]) -> None:
    first, second = machines
    assert first["note"] is None
    assert second["note"] == ["machine0", 5, "this"]
    assert not second["old note"]


def test_what_is_beyond_the_start_is_set_aside_on_every_machine(machines: list[Any]) -> None:
    # On rank 0's the writer does that.
    assert [machine["aside"] for machine in machines] == [(["step-00000003"], False), ([], True)]


def test_with_a_common_disk_there_is_nothing_to_do(machines: list[dict[str, Any]]) -> None:
    assert [machine["shared"] for machine in machines] == [(False, ["step-00000003"])] * 2
