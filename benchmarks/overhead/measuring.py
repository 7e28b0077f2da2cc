"""How contestants are measured, and the table of what came out."""

from __future__ import annotations

import gc
import io
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from statistics import median, quantiles

import torch.distributed as dist

from benchmarks.common import scratch, table
from benchmarks.overhead.parts import REFERENCE, Contestant, Part
from benchmarks.overhead.work import Stopwatch, Work

CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}


def measure(
    part: Part, work: Work, rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return the seconds per step of each contestant in each round."""
    contestants = part.installed
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(-1, rounds):
        for name, contestant in contestants.items():
            seconds = _seconds(contestant, part, work, clock)
            if number >= 0:  # the round before the first one warms up
                found[name].append(seconds / (work.steps[1] - work.steps[0]))
    return found


def report(part: Part, work: Work, found: dict[str, list[float]], markdown: bool) -> str:
    """Return the table of one part."""
    rows = []
    for name, seconds in found.items():
        ratios = [a / b for a, b in zip(seconds, found[REFERENCE], strict=True)]
        low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        spread = f"{low:.2f} to {high:.2f}"
        rows.append([name, f"{median(seconds) * 1e6:,.0f}", f"{median(ratios):.2f}", spread])
    processes = "one process" if part.ranks == 1 else f"{part.ranks} ranks"
    header = [f"{work.name}, {processes}", "µs per step", "ratio", "half of the rounds"]
    return table(header, rows, markdown)


def _seconds(contestant: Contestant, part: Part, work: Work, clock: Callable[[], float]) -> float:
    """Return the seconds between the two steps of ``work`` that are timed."""
    first, last = (steps * work.accumulation + 1 for steps in work.steps)
    stopwatch = Stopwatch(clock, [first] if part.to_the_end else [first, last])
    with scratch() as own, _shown_to_nobody():
        box = [own]
        gc.collect()
        if dist.is_initialized():  # all ranks write to rank 0's folder, and start together
            dist.broadcast_object_list(box)
        contestant(replace(work, stopwatch=stopwatch), box[0])
        if part.to_the_end:
            stopwatch.times.append(clock())
        if dist.is_initialized():
            dist.barrier()
    assert stopwatch.number == work.total_steps * work.accumulation, "others do other work"
    start, end = stopwatch.times
    return end - start


class _Terminal(io.StringIO):
    """Lets progress bars draw."""

    def isatty(self) -> bool:
        return True


@contextmanager
def _shown_to_nobody() -> Iterator[None]:
    with redirect_stdout(_Terminal()), redirect_stderr(_Terminal()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
