"""What a row of the table is: a way to harm a run, and what the run owes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.soaking.checks import Outcome, Undisturbed
from benchmarks.soaking.moments import any_rank
from benchmarks.soaking.program import Spec
from benchmarks.soaking.running import Broken, Running

EARLIEST_STEP, LATEST_STEP = 3, 40
"""Of a harm that a run does to itself."""


def nothing(run: Running, rng: Random, moment: str) -> None:
    """Let the run harm itself."""
    run.moment = moment


@dataclass(frozen=True, eq=False)
class Fault:
    """A way to harm a run.

    Attributes:
        name: Of its row.
        what: What happens, in words.
        until: What its seconds measure.
        check: What the run owes.
        harm: Done to the running program, at a moment that it is given, or somewhere there.
        moments: In turn; each has a row of its own if ``by_moment``.
        by_moment: See there.
        options: Of the Trainer.
        does: What the run does to itself, on a random rank, at the moment; see `Spec`.
        remote: Whether the run's folder is a url.
        torchrun: Whether torchrun starts it.
        place: Prepares the folder.
        needs_mount: Whether that is by mounting something.
        times: How often it is tried.
    """

    name: str
    what: str
    until: str
    check: Callable[[Running, Undisturbed], Outcome]
    harm: Callable[[Running, Random, str], None] = nothing
    moments: tuple[str, ...] = ("",)
    by_moment: bool = False
    options: dict[str, Any] | None = None
    does: str = ""
    remote: bool = False
    torchrun: bool = False
    place: Callable[[Spec], AbstractContextManager[None]] = lambda spec: nullcontext()
    needs_mount: bool = False
    times: int = 4

    def attempt(
        self, undisturbed: Undisturbed, folder: Path, rng: Random, moment: str
    ) -> tuple[str, Outcome]:
        """Try it once, and return the moment at which the harm was really done, and its cost.

        Raises:
            Broken: If the run does not do what it owes; ``folder`` holds what it wrote.
        """
        spec = Spec(
            str(folder),
            options=self.options or {},
            remote=self.remote,
            torchrun=self.torchrun,
            does=self.does,
            where=moment if self.does else "",
            rank=any_rank(rng),
            step=rng.randrange(EARLIEST_STEP, LATEST_STEP),
        )
        with self.place(spec), Running(spec) as run:
            try:
                self.harm(run, rng, moment)
                return run.moment, self.check(run, undisturbed)
            except Broken as broken:
                raise Broken(f"{run.moment or moment}: {broken}") from None
