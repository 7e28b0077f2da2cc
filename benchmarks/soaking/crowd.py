"""Many runs at once."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.soaking.checks import Outcome, Undisturbed
from benchmarks.soaking.fault import Fault
from benchmarks.soaking.running import Broken, Running

COUNT = 8


def is_alone(run: Running, undisturbed: Undisturbed) -> Outcome:
    """Each of several runs that start at once ends as if it were alone.

    They share the temporary folder and the folder in which each makes a time-stamped one.
    """
    with ExitStack() as stack:
        others = [Running(run.spec, run.tmp) for _ in range(COUNT - 1)]
        for other in others:
            stack.enter_context(other)
        started = time.monotonic()
        for each in (run, *others):
            if code := each.wait():
                raise Broken(f"exit code {code}")
            if each.bits() != undisturbed.bits:
                raise Broken("the weights are not those of an undisturbed run")
        seconds = time.monotonic() - started
        for each in (run, *others):
            each.cleared()
    folders = os.listdir(Path(run.spec.folder, "runs"))
    if len(folders) != COUNT:
        raise Broken(f"{COUNT} runs made {len(folders)} folders")
    return Outcome(0, seconds)


FAULTS = [
    Fault(
        "eight-at-once",
        f"{COUNT} runs start at once",
        "the end of all",
        is_alone,
        options={"run_dir": None, "start_timeout_s": 120.0},
        times=2,
    )
]
