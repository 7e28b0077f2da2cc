"""Checks 6 and 7: memory, and what goes over the network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from trainer.messages import counted
from trainer.verify.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL
from trainer.verify.record import Collective
from trainer.verify.report import Check
from trainer.verify.runs import Runs

MIB = 2**20
# Ranks may differ by so much; small processes differ by what the system happens to load.
MEMORY_RATIO, MEMORY_SLACK = 1.25, 64 * MIB

NAMES = {
    ALL_REDUCE: "all-reduce",
    ALL_TO_ALL: "all-to-all",
    ALL_GATHER: "all-gather",
    "allgather_": "all-gather",
    "broadcast_": "broadcast",
    "_reduce_scatter_base_": "reduce-scatter",
}


def check_memory(runs: Runs) -> Iterator[Check]:
    """The ranks need about the same."""
    if runs.failed:
        yield Check(6, "memory", None, "not reached")
        return
    peaks = [record.peak_bytes for record in runs.many.records]
    each = ", ".join(f"{peak / MIB:,.0f}" for peak in peaks)
    single = f"one process {runs.one.first.peak_bytes / MIB:,.0f}"
    found = f"at most {each} MiB on the ranks; {single}"
    low, high = min(peaks), max(peaks)
    if high <= max(low * MEMORY_RATIO, low + MEMORY_SLACK):
        yield Check(6, "memory", True, found)
        return
    rank = peaks.index(high)
    advice = f"see what only rank {rank} keeps: outputs, lists in the task, or more samples"
    yield Check(6, "memory", False, f"rank {rank} needs more than others: {found}", advice)


def check_collectives(runs: Runs) -> Iterator[Check]:
    """A step sends the gradients once, in buckets, and nothing else."""
    if runs.failed:
        yield Check(7, "collectives", None, "not reached")
        return
    facts, world_size = runs.facts, runs.many.world_size
    expected: list[Collective] | None = facts["collectives"]
    # In the first step the ranks agree on the planned weight, in the second DDP on its buckets.
    steps = runs.many.first.collectives[2:]
    if not steps:
        text = "not judged: the first two steps have some of their own"
        yield Check(7, "collectives", None, text, "verify more steps")
        return
    usual = Counter(map(tuple, steps)).most_common(1)[0][0]
    of_task = [each for each in usual if each.in_forward]
    found = [each for each in usual if not each.in_forward]
    text = f"per step and rank {_listed(found)}"
    if of_task:
        text += f"; in the task's forward {_listed(of_task)}"
    if expected is None:
        yield Check(7, "collectives", True, f"{text}; by this strategy nothing is expected")
        return
    if expected and not found and runs.config.accelerator == "cuda":
        # Backward runs in other threads there; it would take a fault of the counter to see none.
        yield Check(7, "collectives", None, f"{text} was seen; expected {_listed(expected)}")
        return
    # Collectives in forward may have others in backward.
    if Counter(found) != Counter(expected) and not of_task:
        text += f"; expected {_listed(expected)}"
        beyond, missing = Counter(found) - Counter(expected), Counter(expected) - Counter(found)
        advice = f"the task's hooks call {_listed(beyond.elements())} beside DDP" if beyond else ""
        advice = advice or f"not seen: {_listed(missing.elements())}"
        yield Check(7, "collectives", False, text, advice)
        return
    share = 2 * (world_size - 1) / world_size
    on_wire = share * sum(each.num_bytes for each in expected if each.name != ALL_GATHER)
    text += (
        f", as it should be for {_bytes(facts['gradient_bytes'])} of gradients; on the wire "
        f"2(N-1)/N = {share:.3g} times as much: {_bytes(on_wire)}"
    )
    if any(each.name == ALL_TO_ALL for each in expected):
        text += "; the sums come back by an all-gather of the same size for each all-to-all"
    yield Check(7, "collectives", True, text)


def _listed(collectives: Iterable[Collective]) -> str:
    """Return "2 all-reduces (1.5 MiB)" for each kind."""
    kinds: dict[str, list[int]] = {}
    for each in collectives:
        kinds.setdefault(NAMES.get(each.name, each.name), []).append(each.num_bytes)
    parts = [
        f"{counted(len(sizes), name)} of {_bytes(sum(sizes))}" for name, sizes in kinds.items()
    ]
    return " and ".join(parts) or "nothing"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} MiB"
