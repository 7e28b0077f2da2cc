"""Ranks, parents and helpers that die."""

from __future__ import annotations

import time
from functools import partial
from random import Random

from benchmarks.soaking import moments
from benchmarks.soaking.checks import goes_on, is_resumed
from benchmarks.soaking.fault import Fault
from benchmarks.soaking.moments import RESTART, WRITING, any_rank, now, wait_for
from benchmarks.soaking.program import RANKS
from benchmarks.soaking.running import Running

RESTARTS = {"max_restarts": 3}
WORKERS = {"num_workers": 1}
NEW_STEP, NOTHING_LEFT = "first new step", "nothing is left"
SELF_HARM = ("forward", "backward", "optimizer", "loader", "validation")


def kill_rank(run: Running, rng: Random, moment: str) -> None:
    """Kill a rank at a moment; for a restart, kill twice."""
    rank = 0 if moment == WRITING else any_rank(rng)  # the writer is on rank 0
    wait_for(run, "forward" if moment == RESTART else moment, rank, rng)
    run.kill(run.ranks()[rank])
    if moment == RESTART:
        is_back = lambda: bool(run.doing()) and run.attempts == 2 and len(run.ranks()) == RANKS  # noqa: E731
        run.wait_until(is_back)
        time.sleep(rng.uniform(0, 0.4))
        rank = any_rank(rng)
        run.kill(run.ranks()[rank])
    time.sleep(0.002)  # its note is what it was when it died
    run.moment = WRITING if moment == WRITING and moments.is_writing(run.spec) else now(run, rank)


def kill_worker(run: Running, rng: Random, moment: str) -> None:
    """Kill a loader's worker."""
    rank = any_rank(rng)
    wait_for(run, moment, rank, rng)
    workers = run.children(run.ranks()[rank])
    run.kill(rng.choice(workers))
    run.moment = now(run, rank)


def kill_parent(run: Running, rng: Random, moment: str) -> None:
    """Kill the process that was started."""
    rank = 0 if moment == WRITING else any_rank(rng)
    wait_for(run, moment, rank, rng)
    run.kill(run.pid)
    was_writing = moment == WRITING and moments.is_writing(run.spec)
    run.moment = WRITING if was_writing else now(run, rank)


def kill_all(run: Running, rng: Random, moment: str) -> None:
    """Kill everything at once, the helper that would clean up included."""
    wait_for(run, moment, any_rank(rng), rng)
    run.moment = moment
    run.kill(*run.processes())


def kill_janitor(run: Running, rng: Random, moment: str) -> None:
    """Kill the helper."""
    wait_for(run, moment, any_rank(rng), rng)
    run.moment = moment
    run.kill(*(set(run.children()) - set(run.ranks())))


FAULTS = [
    Fault(
        "kill-rank",
        "SIGKILL of a rank, in {moment}",
        NEW_STEP,
        goes_on,
        kill_rank,
        moments=(*moments.OF_RANKS, RESTART),
        by_moment=True,
        options=RESTARTS,
        times=66,
    ),
    Fault(
        "kill-rank-workers",
        "SIGKILL of a rank that has loader workers",
        NEW_STEP,
        goes_on,
        kill_rank,
        moments=moments.OF_RANKS,
        options={**RESTARTS, **WORKERS},
        times=10,
    ),
    Fault(
        "kill-worker",
        "SIGKILL of a loader worker",
        NEW_STEP,
        goes_on,
        kill_worker,
        moments=moments.OF_A_STEP,
        options={**RESTARTS, **WORKERS},
    ),
    *(
        Fault(
            name,
            what,
            NEW_STEP,
            goes_on,
            moments=SELF_HARM,
            options=RESTARTS,
            does=does,
            times=5,
        )
        for name, what, does in (
            ("exception", "exception in a rank", "fail"),
            ("segfault", "segmentation fault in a rank", "crash"),
            ("exit", "a rank leaves with exit code 0", "leave"),
            ("memory", "a rank is refused memory", "fill_memory"),
            ("oom-kill", "SIGKILL of a rank by itself, as when memory runs out", "kill"),
        )
    ),
    Fault(
        "torchrun",
        "SIGKILL of a rank that torchrun started",
        NEW_STEP,
        partial(goes_on, files_too=False),  # torchrun leaves some
        moments=SELF_HARM,
        options={"resume": "auto"},
        does="kill",
        torchrun=True,
        times=5,
    ),
    Fault(
        "kill-parent",
        "SIGKILL of the parent; the same command again",
        NOTHING_LEFT,
        is_resumed,
        kill_parent,
        moments=moments.OF_PARENT,
        times=22,
    ),
    Fault(
        "kill-parent-workers",
        "SIGKILL of the parent, with loader workers; the same command again",
        NOTHING_LEFT,
        is_resumed,
        kill_parent,
        moments=moments.OF_PARENT,
        options=WORKERS,
        times=11,
    ),
    Fault(
        "kill-all",
        "SIGKILL of everything at once; the same command again",
        NOTHING_LEFT,
        partial(is_resumed, files_too=False),
        kill_all,
        moments=moments.OF_RANKS,
        times=10,
    ),
    Fault(
        "kill-janitor",
        "SIGKILL of the helper that cleans up",
        "the run's end",
        goes_on,
        kill_janitor,
        moments=moments.OF_A_STEP,
    ),
]
