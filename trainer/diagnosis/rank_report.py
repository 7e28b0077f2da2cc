"""What one rank says, or others see of it, when the ranks have come to a halt."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path

from trainer.diagnosis import flight_recorder, stacks
from trainer.diagnosis.flight_recorder import Collective
from trainer.watch import Note, Phase, watch

_MOST_WORKERS = 3
_PROCESS_STATES = {
    "T": "it is stopped by a signal (SIGSTOP)",
    "t": "it is stopped by a debugger",
    "D": "it waits in the kernel, as for a disk or a network mount that does not answer",
    "Z": "it has ended",
}


@dataclass(frozen=True)
class RankReport:
    """What a rank was doing.

    Attributes:
        rank: Which.
        pid: Its process.
        phase: What it was doing.
        seconds: For how long.
        step: The optimizer steps done.
        limit_s: The longest that it may stay in one phase.
        stack: Where in Python.
        waits_for: The collective that it waits for, if any.
        bucket: In a backward, the bucket of gradients that it waits for, or the last one that it
            has sent.
        num_buckets: Of how many.
        trouble: Why it cannot tell itself; empty if it does.
    """

    rank: int
    pid: int
    phase: Phase
    seconds: float
    step: int
    limit_s: float
    stack: str
    waits_for: Collective | None = None
    bucket: int = 0
    num_buckets: int = 0
    trouble: str = ""

    @classmethod
    def of_this(cls, rank: int, dumps: Path | None) -> RankReport:
        """Report on this process, from a thread beside the main one.

        Args:
            rank: Its number.
            dumps: Where its loader workers dump their stacks, if they do.
        """
        note = watch.note
        record = flight_recorder.recorded()
        waiting = [collective for collective in record if not collective.is_done]
        bucket = 0
        if note.phase == Phase.BACKWARD:
            sent = [c for c in record if not c.group and c.since > note.since]
            bucket = sum(c.is_done for c in sent) + any(not c.is_done for c in sent)
        stack = stacks.described(stacks.of_this_process())
        if dumps is not None:
            stack += _of_workers(dumps)
        return cls(
            rank=rank,
            pid=os.getpid(),
            phase=note.phase,
            seconds=time.monotonic() - note.since,
            step=note.step,
            limit_s=note.limit_s,
            stack=stack,
            waits_for=waiting[0] if waiting else None,
            bucket=bucket,
            num_buckets=watch.num_buckets,
        )

    @classmethod
    def of_silent(cls, rank: int, pid: int, note: Note, dumps: Path) -> RankReport:
        """Report on a process of this machine that does not report itself.

        Args:
            rank: Its number.
            pid: Its process.
            note: What it was doing.
            dumps: Where it dumps its stacks.
        """
        trouble, stack = _PROCESS_STATES.get(process_state(pid), ""), ""
        if not trouble:
            stack = stacks.described(stacks.of_another(pid, dumps))
            trouble = "it does not answer, most likely because compiled code holds the GIL"
        return cls(
            rank=rank,
            pid=pid,
            phase=note.phase,
            seconds=time.monotonic() - note.since,
            step=note.step,
            limit_s=note.limit_s,
            stack=stack,
            trouble=trouble,
        )

    @property
    def is_late(self) -> bool:
        """Whether it has been in its phase for too long."""
        return self.seconds > self.limit_s


def process_state(pid: int) -> str:
    """Return the letter of a process's state: R, S, D, T, Z; empty where it cannot be told."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _of_workers(dumps: Path) -> str:
    """Return where this process's loader workers are, of those that do something."""
    found = []
    for worker in multiprocessing.active_children():
        assert worker.pid is not None
        name = f"  its child process {worker.pid}"
        trouble = _PROCESS_STATES.get(process_state(worker.pid))
        if trouble:
            found.append(f"{name}: {trouble}\n")
            continue
        if stack := stacks.described(stacks.of_another(worker.pid, dumps)):
            found.append(f"{name}:\n{stack}")
    more = f"  and {len(found) - _MOST_WORKERS} more\n" if len(found) > _MOST_WORKERS else ""
    return "".join(found[:_MOST_WORKERS]) + more
