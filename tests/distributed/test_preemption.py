"""Signals that ask a run to save and stop, sent to real ranks wherever they are."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from test_processes import Program

pytestmark = pytest.mark.timeout(600)  # many programs are run in one fixture

SCRIPT = Path(__file__).with_name("preempted.py")
SOON_S = 30  # on a busy machine

Signals = signal.Signals


def program(folder: Path, *args: object, **env: str) -> Program:
    folder.mkdir(exist_ok=True)
    return Program([sys.executable, str(SCRIPT), *map(str, args)], folder, **env)


def place(running: Program) -> int:
    """Wait until the program tells that it is where the signal is to find it."""
    for line in running.process.stdout:
        if line.startswith("AT "):
            return int(line.split()[1])
    raise AssertionError(running.process.stderr.read())


def to_rank(pid: int, running: Program, number: int) -> None:
    os.kill(pid, number)


def to_parent(pid: int, running: Program, number: int) -> None:
    os.kill(running.process.pid, number)


def to_everybody(pid: int, running: Program, number: int) -> None:
    for found in running.processes():
        with suppress(ProcessLookupError):
            os.kill(found, number)


def to_group(pid: int, running: Program, number: int) -> None:
    os.killpg(running.process.pid, number)


CASES: dict[str, tuple[Any, ...]] = {
    # where it is, ranks, who gets the signal, which ones, exit code
    "rank in forward": ("forward", 2, to_rank, [Signals.SIGTERM] * 2, 143),
    "parent in validation": ("validation", 2, to_parent, [Signals.SIGUSR1], 143),
    "rank in validation": ("validation", 2, to_rank, [Signals.SIGUSR1], 143),
    "everybody while loading": ("worker", 2, to_everybody, [Signals.SIGTERM] * 2, 143),
    "one process while saving": ("saving", 1, to_parent, [Signals.SIGTERM], 143),
    "Ctrl-C": ("forward", 2, to_group, [Signals.SIGINT], -Signals.SIGINT),
    "Ctrl-C, one process": ("forward", 1, to_group, [Signals.SIGINT], -Signals.SIGINT),
}


Stopped = tuple[Path, int, str, str, float]  # folder, exit code, output, errors, seconds to the end


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: Any) -> dict[str, Stopped]:
    """Every case once, two at a time."""
    fake = tmp_path_factory.mktemp("bin") / "scontrol"
    fake.write_text('#!/bin/sh\necho "$@" > requeued\n')
    fake.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "17", "PATH": f"{fake.parent}:{os.environ['PATH']}"}
    folders = [tmp_path_factory.mktemp("run") for _ in CASES]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda name, folder: stop(name, folder, slurm), CASES, folders)
        return dict(zip(CASES, found, strict=True))


def stop(name: str, folder: Path, slurm: dict[str, str]) -> Stopped:
    """Run a case, and see that what it names as saved is there: a resume may remove it."""
    where, devices, send, numbers, _ = CASES[name]
    running = program(folder, "fit", "run", devices, where, **slurm)
    pid = place(running)
    sent = time.monotonic()
    for number in numbers:
        send(pid, running, number)
        time.sleep(0.05)
    code, stdout, stderr = running.end(within=2 * SOON_S)
    seconds = time.monotonic() - sent
    (told,) = re.findall(r"stopped by \w+ at step (\d+); checkpoint: (\S+)", stderr)
    assert told[1].endswith(f"run/checkpoints/step-{int(told[0]):08d}")
    assert Path(told[1], "manifest.json").is_file()
    return folder, code, stdout, stderr, seconds


@pytest.fixture(scope="module")
def ends(stopped: Any, tmp_path_factory: Any) -> dict[str, str]:
    """The weights at the end of every resumed run, and of one that was never stopped."""
    folders = [folder / "run" for folder, *_ in stopped.values()]
    folder = tmp_path_factory.mktemp("resumed")
    code, stdout, stderr = program(folder, "resume", "whole", *folders).end(within=150)
    assert code == 0, stderr
    found = re.findall(r"DONE 40 (\S+)", stdout)
    return dict(zip(["whole", *stopped], found, strict=True)) | {"folder": str(folder / "whole")}


@pytest.mark.parametrize("name", CASES)
def test_a_signal_saves_and_stops(name: str, stopped: Any, ends: Any) -> None:
    number = CASES[name][3][0]
    folder, code, stdout, stderr, seconds = stopped[name]
    assert code == CASES[name][4]
    assert "DONE" not in stdout
    assert f"stopped by {number.name} at step" in stderr
    assert stderr.count("Traceback") == (number == Signals.SIGINT)  # of the caller
    assert seconds < SOON_S
    asked = folder / "requeued"
    assert asked.exists() == (number == Signals.SIGUSR1)
    if asked.exists():
        assert asked.read_text() == "requeue 17\n"


@pytest.mark.parametrize("name", CASES)
def test_it_goes_on_as_if_nothing_had_been(name: str, stopped: Any, ends: Any) -> None:
    assert ends[name] == ends["whole"]
    events = [lines(Path(ends["folder"])), lines(stopped[name][0] / "run")]
    assert events[0] == events[1]


def test_the_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    running = program(tmp_path, "fit", "run", 2, "forward")
    place(running)
    for _ in range(2):
        time.sleep(0.1)
        os.killpg(running.process.pid, signal.SIGINT)
    code, _, stderr = running.end(within=SOON_S)
    assert code == -signal.SIGINT
    assert "Ctrl-C again stops at once" in stderr
    assert "stopped by" not in stderr


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """What a run has logged, without the time."""
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for event in events:
        del event["time_s"]
        for name in [name for name in event if name.startswith("perf/")]:
            del event[name]
    return events
