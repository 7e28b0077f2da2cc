"""Ranks that die are started again, and nothing shows that they died but what is printed."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import Regression, assert_equal_bits, fit_on, samples
from torch import Tensor

from trainer import FitResult, distributed
from trainer.checkpoint import writer
from trainer.loggers import JsonlLogger


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise RuntimeError("an accident")


def crash() -> None:
    ctypes.string_at(0)


def leave() -> None:
    os._exit(3)


# At each attempt: where, which rank, how it dies, and what is printed.
DEATHS: list[tuple[str, int, Callable[[], None], str]] = [
    ("start", 0, kill, "rank 0 was killed by SIGKILL"),  # before it sets older checkpoints aside
    ("forward", 1, fail, "RuntimeError: an accident"),
    ("backward", 0, crash, "rank 0 was killed by SIGSEGV"),
    ("validation", 1, leave, "rank 1 ended with exit code 3"),
    ("start", 1, leave, "rank 1 ended with exit code 3"),  # in the middle of a restart
    ("saving", 0, kill, "rank 0 was killed by SIGKILL"),
]


def die_at(place: str, step: int) -> None:
    """Die if this attempt is to end here."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt < len(DEATHS):
        where, rank, die, _ = DEATHS[attempt]
        if (place, distributed.rank()) == (where, rank) and step >= attempt + 2:
            die()


class Mortal(Regression):
    def configure_optimizers(self) -> Any:
        die_at("start", 100)
        return super().configure_optimizers()

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        if self.run.split == "val":
            die_at("validation", self.run.step)
        else:
            die_at("forward", self.run.step)
            outputs.register_hook(lambda gradient: die_at("backward", self.run.step))
        return super().loss(outputs, batch)


def train(task: Regression, run_dir: Path, world_size: int, **options: Any) -> FitResult:
    return fit_on(
        world_size,
        task,
        run_dir,
        train=samples(24),
        val=samples(6),
        **{"max_epochs": 4, **options},
        global_batch_size=8,
        micro_batch_size=2,
        reproducible=True,
        shuffle=True,
        log_every_n_steps=1,
        checkpoint={"every_n_steps": 1},
        logger=[JsonlLogger()],
    )


def logged(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    differ = ("time_s", "perf/")
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(differ)}
        for line in lines
    ]


def test_weights_and_logs_are_those_of_an_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    undisturbed, mortal = Regression(), Mortal()
    expected = train(undisturbed, tmp_path / "undisturbed", 1)
    # What an older run left, in the folder that was given: nobody asked to go on from it.
    train(Regression(), tmp_path / "run", 2, seed=7, max_epochs=2)
    capfd.readouterr()

    write_file = writer.write_file

    def write_or_die(path: Path, write: Any) -> Any:
        die_at("saving", int(path.parent.name[-8:]))
        return write_file(path, write)

    monkeypatch.setattr(writer, "write_file", write_or_die)
    before, threads = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    found = train(mortal, tmp_path / "run", 2, max_restarts=len(DEATHS))
    assert len(os.listdir("/proc/self/fd")) == before
    assert set(threading.enumerate()) <= threads

    assert_equal_bits(mortal, undisturbed)
    assert found.step == expected.step
    assert logged(tmp_path / "run") == logged(tmp_path / "undisturbed")
    captured = capfd.readouterr()
    rest = captured.err
    for number, (_, _, _, text) in enumerate(DEATHS, 1):
        told, line, rest = rest.partition(f"\nrestart {number} of {len(DEATHS)}\n")
        assert line
        assert told.count(text) == 1
        assert told.count("Connection") == 0
    assert captured.out.count("restarting from") == 5
    assert captured.out.count("restarting as at first: this run has no checkpoint yet") == 1


def test_one_rank_is_started_again_too(tmp_path: Path) -> None:
    class Dies(Regression):
        def loss(self, outputs: Tensor, batch: Any) -> Any:
            if self.run.step == 4 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                kill()
            return super().loss(outputs, batch)

    undisturbed, dies = Regression(), Dies()
    train(undisturbed, tmp_path / "undisturbed", 1)
    train(dies, tmp_path / "run", 1, max_restarts=1)
    assert_equal_bits(dies, undisturbed)


def test_failure_that_is_no_accident_comes_twice_at_most(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Wrong(Regression):
        def loss(self, outputs: Tensor, batch: Any) -> Any:
            assert self.run.step < 3, "of no use"
            return super().loss(outputs, batch)

    with pytest.raises(AssertionError, match="of no use"):
        train(Wrong(), tmp_path, 1, max_restarts=5)
    told = capfd.readouterr().err
    assert told.count("AssertionError: of no use") == told.count("\nrestart 1 of 5\n") == 1

    with pytest.raises(ValueError, match="/nowhere is no checkpoint"):
        train(Wrong(), tmp_path, 1, max_restarts=5, resume="/nowhere")
    assert capfd.readouterr().err == ""
