"""Where the time from the command to the first step goes: the option ``profile=startup``.

Each part of the start is noted when it is over, in the process where it happens; ranks that this
machine starts take over what was noted before. After the first step the ranks put it together.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

from trainer import distributed
from trainer.config import TrainerConfig
from trainer.watch import Phase, watch

# What is known by its phases, of the time until a part is over: comes before it, as parts too.
_BEFORE: dict[str, dict[str, tuple[Phase, ...]]] = {
    "epoch start": {
        "callbacks": (Phase.CALLBACKS,),
        "wait": (Phase.WAITING,),
        "validate": (Phase.EVALUATION_LOADING, Phase.VALIDATION),
    },
    "rest": {
        "first batch": (Phase.LOADING,),
        "forward": (Phase.FORWARD,),
        "backward": (Phase.BACKWARD,),
        "update": (Phase.OPTIMIZER,),
    },
}
_SHOWN_S = 0.0005  # what takes less would be printed as 0.000


class Start(NamedTuple):
    """What is noted of a start.

    Attributes:
        began: When, by `time.monotonic`, which the processes of a machine share.
        ends: The parts that are over, each with the time of its end.
    """

    began: float
    ends: list[tuple[str, float]]


class _Part(NamedTuple):
    seconds: float
    until: float  # seconds after the start


def _process_start() -> float:
    """Return when this process was started; elsewhere than on Linux, when it can have been."""
    if sys.platform == "linux":
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        since_boot = ticks / os.sysconf("SC_CLK_TCK")
        return time.monotonic() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot
    return time.monotonic() - time.process_time()


def _in_phases() -> list[float]:
    """Return the seconds spent in each phase until now."""
    seconds = watch.seconds[:]
    seconds[watch.phase] += time.monotonic() - watch.since
    return seconds


_start: Start | None = Start(_process_start(), [])  # None once it is over
_noted = _in_phases()  # when the last part ended


def note(part: str) -> None:
    """Note that a part of the start is over."""
    if _start is None:
        return
    spent = _in_phases()
    end = _start.ends[-1][1] if _start.ends else _start.began
    for name, phases in _BEFORE.get(part, {}).items():
        end += sum(spent[phase] - _noted[phase] for phase in phases)
        _start.ends.append((name, end))
    _start.ends.append((part, time.monotonic()))
    _noted[:] = spent


def noted() -> Start | None:
    """Return what was noted, for a process that goes on from here."""
    return _start


def go_on(start: Start | None) -> None:
    """Take over what another process of this machine has noted."""
    global _start
    _start = start


def begin() -> None:
    """Begin a new start now: a fit, or an attempt at it, has ended, and another may follow."""
    go_on(Start(time.monotonic(), []))


def end(config: TrainerConfig) -> None:
    """After a step: if it was the first one, the start is over.

    Called on every rank; rank 0 prints the table if that is wanted.
    """
    global _start
    if _start is None:
        return
    note("rest")
    start, _start = _start, None
    if config.profile != "startup":
        return
    ranks = distributed.gather_object(_parts(start))
    if ranks is not None:
        print(_table(ranks), flush=True)


def _parts(start: Start) -> dict[str, _Part]:
    """Return the parts of this rank's start by name, in order."""
    parts: dict[str, _Part] = {}
    last = start.began
    for name, end in start.ends:
        parts[name] = _Part(end - last, end - start.began)
        last = end
    return parts


def _table(ranks: list[dict[str, _Part]]) -> str:
    lines = ["start          seconds   until" + ("   slowest rank" if len(ranks) > 1 else "")]
    for name in ranks[0]:
        seconds = [parts[name].seconds for parts in ranks]
        until = max(parts[name].until for parts in ranks)
        slowest = seconds.index(max(seconds)) if max(seconds) > min(seconds) else ""
        if max(seconds) >= _SHOWN_S:
            lines.append(f"{name:<13}  {max(seconds):7.3f} {until:7.3f}   {slowest}".rstrip())
    return "\n".join(lines)
