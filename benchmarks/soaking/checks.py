"""What a run owes after a fault, and what the fault has cost."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.soaking.program import SAVE_EVERY, STEPS, Spec
from benchmarks.soaking.running import Broken, Event, Running, newest_checkpoint

MAY_LOSE = 2 * SAVE_EVERY + 2
"""Steps: since the checkpoint before the one that was being written."""


class Outcome(NamedTuple):
    """What a fault has cost.

    Attributes:
        lost: Steps that were done again.
        seconds: Until what the fault's row says.
        fresh_s: From the call of ``fit`` until the first step, where the run came so far before.
    """

    lost: int
    seconds: float
    fresh_s: float | None = None


@dataclass(frozen=True)
class Undisturbed:
    """What a run does when nobody harms it.

    Attributes:
        bits: The hash of its last weights.
        measured: What it wrote to metrics.jsonl, without times.
    """

    bits: str
    measured: list[dict[str, Any]]

    @classmethod
    def run(cls, folder: Path) -> Undisturbed:
        """Let it train."""
        with Running(Spec(str(folder))) as run:
            _expect(run, 0)
            return cls(run.bits(), run.measured())

    def check(self, run: Running) -> None:
        """See that a run has come to the same end.

        Raises:
            Broken: If it has not.
        """
        if run.bits() != self.bits:
            raise Broken("the weights are not those of an undisturbed run")
        if run.spec.options.get("logger", True) and run.measured() != self.measured:
            raise Broken("metrics.jsonl is not that of an undisturbed run")


def goes_on(run: Running, undisturbed: Undisturbed, files_too: bool = True) -> Outcome:
    """The run starts its ranks again and ends as if nothing had been."""
    _expect(run, 0)
    ended = time.monotonic()
    undisturbed.check(run)
    run.cleared(files_too)
    harm = _harm(run)
    steps = run.events("step")
    before = [event for event in steps if event.time <= harm.time]
    attempt = before[-1].attempt if before else 0
    after = [event for event in steps if event.attempt > attempt]
    first_again = after[0].time if after else ended
    fresh_s = before[0].time - run.events("fit")[0].time if before and after else None
    return Outcome(_lost(run, first_again), first_again - harm.time, fresh_s)


def is_resumed(run: Running, undisturbed: Undisturbed, files_too: bool = True) -> Outcome:
    """The run ends, leaves nothing behind, and goes on when the command is given again."""
    run.wait()
    seconds = run.cleared(files_too) - _harm(run).time
    return Outcome(_resume(run, undisturbed), seconds)


def falls_back(run: Running, undisturbed: Undisturbed) -> Outcome:
    """The same command passes over a damaged checkpoint, and goes on from the one before."""
    with run.again() as second:
        return has_fallen_back(second, undisturbed)


def has_fallen_back(run: Running, undisturbed: Undisturbed) -> Outcome:
    """A run that met a damaged checkpoint says so, and goes on from the one before.

    The seconds are those from its start to its first new step.
    """
    _expect(run, 0)
    undisturbed.check(run)
    run.cleared()
    if "NOT using a damaged checkpoint" not in run.err.read_text():
        raise Broken("nothing was said of a damaged checkpoint")
    first = next(event for event in run.events("step") if event.time > run.started)
    return Outcome(_lost(run, run.started), first.time - run.started)


def is_saved(run: Running, undisturbed: Undisturbed, codes: tuple[int, ...]) -> Outcome:
    """The run ends with one of the exit codes; the step that it had reached is saved."""
    code = run.wait()
    seconds = time.monotonic() - _harm(run).time
    run.cleared()
    steps = [event.step for event in run.events("step")]
    if code not in codes and (steps or code > 0):  # before its first step it may just die
        raise Broken(f"exit code {code}")
    reached = max(steps, default=0)
    saved, _ = newest_checkpoint(run.spec.run_dir)
    if saved != reached:
        raise Broken(f"it stopped after step {reached}, but step {saved} is saved")
    return Outcome(_resume(run, undisturbed), seconds)


def is_named(
    run: Running,
    undisturbed: Undisturbed,
    says: str | Callable[[Running], str],
    limit_s: float = 30,
) -> Outcome:
    """The run fails in time, and stderr says why; then it can go on."""
    _expect(run, 1)
    seconds = time.monotonic() - _harm(run).time
    run.cleared()
    pattern = says if isinstance(says, str) else says(run)
    if not re.search(pattern, run.err.read_text()):
        raise Broken(f"stderr does not say {pattern!r}")
    if seconds > limit_s:
        raise Broken(f"it took {seconds:.1f} s, more than {limit_s:g}")
    return Outcome(_resume(run, undisturbed), seconds)


def _expect(run: Running, code: int) -> None:
    found = run.wait()
    if found != code:
        raise Broken(f"exit code {found} instead of {code}")


def _harm(run: Running) -> Event:
    """Return when and where the run was harmed last, or harmed itself."""
    found = run.events("harm")
    if run.harmed is not None:
        return Event("harm", run.harmed, 0, 0)
    if not found:
        raise Broken("the run never came to the place where it harms itself")
    return found[-1]


def _resume(run: Running, undisturbed: Undisturbed) -> int:
    """Run the same command again; return how many steps it did once more."""
    with run.again() as second:
        _expect(second, 0)
        undisturbed.check(second)
        second.cleared()
        return _lost(second, second.started)


def _lost(run: Running, since: float) -> int:
    """Return how many steps were done again from ``since`` on."""
    steps = run.events("step")
    before = max((event.step for event in steps if event.time < since), default=0)
    again = [event.step for event in steps if event.time >= since]
    lost = before - (again[0] - 1) if again else before - STEPS
    if not 0 <= lost <= MAY_LOSE:
        raise Broken(f"{lost} steps were done again, with a checkpoint every {SAVE_EVERY}")
    return lost
