"""What a checkpoint survives: faults that are tried one by one.

Each function here yields for every trial whether all was as it should be: afterwards the checkpoint
before is there, or the new one, whole; the next start cleans up; and the next save works.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.common import part_of, scratch
from benchmarks.faults import Disk, Failing, Killing, damage, interfering, quickly
from trainer import load_weights
from trainer.checkpoint.finding import newest_valid, store_of
from trainer.checkpoint.manifest import FOLDER, verify
from trainer.checkpoint.snapshot import Snapshot
from trainer.checkpoint.store import LocalStore
from trainer.checkpoint.writer import CheckpointWriter, read_state
from trainer.config import CheckpointConfig

SAVES = [1, 2, 2]  # the steps that are saved: a first one, the next, and that one again


def snapshot(step: int, number: int) -> Snapshot:
    """Return something small whose content tells which save it is of."""
    weights = {"w": torch.full((300,), float(number))}
    return Snapshot(step, weights, {"number": number, "m": weights["w"] + 1}, {"step": step}, 1)


def open_writer(run_dir: Path, **options: Any) -> CheckpointWriter:
    """Return a writer without a thread, which keeps one checkpoint."""
    config = CheckpointConfig(keep=1, asynchronous=False, **options)
    return CheckpointWriter(LocalStore(run_dir / FOLDER), config)


def save_all(run_dir: Path, done: Callable[[int], None]) -> None:
    """Save the checkpoints of `SAVES` in a new run; ``done`` is told how many there are."""
    writer = open_writer(run_dir)
    for number, step in enumerate(SAVES, start=1):
        writer.save(snapshot(step, number))
        done(number)


def found(run_dir: Path) -> int:
    """Return which save a resumed run would go on from, 0 for none; it must be whole."""
    path = newest_valid(store_of(run_dir))
    if path is None:
        return 0
    number: int = read_state(path)["number"]
    module = nn.ParameterDict({"w": torch.zeros(300)})
    load_weights(module, path)
    assert module["w"].tolist() == [float(number)] * 300
    return number


def holds(run_dir: Path, completed: int) -> bool:
    """Whether a run is as it should be after a fault.

    Args:
        run_dir: Its folder.
        completed: How many saves had returned before.
    """
    with redirect_stderr(io.StringIO()), quickly(run_dir):
        number = found(run_dir)
        if number not in (completed, completed + 1):
            return False
        writer = open_writer(run_dir)  # cleans up
        names = {path.name for path in (run_dir / FOLDER).iterdir()}
        expected = {"best", "last", f"step-{SAVES[number - 1]:08d}"} if number else set()
        if found(run_dir) != number or not expected <= names or len(names) > 4:
            return False
        writer.save(snapshot(3, 9))
        names = {path.name for path in (run_dir / FOLDER).iterdir()}
        return found(run_dir) == 9 and names == {"best", "last", "step-00000003"}


def kills(every: int = 1) -> Iterator[bool]:
    """Kill the writer before calls that change a file, and in the middle of writes.

    Args:
        every: Try every so many calls.
    """
    for moment in itertools.count(step=every):
        with scratch() as run_dir:
            status, completed = _killed(run_dir, moment, save_all)
            if status == 0:
                return
            yield status == -signal.SIGKILL and holds(run_dir, completed)


def kills_at_the_start(is_damaged: bool) -> Iterator[bool]:
    """Kill a run that cleans up what another one, killed before it, has left.

    Args:
        is_damaged: Whether the newer of two checkpoints of one step is damaged.
    """
    for moment in itertools.count():
        with scratch() as run_dir, quickly(run_dir):
            save_all(run_dir, lambda number: None)
            last = run_dir / FOLDER / "step-00000002"
            shutil.copytree(last, last.with_suffix(".old"))
            shutil.copytree(last, last.with_name(".tmp-step-00000003"))
            last.with_name(".tmp-best").symlink_to(last.name)
            if is_damaged:
                damage(last / "state.pt", "flip", random.Random(moment))
            status, _ = _killed(run_dir, moment, lambda run_dir, done: open_writer(run_dir))
            if status == 0:
                return
            yield status == -signal.SIGKILL and holds(run_dir, len(SAVES))


def _killed(run_dir: Path, moment: int, act: Callable[..., Any]) -> tuple[int, int]:
    """Return how a process ended that was to be killed, and how many saves had returned."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(60)
            with interfering(run_dir, Killing(moment).before), redirect_stderr(io.StringIO()):
                act(run_dir, lambda number: os.write(writing, b"."))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    completed = len(os.read(reading, 100))
    os.close(reading)
    if status > 0:
        raise RuntimeError("the process failed before it was killed; it has printed why")
    return status, completed


def failures(error: int, lasting: bool, every: int = 1) -> Iterator[bool]:
    """Raise an error at calls that change a file, or from there on, and train on.

    Args:
        error: Its number.
        lasting: Whether all later calls fail too.
        every: Try every so many calls.
    """
    for moment in itertools.count(step=every):
        fail = Failing(range(moment, sys.maxsize if lasting else moment + 1), error)
        with scratch() as run_dir, redirect_stderr(io.StringIO()) as said:
            writer = open_writer(run_dir, on_error="warn")
            there, is_right = 0, True
            with interfering(run_dir, fail.before):
                for number, step in enumerate(SAVES, start=1):
                    writer.save(snapshot(step, number))
                    is_right &= found(run_dir) in (there, number)
                    there = found(run_dir)
            if fail.calls <= moment:
                return
            is_right &= os.strerror(error) in said.getvalue()
            yield is_right and holds(run_dir, there)


def power_failures(lucks: tuple[float, ...]) -> Iterator[bool]:
    """Cut the power before every call that changes a file.

    Args:
        lucks: How likely it is that a change is on the disk that nobody has brought there; each is
            tried at every call.
    """
    rng = random.Random(0)
    held: list[bool] = []
    completed = 0

    def note(number: int) -> None:
        nonlocal completed
        completed = number
        cut()

    def cut(name: str = "", args: tuple[Any, ...] = ()) -> None:
        for luck in lucks:
            with scratch() as folder:
                disk.after_power_failure(folder / "run", rng, luck)
                held.append(holds(folder / "run", completed))
        if name:
            disk.before(name, args)

    with scratch() as run_dir:
        disk = Disk(run_dir)
        with interfering(run_dir, cut):
            save_all(run_dir, note)
    yield from held


def damages(trials: int) -> Iterator[bool]:
    """Damage a checkpoint in every way, in every file."""
    rng = random.Random(0)
    with scratch() as run_dir:
        save_all(run_dir, lambda _: None)
        path = newest_valid(store_of(run_dir))
        assert path is not None
        files = {file: file.read_bytes() for file in sorted(path.iterdir())}
        ways = itertools.product(("flip", "cut", "zero", "add"), files)
        for how, file in itertools.islice(itertools.cycle(ways), trials):
            damage(file, how, rng)
            yield not _is_valid(path)
            file.write_bytes(files[file])
        assert _is_valid(path)


def _is_valid(path: Path) -> bool:
    try:
        verify(path)
    except ValueError:
        return False
    return True


FAULTS: dict[str, Callable[[], Iterator[bool]]] = {
    "SIGKILL at a call": kills,
    "SIGKILL at the next start": lambda: kills_at_the_start(is_damaged=False),
    "the same, newest damaged": lambda: kills_at_the_start(is_damaged=True),
    "disk full for one call": lambda: failures(errno.ENOSPC, lasting=False),
    "disk full from a call on": lambda: failures(errno.ENOSPC, lasting=True),
    "read error for one call": lambda: failures(errno.EIO, lasting=False),
    "read-only from a call on": lambda: failures(errno.EROFS, lasting=True),
    "power failure at a call": lambda: power_failures((0.0, 0.3, 0.5, 0.7, 1.0)),
    "damaged file": lambda: damages(10_000),
}


if __name__ == "__main__":
    part_of("benchmarks.checkpoint --only faults", __doc__)
