"""What a step costs where the network is the limit: hosts in network namespaces, with less of it.

    python -m benchmarks.network links             # do the limits hold?
    python -m benchmarks.network steps             # the Trainer beside a hand-written DDP loop
    python -m benchmarks.network buckets           # bucket_cap_mb=auto beside a sweep of sizes

It needs Linux, root, ``ip`` and ``tc``. The hosts share this machine's processor, so the net only
takes the time of a computation (see `benchmarks.networking.steps`), and the processor is left to
what moves the gradients. On a machine that does other things besides, ``chrt -r 1 python -m ...``
keeps these from being measured too.

Contestants take turns in the same ranks. A figure is the median over the rounds of the median step,
a ratio the median of the ratios within a round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from benchmarks.common import above_zero, at_least, table
from benchmarks.networking.hosts import Network, Unavailable
from benchmarks.networking.probe import Link
from benchmarks.networking.steps import Contestant, Measured, Workload, measure

HAND, OURS, AUTO = "hand-written DDP", "Trainer", "Trainer, auto"
SWEEP_MB = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 64.0)
SEARCH_STEPS = 60  # more than `auto` takes
SMALL = {"depth": 40, "width": 256, "batch": 8, "compute_ms": 100.0}  # 10 MiB of gradients
LARGE = {"depth": 160, "width": 256, "batch": 8, "compute_ms": 300.0}  # 40 MiB


def links(network: Network, given: argparse.Namespace) -> list[list[str]]:
    """Return a row: what all-reduces find."""
    link = Link.measure(network)
    return [[f"{link.mbit:.1f}", f"{link.latency_ms:.2f}"]]


def steps(network: Network, given: argparse.Namespace) -> list[list[str]]:
    """Return a row: the Trainer, with everything on, beside a hand-written loop."""
    found = _measure(network, SMALL, given, {HAND: Contestant("hand"), OURS: Contestant("trainer")})
    hand, ours = (found[name].step_ms for name in (HAND, OURS))
    ratio = median(a / b for a, b in zip(ours, hand, strict=True))
    return [[f"{median(hand):.0f}", f"{median(ours):.0f}", f"{ratio:.3f}"]]


def buckets(network: Network, given: argparse.Namespace) -> list[list[str]]:
    """Return a row: hand-written DDP by bucket size, and what ``auto`` makes of it."""
    sweep = {f"{size:g}": {"bucket_cap_mb": size} for size in SWEEP_MB}
    contestants = {
        "null": Contestant("hand"),
        **{name: Contestant("hand", options) for name, options in sweep.items()},
        AUTO: Contestant("trainer", {"bucket_cap_mb": "auto"}, before=SEARCH_STEPS),
    }
    found = _measure(network, LARGE, given, contestants)
    auto = found.pop(AUTO)
    print(auto.said, file=sys.stderr)
    best = min(found, key=lambda name: median(found[name].step_ms))
    ratio = median(a / b for a, b in zip(auto.step_ms, found[best].step_ms, strict=True))
    sweep_ms = [f"{median(measured.step_ms):.0f}" for measured in found.values()]
    chosen = auto.said.split()[1]
    return [[*sweep_ms, best, chosen, f"{median(auto.step_ms):.0f}", f"{ratio:.3f}"]]


Mode = Callable[[Network, argparse.Namespace], list[list[str]]]
MODES: dict[str, tuple[Mode, Sequence[str]]] = {
    "links": (links, ["Mbit/s found", "4 KiB all-reduce, ms"]),
    "steps": (steps, [f"{HAND}, ms", f"{OURS}, ms", "ratio"]),
    "buckets": (
        buckets,
        ["null", *(f"{size:g}" for size in SWEEP_MB), "best", "auto chose", "its ms", "ratio"],
    ),
}


def _measure(
    network: Network,
    net: Mapping[str, float],
    given: argparse.Namespace,
    contestants: Mapping[str, Contestant],
) -> dict[str, Measured]:
    work = Workload(**net, steps=given.steps, rounds=given.rounds)  # type: ignore[arg-type]
    return measure(network, work, contestants, timeout_s=given.timeout_s)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--hosts", type=at_least(2), nargs="+", default=[2], help="how many")
    parser.add_argument(
        "--mbit",
        type=lambda text: None if text == "none" else above_zero(text),
        nargs="+",
        default=[1000.0, 200.0, 50.0],
        help="what a host can send and receive, in megabits per second; none: no limit",
    )
    parser.add_argument(
        "--rounds", type=at_least(1), default=3, help="in which everyone trains once"
    )
    parser.add_argument("--steps", type=at_least(1), default=6, help="that count, in each round")
    parser.add_argument("--timeout-s", type=above_zero, default=1800, help="for one row")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    given = parser.parse_args()
    mode, header = MODES[given.mode]
    rows = []
    try:
        for hosts in given.hosts:
            with Network(hosts) as network:
                for mbit in given.mbit:
                    network.limit(mbit)
                    limit = "none" if mbit is None else f"{mbit:g}"
                    rows += [[str(hosts), limit, *row] for row in mode(network, given)]
    except Unavailable as error:
        raise SystemExit(str(error)) from None
    print(table(["hosts", "Mbit/s", *header], rows, given.markdown))


if __name__ == "__main__":
    main()
