"""Disks that are full, read-only or gone, and checkpoints that are damaged."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random

from benchmarks.soaking import moments
from benchmarks.soaking.checks import falls_back, goes_on, is_named, is_resumed
from benchmarks.soaking.fault import Fault
from benchmarks.soaking.kills import kill_parent, kill_rank
from benchmarks.soaking.moments import any_rank, wait_for
from benchmarks.soaking.program import SAVE_EVERY, Spec
from benchmarks.soaking.running import Ended, Running, newest_checkpoint

FOLDER = "checkpoints"
PAGE = 4096


def kill_and_damage(run: Running, rng: Random, moment: str) -> None:
    """Kill the run, and damage its newest checkpoint as ``moment`` says."""
    run.wait_until(lambda: newest_checkpoint(run.spec.run_dir)[0] >= 3 * SAVE_EVERY)
    wait_for(run, "forward", any_rank(rng), rng)
    run.kill(run.pid)
    run.cleared()
    run.moment = f"{moment}, {damage(run.spec.run_dir, rng, moment)}"


def damage(run_dir: Path, rng: Random, how: str) -> str:
    """Damage a file of the newest checkpoint somewhere, and return its name."""
    _, newest = newest_checkpoint(run_dir)
    assert newest is not None
    file = rng.choice(sorted(newest.iterdir()))
    if how == "remove":
        file.unlink()
        return file.name
    whole = content = file.read_bytes()
    while content == whole:  # a page may be zero already
        content = _damaged(bytearray(whole), rng, how)
    file.write_bytes(content)
    return file.name


def fill(run: Running, rng: Random, moment: str, below: str) -> None:
    """Fill the disk until the run has ended, or at least complained."""
    wait_for(run, "forward", 0, rng)
    filler = run.spec.run_dir / below / "filler"
    run.harmed = time.monotonic()
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(PAGE))
    with suppress(Ended):
        run.wait_until(lambda: "WARNING" in run.err.read_text())
    filler.unlink()


def make_read_only(run: Running, rng: Random, moment: str) -> None:
    """Make the disk read-only until the run has ended."""
    wait_for(run, "forward", 0, rng)
    disk = run.spec.run_dir / FOLDER
    run.wait_until(lambda: _remount(disk, "ro"))  # refused while a file is being written
    run.harmed = time.monotonic()
    run.wait()
    _remount(disk, "rw")


def take_away(run: Running, rng: Random, moment: str) -> None:
    """Let the checkpoints be gone until the run has ended."""
    wait_for(run, "forward", 0, rng)
    folder, away = run.spec.run_dir / FOLDER, run.spec.run_dir / "away"
    run.harmed = time.monotonic()
    folder.rename(away)
    run.wait()
    shutil.rmtree(folder, ignore_errors=True)
    away.rename(folder)


@contextmanager
def small_disk(spec: Spec, below: str = "") -> Iterator[None]:
    """Mount a disk of a few MiB at the run's folder, or at one below it."""
    folder = spec.run_dir / below
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "soak", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def _remount(folder: Path, mode: str) -> bool:
    command = ["mount", "-o", f"remount,{mode}", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _damaged(content: bytearray, rng: Random, how: str) -> bytes:
    place = rng.randrange(len(content))
    if how == "flip":
        content[place] ^= 1 << rng.randrange(8)
    elif how == "truncate":
        del content[place:]
    else:
        start = place // PAGE * PAGE
        content[start : start + PAGE] = bytes(len(content[start : start + PAGE]))
    return bytes(content)


FAULTS = [
    Fault(
        "damage",
        "a bit flipped, a page zeroed, a file cut or removed in the newest checkpoint",
        "first new step",
        falls_back,
        kill_and_damage,
        moments=("flip", "truncate", "zero", "remove"),
        times=24,
    ),
    Fault(
        "remote-rank",
        "SIGKILL of a rank, run_dir is a url",
        "first new step",
        goes_on,
        kill_rank,
        moments=moments.IN_TRAINING,
        options={"max_restarts": 3},
        remote=True,
        times=9,
    ),
    Fault(
        "remote-parent",
        "SIGKILL of the parent, run_dir is a url; the same command again",
        "nothing is left",
        is_resumed,
        kill_parent,
        moments=moments.IN_TRAINING,
        remote=True,
        times=9,
    ),
    Fault(
        "full-disk",
        "the disk is full; the same command again once it is not",
        "exit",
        partial(is_named, says="No space left on device"),
        partial(fill, below=""),
        place=small_disk,
        needs_mount=True,
    ),
    Fault(
        "full-disk-warn",
        "the checkpoints' disk is full for a while, on_error=warn",
        "the run's end",
        goes_on,
        partial(fill, below=FOLDER),
        options={"checkpoint": {"every_n_steps": SAVE_EVERY, "on_error": "warn"}},
        place=partial(small_disk, below=FOLDER),
        needs_mount=True,
    ),
    Fault(
        "read-only",
        "the checkpoints' disk becomes read-only; the same command again once it is not",
        "exit",
        partial(is_named, says="Read-only file system"),
        make_read_only,
        place=partial(small_disk, below=FOLDER),
        needs_mount=True,
    ),
    Fault(
        "vanished",
        "the checkpoints' folder is gone; the same command again once it is back",
        "exit",
        partial(is_named, says="No such file or directory"),
        take_away,
    ),
]
