"""Signals that ask a run to save and stop."""

from __future__ import annotations

import signal
import time
from functools import partial
from random import Random

from benchmarks.soaking import moments
from benchmarks.soaking.checks import is_resumed, is_saved
from benchmarks.soaking.fault import Fault
from benchmarks.soaking.moments import any_rank, now, wait_for
from benchmarks.soaking.running import Running

ENDED = "exit"
PREEMPTED = (128 + signal.SIGTERM,)
INTERRUPTED = (-signal.SIGINT, 128 + signal.SIGINT)


def stop(run: Running, rng: Random, moment: str, at_rank: bool) -> None:
    """Send SIGTERM or SIGUSR1 twice in a row, the second one to anybody."""
    rank = any_rank(rng)
    wait_for(run, moment, rank, rng)
    run.moment = now(run, rank)
    parent, ranks = run.pid, run.ranks()
    run.kill(ranks[rank] if at_rank else parent, number=_stop_signal(rng))
    first = run.harmed
    time.sleep(rng.choice([0, 0.01, 0.1, 0.5, 1.0]))
    run.kill(rng.choice([parent, *ranks]), number=_stop_signal(rng))
    run.harmed = first


def interrupt(run: Running, rng: Random, moment: str, twice: bool) -> None:
    """Press Ctrl-C as in a terminal: the whole foreground group gets it."""
    rank = any_rank(rng)
    wait_for(run, moment, rank, rng)
    run.moment = now(run, rank)
    run.kill(-run.pid, number=signal.SIGINT)
    if twice:
        time.sleep(rng.uniform(0.02, 0.3))
        run.kill(-run.pid, number=signal.SIGINT)


def _stop_signal(rng: Random) -> int:
    return rng.choice([signal.SIGTERM, signal.SIGUSR1])


FAULTS = [
    Fault(
        "stop-parent",
        "SIGTERM or SIGUSR1 to the parent, then once more",
        ENDED,
        partial(is_saved, codes=PREEMPTED),
        partial(stop, at_rank=False),
        moments=moments.OF_PARENT,
        times=22,
    ),
    Fault(
        "stop-rank",
        "SIGTERM or SIGUSR1 to a rank, then once more",
        ENDED,
        partial(is_saved, codes=PREEMPTED),
        partial(stop, at_rank=True),
        moments=moments.OF_RANKS,
        times=20,
    ),
    Fault(
        "stop-workers",
        "SIGTERM or SIGUSR1 to a rank that has loader workers, then once more",
        ENDED,
        partial(is_saved, codes=PREEMPTED),
        partial(stop, at_rank=True),
        moments=moments.OF_RANKS,
        options={"num_workers": 1},
        times=10,
    ),
    Fault(
        "ctrl-c",
        "Ctrl-C",
        ENDED,
        partial(is_saved, codes=INTERRUPTED),
        partial(interrupt, twice=False),
        moments=moments.OF_PARENT,
        times=11,
    ),
    Fault(
        "ctrl-c-twice",
        "Ctrl-C twice",
        ENDED,
        is_resumed,
        partial(interrupt, twice=True),
        moments=moments.OF_PARENT,
        times=11,
    ),
]
