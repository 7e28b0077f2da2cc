"""A run in a process of its own, seen from outside: its ranks, what they do, what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.soaking.program import RANKS, Spec
from trainer.watch import Phase

ROOT = Path(__file__).parents[2]
PROGRAM = "benchmarks.soaking.program"
LIMIT_S = 120.0
"""The longest that a run may take."""
CLEAR_S = 10.0
"""The longest after its end that something of it may still be there."""
_POLL_S = 0.0005
_TORCHRUN = [
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node=2",
    "--max-restarts=3",
]
_CACHE = "torchinductor_"  # one folder per user, which torch makes when it is imported


class Broken(Exception):  # noqa: N818 - a promise, not a program
    """Raised when the trainer did not do what it promises."""


class Ended(Exception):  # noqa: N818 - no error
    """Raised when a run ended before the moment came for which somebody waited."""


class Event(NamedTuple):
    """What the program told.

    Attributes:
        what: ``fit`` where it begins, ``step`` after each, ``harm`` where it hurt itself.
        time: By `time.monotonic`.
        attempt: How often the ranks had been started again.
        step: The optimizer steps done.
    """

    what: str
    time: float
    attempt: int
    step: int


class Doing(NamedTuple):
    """What a rank was doing.

    Attributes:
        phase: By its own note.
        step: The steps it had done.
    """

    phase: Phase
    step: int


class Board:
    """The notes of a run's ranks, for one attempt, also when the run has removed them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)

    def read(self) -> list[Doing]:
        """Return the notes, in rank order; none before they are written."""
        values = array("d", os.pread(self._file.fileno(), 2**16, 0))
        width = len(values) // RANKS
        slots = [values[n * width : (n + 1) * width] for n in range(RANKS)] if width else []
        return [Doing(Phase(int(slot[0])), int(slot[2])) for slot in slots]

    def close(self) -> None:
        """Let the file go."""
        self._file.close()


class Running:
    """A run. Everything that it starts can be told by a mark in the environment.

    Attributes:
        spec: What it does.
        pid: Of the process that was started.
        started: When, by `time.monotonic`.
        harmed: When the last harm was done to it from outside; None if it was not.
        moment: What was being done when it was.
        attempts: How often the ranks were started, as far as `doing` has seen.
        victim: The rank that was harmed.
    """

    def __init__(self, spec: Spec, tmp: Path | None = None) -> None:
        """Start it.

        Args:
            spec: What it does.
            tmp: Its temporary folder; None for one of its own.
        """
        self.spec = spec
        self.victim = spec.rank
        self.harmed: float | None = None
        self.moment = ""
        self.attempts = 0
        self._mark = f"SOAK_RUN={uuid.uuid4().hex}"
        folder, run = Path(spec.folder), self._mark[-6:]
        self.tmp = tmp or folder / f"tmp-{run}"
        self.tmp.mkdir(parents=True, exist_ok=True)
        self._shared_memory = set(os.listdir("/dev/shm"))
        self._board: Board | None = None
        self._ranks: list[int] = []
        self.out, self.err = folder / f"{run}.out", folder / f"{run}.err"
        name, value = self._mark.split("=")
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "TMPDIR": str(self.tmp), "PYTHONPATH": paths, name: value}
        command = [sys.executable, *(_TORCHRUN if spec.torchrun else []), "-m", PROGRAM]
        self.started = time.monotonic()
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self._process = subprocess.Popen(
                [*command, spec.dumped()],
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exception: object) -> None:
        """End whatever is left of it, because somebody gives it up."""
        for pid in self.processes():
            _signal(pid, signal.SIGKILL)
        self._process.wait()
        if self._board is not None:
            self._board.close()

    # While it runs.

    def is_running(self) -> bool:
        """Whether the process that was started runs."""
        return self._process.poll() is None

    def doing(self) -> list[Doing]:
        """Return what the ranks of the newest attempt do, in rank order; or did, at the end."""
        newest = next(iter(self.tmp.glob("trainer-*/notes")), None)
        if newest is not None and (self._board is None or newest != self._board.path):
            try:
                board = Board(newest)
            except FileNotFoundError:  # the attempt has just ended
                return []
            if self._board is not None:
                self._board.close()
            self._board = board
            self.attempts += 1
            self._ranks = []
        return [] if self._board is None else self._board.read()

    def ranks(self) -> list[int]:
        """Return the processes of the ranks, in rank order, as far as they are started."""
        if len(self._ranks) < RANKS:
            children = self.children()
            self._ranks = [pid for pid in children if PROGRAM.encode() in _read(pid, "cmdline")]
        return self._ranks

    def children(self, pid: int | None = None) -> list[int]:
        """Return the children of a process, of that which was started at first, oldest first."""
        found = []
        for path in Path(f"/proc/{pid or self.pid}/task").glob("*/children"):
            try:
                found += [int(pid) for pid in path.read_text().split()]
            except OSError:  # the thread has ended
                continue
        return sorted(found)

    def processes(self) -> list[int]:
        """Return everything that was started on the way and still runs."""
        mark = self._mark.encode()
        numbers = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
        return [pid for pid in numbers if mark in _read(pid, "environ")]

    def events(self, what: str) -> list[Event]:
        """Return what the program has told so far, all its lives together."""
        lines = self.spec.events.read_text().splitlines() if self.spec.events.exists() else []
        parts = (line.split() for line in lines)
        return [Event(name, float(t), int(a), int(s)) for name, t, a, s in parts if name == what]

    def wait_until(self, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Wait, looking often.

        Raises:
            Ended: If the run ends first.
            Broken: If it takes too long.
        """
        deadline = time.monotonic() + limit_s
        while not condition():
            if not self.is_running():
                raise Ended
            if time.monotonic() > deadline:
                raise Broken(f"nothing happened for {limit_s:g} s: {self.doing()}")
            time.sleep(_POLL_S)

    def kill(self, *pids: int, number: int = signal.SIGKILL) -> None:
        """Send a signal, and note when; a negative number means a process group."""
        self.harmed = time.monotonic()
        for pid in pids:
            _signal(pid, number)

    # When it ends.

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Return the exit code.

        Raises:
            Broken: If it does not end in time.
        """
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise Broken(f"it did not end within {limit_s:g} s: {self.doing()}") from None

    def cleared(self, files_too: bool = True) -> float:
        """Wait until nothing of the run is left, and return when that was.

        Args:
            files_too: Whether a file may not stay, as a process may not.

        Raises:
            Broken: If something stays: a process, or a file in the temporary folder or /dev/shm.
        """
        deadline = time.monotonic() + CLEAR_S
        while True:
            processes = [f"{pid} {_read(pid, 'cmdline')!r}" for pid in self.processes()]
            in_memory = set(os.listdir("/dev/shm")) - self._shared_memory
            in_tmp = {name for name in os.listdir(self.tmp) if not name.startswith(_CACHE)}
            files = [*in_tmp, *in_memory] if files_too else []
            if not processes and not files:
                return time.monotonic()
            if time.monotonic() > deadline:
                raise Broken(f"after {CLEAR_S:g} s there are still {[*processes, *files]}")
            time.sleep(0.02)

    def again(self, **options: Any) -> Running:
        """Run the same command again, with ``resume=auto`` and such options as are given."""
        options = {**self.spec.options, "resume": "auto", **options}
        return Running(replace(self.spec, options=options))

    # What came of it.

    def bits(self) -> str:
        """Return the hash of the weights that the program had at its end."""
        lines = self.out.read_text().splitlines()
        found = {line.split()[1] for line in lines if line.startswith("DONE ")}
        if len(found) != 1:
            raise Broken(f"the run ended without weights: {lines}")
        return found.pop()

    def measured(self) -> list[dict[str, Any]]:
        """Return what it wrote to metrics.jsonl."""
        return measured(self.spec.run_dir)


def newest_checkpoint(run_dir: Path) -> tuple[int, Path | None]:
    """Return the newest checkpoint and its step; 0 if there is none."""
    steps = {int(path.name[5:]): path for path in run_dir.glob("checkpoints/step-*")}
    newest = max(steps, default=0)
    return newest, steps.get(newest)


def measured(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without what depends on the clock."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if k != "time_s" and not k.startswith("perf/")}
        for line in lines
    ]


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has ended
        os.kill(pid, number)


def _read(pid: int, name: str) -> bytes:
    """Return a file of a process; nothing if it is gone, or dead and not waited for."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
