"""Attacks runs, and counts how often they kept what the trainer promises.

    python -m benchmarks.soak                                   # everything; more than an hour
    python -m benchmarks.soak --only kill-rank --moment backward --times 10
    python -m benchmarks.soak --faults stop ctrl-c --markdown   # rows whose names begin so

Each trial starts a small, reproducible fit in a process of its own, harms it at a random moment,
and checks what it owes: that it ends in time and says why, that nothing of it is left (no process,
no file in the temporary folder or /dev/shm), and that it goes on, by itself or when the command is
given again, to weights and metrics that are bit for bit those of an undisturbed run.

A trial is drawn from its seed: the first of a row from ``--seed``, the next one from the seed after
that, and so on. So ``--only ROW --times 1 --seed S`` tries a single one again, though the machine's
own timing is never the same twice. As root, everything runs in a mount namespace of its own, with a
/dev/shm of its own; else the rows that need a small disk are left out. Linux only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.common import at_least, table
from benchmarks.soaking import crowd, hangs, kills, stops, storage
from benchmarks.soaking.checks import Outcome, Undisturbed
from benchmarks.soaking.fault import Fault
from benchmarks.soaking.running import Broken, Ended

FAULTS = [*kills.FAULTS, *stops.FAULTS, *hangs.FAULTS, *storage.FAULTS, *crowd.FAULTS]
MOMENTS = sorted({moment for fault in FAULTS for moment in fault.moments if moment})
_NAMESPACE = "SOAK_NAMESPACE"
_LINES_SHOWN = 20


class Row:
    """What became of the trials of one fault.

    Attributes:
        held: What each of those cost that went as promised.
        broken: How many did not.
    """

    def __init__(self) -> None:
        self.held: list[Outcome] = []
        self.broken = 0


def soak(
    faults: Sequence[Fault], times: int | None, seed: int, moment: str | None, folder: Path
) -> dict[tuple[Fault, str], Row]:
    """Try each fault, and return the rows by fault and, where it has rows of their own, moment.

    Args:
        faults: What to try.
        times: How often; None: as often as each one says.
        seed: Of the first trial of each.
        moment: If given, only at this one.
        folder: For what the runs write; that of a broken promise stays there.
    """
    undisturbed = Undisturbed.run(folder / "undisturbed")
    rows: dict[tuple[Fault, str], Row] = defaultdict(Row)
    for fault in faults:
        moments = [m for m in fault.moments if moment in (None, m)]
        for number in range(times or fault.times if moments else 0):
            place = folder / f"{fault.name}-{seed + number}"
            rng = Random(f"{fault.name} {seed + number}")
            meant = moments[(seed + number) % len(moments)]
            told = f"{fault.name} --seed {seed + number}"
            try:
                found, outcome = fault.attempt(undisturbed, place, rng, meant)
            except (Broken, Ended) as error:
                rows[fault, meant if fault.by_moment else ""].broken += 1
                print(f"{told}: BROKEN, {error or 'ended early'}{_story(place)}", file=sys.stderr)
                continue
            rows[fault, found if fault.by_moment else ""].held.append(outcome)
            cost = f"{outcome.lost} steps, {outcome.seconds:.2f} s until {fault.until}"
            print(f"{told}: held, {found or 'any time'}; {cost}", file=sys.stderr, flush=True)
            shutil.rmtree(place)
    return rows


def report(rows: dict[tuple[Fault, str], Row], markdown: bool) -> str:
    """Return the table."""
    header = ["fault", "tried", "held", "steps lost", "seconds", "until", "row"]
    lines = []
    for (fault, moment), row in sorted(rows.items(), key=lambda item: FAULTS.index(item[0][0])):
        name = f"{fault.name} --moment {moment!r}" if moment else fault.name
        lines.append(
            [
                fault.what.format(moment=moment),
                str(len(row.held) + row.broken),
                str(len(row.held)),
                _spread([outcome.lost for outcome in row.held], "g"),
                _spread([outcome.seconds for outcome in row.held], ".1f"),
                fault.until,
                f"`{name}`" if markdown else name,
            ]
        )
    return table(header, lines, markdown)


def restarts(rows: dict[tuple[Fault, str], Row]) -> str:
    """Return how long killed ranks took to come back, and how long the run had taken to start."""
    costs = [
        (outcome.seconds, outcome.fresh_s)
        for (fault, _), row in rows.items()
        for outcome in row.held
        if fault.name == "kill-rank" and outcome.fresh_s is not None
    ]
    if not costs:
        return ""
    again, fresh = ([pair[place] for pair in costs] for place in (0, 1))
    ratios = [pair[0] / pair[1] for pair in costs]
    return (
        f"{len(costs)} restarts: {_spread(again, '.1f')} s from kill to first new step, and "
        f"{_spread(fresh, '.1f')} s before that from fit() to the first step of all; ratio "
        f"{_spread(ratios, '.2f')} (median, worst)"
    )


def _spread(values: Sequence[float], form: str) -> str:
    """Return the median and the worst."""
    return f"{median(values):{form}}, {max(values):{form}}" if values else "-"


def _story(folder: Path) -> str:
    """Return the ends of what the runs in a folder printed."""
    parts = [f"\n  in {folder}"]
    for path in sorted([*folder.glob("*.out"), *folder.glob("*.err")], key=os.path.getmtime):
        lines = path.read_text(errors="replace").splitlines()[-_LINES_SHOWN:]
        parts += [f"  {path.name}:", *(f"    {line}" for line in lines)]
    return "\n".join(parts)


def _enter_namespace() -> None:
    """As root, start anew where mounts are nobody else's; return if that is impossible or done."""
    if _NAMESPACE in os.environ or os.geteuid() != 0 or shutil.which("unshare") is None:
        return
    inside = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs soak /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode == 0:
        os.environ[_NAMESPACE] = "1"
        os.execvp(inside[0], [*inside, sys.executable, "-m", "benchmarks.soak", *sys.argv[1:]])


def main() -> None:
    """Attack, print a table, and exit with 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--faults", nargs="+", default=[""], help="rows whose names begin so")
    which.add_argument("--only", choices=[fault.name for fault in FAULTS], metavar="ROW")
    parser.add_argument("--moment", choices=MOMENTS, metavar="MOMENT", help="only at this one")
    parser.add_argument("--times", type=at_least(1), help="how often each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    for start in args.faults:
        if not any(fault.name.startswith(start) for fault in FAULTS):
            parser.error(f"no row's name begins with {start!r}")
    _enter_namespace()
    chosen = [
        fault
        for fault in FAULTS
        if (fault.name == args.only if args.only else fault.name.startswith(tuple(args.faults)))
    ]
    for fault in chosen:
        if fault.needs_mount and _NAMESPACE not in os.environ:
            print(f"{fault.name}: left out, for only root can mount a small disk", file=sys.stderr)
    chosen = [fault for fault in chosen if not fault.needs_mount or _NAMESPACE in os.environ]
    if not any(args.moment in (None, *fault.moments) for fault in chosen):
        parser.error("nothing is left to try: the rows have no such moment, or need root")
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    rows = soak(chosen, args.times, args.seed, args.moment, folder)
    print(report(rows, args.markdown), restarts(rows), sep="\n\n")
    if any(row.broken for row in rows.values()):
        raise SystemExit(f"promises were broken; what those runs wrote is in {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
