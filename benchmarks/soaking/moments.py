"""Moments of a run: how to wait for one, and how to tell which one it was."""

from __future__ import annotations

import time
from random import Random

from benchmarks.soaking.program import RANKS, STEPS, Spec
from benchmarks.soaking.running import Running
from trainer.watch import Phase

WORDS = {
    Phase.STARTING: "start-up",
    Phase.PREPARING: "start-up",
    Phase.EPOCH_START: "start of an epoch",
    Phase.LOADING: "loading",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.OPTIMIZER: "update",
    Phase.LOGGING: "logging",
    Phase.CALLBACKS: "callbacks",
    Phase.EVALUATION_LOADING: "validation",
    Phase.VALIDATION: "validation",
    Phase.SAVING: "saving",
    Phase.WAITING: "agreement",
    Phase.FINISHING: "the end",
    Phase.DONE: "the end",
}
IMPORTING, WRITING, RESTART = "importing", "writing", "restart"
OF_A_STEP = ("loading", "forward", "backward", "update")
IN_TRAINING = (*OF_A_STEP, "logging", "validation", "saving", WRITING, "agreement")
OF_RANKS = ("start-up", *IN_TRAINING)
OF_PARENT = (IMPORTING, *OF_RANKS)
LATEST = STEPS * 3 // 4
"""Early enough that each moment comes once more."""


def wait_for(run: Running, moment: str, rank: int, rng: Random) -> None:
    """Wait until a rank comes to such a moment, from a random step on.

    Raises:
        Ended: If the run ends before.
        Broken: If nothing happens for long.
    """
    if moment == IMPORTING:
        time.sleep(rng.uniform(0.1, 2))
        return
    if moment == "start-up":
        run.wait_until(lambda: bool(run.doing()) and len(run.ranks()) == RANKS)
        time.sleep(rng.uniform(0, 0.3))
        return
    step = rng.randrange(1, LATEST)
    run.wait_until(lambda: bool(run.doing()) and run.doing()[rank].step >= step)
    run.ranks()  # looked up now: some moments are short
    if moment == WRITING:
        run.wait_until(lambda: is_writing(run.spec))
    else:
        run.wait_until(lambda: WORDS[run.doing()[rank].phase] == moment)
    if moment in OF_A_STEP:  # these take a few milliseconds
        time.sleep(rng.uniform(0, 0.003))


def now(run: Running, rank: int) -> str:
    """Return what a rank does; of one that was killed, what it did."""
    doing = run.doing()
    if not doing:
        return IMPORTING
    found = WORDS[doing[rank].phase]
    return RESTART if found == "start-up" and run.attempts > 1 else found


def is_writing(spec: Spec) -> bool:
    """Whether a checkpoint is being written, or was when the writer was killed."""
    return any(spec.run_dir.glob("checkpoints/.tmp-step-*"))


def any_rank(rng: Random) -> int:
    """Draw a rank."""
    return rng.randrange(RANKS)
