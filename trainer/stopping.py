"""Signals that ask a run to save and stop, and how the ranks agree on the step at which they do.

A handler only notes the signal. At step boundaries that all ranks know, about a second apart, one
tiny all-reduce tells every rank what any of them has noted: all stop at the same step.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch

from trainer import distributed

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
AGREE_EVERY_S = 1.0

_AGAIN = (signal.SIGTERM, signal.SIGUSR1)  # come more than once, from schedulers

_received: signal.Signals | None = None
_was_interrupted = False  # by Ctrl-C
_parent: int | None = None  # of this rank, if it passes signals on to all ranks


class Stop(Exception):  # noqa: N818 - no error
    """Raised on every rank where work that may be cut short ends because one was asked to stop."""


@contextmanager
def cut_short(obey: Callable[[], None]) -> Iterator[None]:
    """Let a `Stop` end what is done in this context early, and ``obey`` it then."""
    try:
        yield
    except Stop:
        obey()


class Decision(NamedTuple):
    """What all ranks do at a step boundary.

    Attributes:
        stop: Whether a callback asked to stop.
        save: Whether a callback asked for a checkpoint.
        signal: The signal that some rank has noted, if any.
    """

    stop: bool
    save: bool
    signal: signal.Signals | None


class Agreement:
    """How the ranks come to a `Decision`, at the same steps on every rank."""

    def __init__(self, step: int) -> None:
        """Make ``step``, from which the run starts, the first at which the ranks agree."""
        self._step = self._next = step
        self._time = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Whether the ranks agree at this step boundary: the same on all of them."""
        return step >= self._next or (distributed.world_size() == 1 and _received is not None)

    def reach(self, step: int, stop: bool, save: bool) -> Decision:
        """Return what all ranks do; must be called on every rank.

        Args:
            step: The optimizer steps done.
            stop: Whether this rank's callbacks ask to stop.
            save: Whether they ask for a checkpoint.
        """
        now = time.monotonic()
        steps, seconds = step - self._step, now - self._time
        wait = int(steps * AGREE_EVERY_S / seconds) if seconds else steps
        # Not very many more than before: the steps may be slower from now on. Rank 0's count holds.
        wait = min(max(wait, 1), 10 * steps + 1) if distributed.rank() == 0 else 0
        noted = [_received == number for number in STOP_SIGNALS]
        mine = torch.tensor([int(number) for number in (stop, save, wait, *noted)])
        stop, save, wait, *noted = distributed.all_reduce_sum(mine).tolist()
        self._step, self._time, self._next = step, now, step + wait
        signals = (number for number, count in zip(STOP_SIGNALS, noted, strict=True) if count)
        return Decision(bool(stop), bool(save), next(signals, None))


def received() -> signal.Signals | None:
    """Return the first signal that this process has noted, if any."""
    return _received


def all_know() -> bool:
    """Whether a signal has come to this rank, and so to all of them: another may still be on."""
    is_shared = _parent is not None and distributed.local_world_size() == distributed.world_size()
    return _received is not None and (distributed.world_size() == 1 or is_shared)


def check() -> None:
    """Raise `Stop` on every rank if any has noted a signal; must be called on every rank."""
    if int(distributed.all_reduce_sum(torch.tensor(int(_received is not None)))):
        raise Stop


def forget() -> None:
    """Forget a signal that has been obeyed."""
    global _received, _was_interrupted
    _received, _was_interrupted = None, False


def note(number: int) -> None:
    """Note a signal; the first one counts.

    Raises:
        KeyboardInterrupt: At the second Ctrl-C.
    """
    global _received, _was_interrupted
    if number == signal.SIGINT:
        if _was_interrupted:
            raise KeyboardInterrupt
        _was_interrupted = True
        with suppress(OSError):  # not print: the handler may have interrupted one
            os.write(2, b"\nstopping after this step, and saving; Ctrl-C again stops at once\n")
    _received = _received or signal.Signals(number)


def note_in_rank(parent: int | None) -> None:
    """Note SIGTERM and SIGUSR1 from now on, in a rank.

    Args:
        parent: The process that started this rank and tells the others of the signal; None if it
            does not.
    """
    global _parent
    _parent = parent

    def handle(number: int, frame: FrameType | None) -> None:
        if _received is None and parent is not None:
            os.kill(parent, number)
        note(number)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, handle)


@contextmanager
def noted() -> Iterator[None]:
    """Note the signals that come meanwhile."""

    def handle(number: int, frame: FrameType | None) -> None:
        note(number)

    forget()
    is_main = threading.current_thread() is threading.main_thread()  # who may set handlers
    with handled(dict.fromkeys(STOP_SIGNALS, handle) if is_main else {}):
        yield


@contextmanager
def handled(handlers: Mapping[int, Any]) -> Iterator[None]:
    """Use these handlers meanwhile. A signal that is ignored, as under nohup, stays so.

    After a signal that asked to stop, another one does not kill a process on its way out: its exit
    code is to say that all is saved.
    """
    previous = {}
    for number, handler in handlers.items():
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in previous.items():
            is_leaving = _received is not None and number in _AGAIN and before == signal.SIG_DFL
            signal.signal(number, _leave if is_leaving else before)
            if is_leaving:
                atexit.unregister(_ignore)
                atexit.register(_ignore)  # so that it runs before what others registered


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def _ignore() -> None:
    for number in _AGAIN:
        if signal.getsignal(number) is _leave:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def held_back() -> Iterator[None]:
    """Start processes that do not get these signals: loader workers, which would die of them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_process(
    number: signal.Signals, step: int, saved: Path | None, tells: bool = True
) -> NoReturn:
    """End as the signal wants it, after all is saved: by Ctrl-C's exception, or exit code 143.

    Under SLURM, SIGUSR1 (``--signal=USR1@90``) also asks for the job to be queued again; after a
    SIGTERM, SLURM itself knows what to do.

    Args:
        number: The signal.
        step: Where the run stopped.
        saved: Its newest checkpoint.
        tells: Whether this process speaks for the run, if it is no rank, or rank 0.
    """
    forget()
    if tells and distributed.rank() == 0:
        checkpoint = "no checkpoint" if saved is None else f"checkpoint: {saved}"
        print(f"stopped by {number.name} at step {step}; {checkpoint}", file=sys.stderr)
        if number == signal.SIGUSR1 and "SLURM_JOB_ID" in os.environ:
            _requeue(os.environ["SLURM_JOB_ID"])
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + signal.SIGTERM)


def _requeue(job: str) -> None:
    command = ["scontrol", "requeue", job]
    if shutil.which(command[0]) is None:
        print("SLURM's scontrol is not here, so the job is not queued again", file=sys.stderr)
        return
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        told = "no answer for 30 s"
    else:
        told = f"refused: {done.stderr.strip()}" if done.returncode else "the job is queued again"
    print(f"{' '.join(command)}: {told}", file=sys.stderr)
