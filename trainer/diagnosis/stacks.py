"""Python stacks of this process and of others, also of one that cannot run Python any more.

`faulthandler` writes them on a signal, in C: it needs neither the GIL nor memory.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from traceback import FrameSummary, StackSummary, extract_stack
from typing import IO

# Programs and schedulers use SIGUSR1 and SIGUSR2 themselves.
DUMP_SIGNAL: int = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
_ANSWER_S = 0.5
_MOST_FRAMES = 20
_MOST_THREADS = 3

_THREAD = re.compile(r"^(?:Current t|T)hread 0x", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_JOB_STARTS = re.compile(
    r"/trainer/(launching/(launcher|joining|rank)|api)\.py$|torch/utils/data/_utils/worker\.py$"
)
_NOISE = re.compile(
    r"/(threading|queue|selectors|multiprocessing/\w+|torch/nn/modules/module|c10d_logger"
    r"|trainer/watch)\.py$"
)
_WAITS = re.compile(r"[._](get|wait|accept)\(")  # for work


def dump_on_signal(file: IO[str]) -> None:
    """Write this process's stacks to a file at every `DUMP_SIGNAL`, and those of its forks."""
    faulthandler.register(DUMP_SIGNAL, file, all_threads=True)


def of_this_process() -> list[StackSummary]:
    """Return the stacks of all threads but the one that asks, the main thread's first."""
    main, asks = threading.main_thread().ident, threading.get_ident()
    frames = {thread: frame for thread, frame in sys._current_frames().items() if thread != asks}
    return [extract_stack(frames[thread]) for thread in sorted(frames, key=lambda t: t != main)]


def of_another(pid: int, path: Path) -> list[StackSummary]:
    """Return the same of a process that dumps to ``path``; nothing if it does not answer."""
    if not _handles_signal(pid):
        return []
    if not path.exists():  # a system that cleans /tmp may have found it too old
        return []
    before = path.stat().st_size
    os.kill(pid, DUMP_SIGNAL)
    size, deadline = 0, time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline:
        time.sleep(0.02)
        last, size = size, path.stat().st_size - before
        if size and size == last:  # it is written piece by piece
            break
    with path.open(errors="replace") as file:
        file.seek(before)
        threads = _THREAD.split(file.read())[1:]
    return [_parsed(text) for text in reversed(threads)]  # the main thread is the oldest


def described(stacks: list[StackSummary]) -> str:
    """Return the main thread's stack as text, and those of others that do something.

    It is empty if the main thread is in nothing but a wait for work, as an idle loader worker.
    """
    first = "".join(_text(stack) for stack in stacks[:1])
    busy = [text for text in map(_text, stacks[1:]) if text and not _WAITS.search(_last(text))]
    return first + "".join(f"  in another thread:\n{text}" for text in busy[:_MOST_THREADS])


def _last(text: str) -> str:
    return text.splitlines()[-1]


def _handles_signal(pid: int) -> bool:
    """Whether the signal would do more than kill the process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> (DUMP_SIGNAL - 1) & 1)


def _parsed(dump: str) -> StackSummary:
    frames = [FrameSummary(name, int(line), where) for name, line, where in _FRAME.findall(dump)]
    return StackSummary.from_list(frames[::-1])


def _text(stack: StackSummary) -> str:
    """Return a stack without the way to the job, the noise, and the middle of a deep one."""
    starts = [i for i, frame in enumerate(stack) if _JOB_STARTS.search(frame.filename)]
    frames = [f for f in stack[starts[-1] + 1 if starts else 0 :] if not _NOISE.search(f.filename)]
    lines = StackSummary.from_list(frames).format()
    if len(lines) > _MOST_FRAMES:
        half = _MOST_FRAMES // 2
        lines[half:-half] = [f"  ... {len(lines) - 2 * half} more ...\n"]
    return "".join(lines)
