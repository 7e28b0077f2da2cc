"""Ranks that come to a halt."""

from __future__ import annotations

import signal
from functools import partial
from random import Random

from benchmarks.soaking import moments
from benchmarks.soaking.checks import goes_on, is_named
from benchmarks.soaking.fault import Fault
from benchmarks.soaking.moments import any_rank, now, wait_for
from benchmarks.soaking.running import Running

TIMEOUT_S = 4.0
START_TIMEOUT_S = 30.0  # a busy machine may need many seconds to get there
LIMITS = {"timeout_s": TIMEOUT_S, "start_timeout_s": START_TIMEOUT_S}
SLACK_S = 10.0
SAYS = {
    "loader": "loading data",
    "worker": "loading data",
    "forward": "in forward",
    "backward": "in backward",
    "optimizer": "in the optimizer's step",
    "validation": "evaluating",
}
PLACES = tuple(place for place in SAYS if place != "worker")


def freeze(run: Running, rng: Random, moment: str) -> None:
    """Stop a rank."""
    run.victim = any_rank(rng)
    wait_for(run, moment, run.victim, rng)
    run.kill(run.ranks()[run.victim], number=signal.SIGSTOP)
    run.moment = now(run, run.victim)


def named(run: Running) -> str:
    """Return what stderr must say."""
    place = SAYS.get(run.spec.where, "")
    return f"rank {run.victim} hangs .*{place}"


_is_named = partial(is_named, says=named, limit_s=TIMEOUT_S + SLACK_S)

FAULTS = [
    Fault(
        "hang",
        "a rank sleeps in {moment}",
        "exit",
        _is_named,
        moments=PLACES,
        by_moment=True,
        options=LIMITS,
        does="sleep",
        times=10,
    ),
    Fault(
        "hang-worker",
        "a loader worker sleeps",
        "exit",
        _is_named,
        moments=("worker",),
        options={**LIMITS, "num_workers": 1},
        does="sleep",
        times=2,
    ),
    Fault(
        "hang-gil",
        "a rank hangs in compiled code and holds the GIL",
        "exit",
        _is_named,
        moments=PLACES,
        options=LIMITS,
        does="hold_gil",
        times=5,
    ),
    Fault(
        "freeze",
        "SIGSTOP of a rank",
        "exit",
        _is_named,
        freeze,
        moments=moments.IN_TRAINING,
        options=LIMITS,
        times=10,
    ),
    Fault(
        "freeze-start",
        "SIGSTOP of a rank while it starts",
        "exit",
        partial(_is_named, limit_s=START_TIMEOUT_S + SLACK_S),
        freeze,
        moments=("start-up",),
        options=LIMITS,
        times=2,
    ),
    Fault(
        "hang-restart",
        "a rank hangs, with max_restarts",
        "first new step",
        goes_on,
        moments=PLACES,
        options={**LIMITS, "max_restarts": 1},
        does="sleep",
        times=5,
    ),
]
