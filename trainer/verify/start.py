"""Check 2: what the ranks start from: weights, layers, random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainer.messages import counted, listed
from trainer.verify.record import Forward, Record
from trainer.verify.report import Check
from trainer.verify.runs import RunOnce, Runs

SET_CUT = "a fixed micro_batch_size would keep it, and with it the masks of dropout"


def check_start(runs: Runs) -> Iterator[Check]:
    """Equal weights, the same layers in use, and the right random streams."""
    if any(run.phase == "start" for run in runs.failed):
        yield runs.failure(2, "start")
    if all(run.records and run.first.initial for run in runs.both):
        yield _initial_weights(runs)
    if any(record.layers for record in runs.many.records):
        yield _layers(runs)
    elif reason := runs.facts.get("not_copied"):
        yield Check(2, "layers", None, f"not looked at: the task cannot be copied ({reason})")
    if all(run.records and run.first.forwards for run in runs.both):
        yield _random_streams(runs)
    else:
        yield Check(2, "random streams", None, "not reached")


def _initial_weights(runs: Runs) -> Check:
    first = runs.many.first
    for record in runs.many.records:
        came_so_far = bool(record.initial)
        if came_so_far and (different := names_that_differ(first.initial, record.initial)):
            return Check(
                2,
                "initial weights",
                False,
                f"rank {record.rank} starts with other values than rank 0 in {listed(different)}; "
                "rank 0's overwrite them",
                "draw weights where the task is built, not by rank; look at on_fit_start and "
                "on_epoch_start",
            )
    if different := names_that_differ(first.initial, runs.one.first.initial):
        return Check(
            2,
            "initial weights",
            False,
            f"{listed(different)} start with other values on {runs.many.name} than on one",
            "nothing that sets them may depend on the world size; look at on_fit_start and "
            "on_epoch_start",
        )
    found = f"{len(first.initial)} parameters and buffers, equal on every rank and on one process"
    return Check(2, "initial weights", True, found)


def _layers(runs: Runs) -> Check:
    records = [record for record in runs.many.records if record.layers]
    allowed = runs.config.find_unused_parameters
    called, trained = (
        _not_everywhere(records, {r.rank: names for r, names in _used(records, kind)})
        for kind in ("called", "trained")
    )
    if trained and not allowed:
        return Check(
            2,
            "layers",
            False,
            f"not every rank uses {_named(called or trained)}: the others have no gradient to send "
            "for it, and DDP waits for one",
            "use every layer on every rank, whatever rank and data are; if the data must decide, "
            "set find_unused_parameters=true",
        )
    untrained = records[0].layers.untrained if records[0].layers else []
    if untrained and not trained and not allowed:
        return Check(
            2,
            "layers",
            False,
            f"no gradient for {listed(untrained)} on any rank: the loss does not depend on them",
            "use them in forward or loss, or set requires_grad=False; if they are needed in some "
            "steps only, set find_unused_parameters=true",
        )
    assert records[0].layers is not None
    count = len(records[0].layers.trained)
    found = f"every rank uses the same ones; {counted(count, 'parameter')} with a gradient"
    if called or trained:
        found = f"not every rank uses {_named(called or trained)}, which DDP can do with here"
    return Check(2, "layers", True, found)


def _used(records: list[Record], kind: str) -> Iterator[tuple[Record, list[str]]]:
    for record in records:
        yield record, getattr(record.layers, kind)


def _not_everywhere(records: list[Record], names: Mapping[int, list[str]]) -> dict[str, list[int]]:
    """Return the outermost names that some ranks lack, with the ranks that have them."""
    found: dict[str, list[int]] = {}
    for name in dict.fromkeys(name for mine in names.values() for name in mine):
        having = [rank for rank, mine in names.items() if name in mine]
        outer = any(name.startswith(f"{other}.") for other in found)
        if len(having) < len(records) and not outer:
            found[name] = having
    return found


def _named(names: Mapping[str, list[int]]) -> str:
    parts = []
    for name, ranks in names.items():
        which = "rank" if len(ranks) == 1 else "ranks"
        parts.append(f"{name} ({which} {', '.join(map(str, ranks))} only)")
    return listed(parts)


def _random_streams(runs: Runs) -> Check:
    one, many = (forwards_of(run) for run in runs.both)
    if not runs.same_cut:
        found = "not compared: the cut into micro-batches follows the world size"
        advice = "" if runs.facts.get("global_loss") else SET_CUT
        return Check(2, "random streams", None, found, advice)
    for key in sorted(many.keys() & one.keys()):
        fault = _compare(one[key], many[key], runs)
        if fault is not None:
            return fault
    generators = next(iter(many.values())).before
    for name in generators:
        for when in ("before", "after"):
            states = [getattr(forward, when)[name] for forward in many.values()]
            if len(set(states)) < len(states):
                return Check(
                    2,
                    "random streams",
                    False,
                    f"several micro-batches have the same state of the {name} generator {when} "
                    "their forward, so dropout draws the same in them",
                    "do not seed in forward, loss or in a dataset",
                )
    found = (
        f"{counted(len(many), 'micro-batch')}, each with its own stream, as on one process "
        f"({', '.join(generators)})"
    )
    return Check(2, "random streams", True, found)


def _compare(one: Forward, many: Forward, runs: Runs) -> Check | None:
    place = f"micro-batch {many.number} of step {many.step}"
    for name in many.before:
        if many.before[name] != one.before[name]:
            fault = f"{place} starts with another state of the {name} generator"
            advice = "do not seed in hooks, callbacks or threads"
        elif many.after[name] != one.after[name]:
            fault = f"forward and loss of {place} leave the {name} generator in another state"
            advice = "do not seed by rank in forward or loss, and do not draw more on some ranks"
        else:
            continue
        found = f"{fault} on {runs.many.name} than on one"
        return Check(2, "random streams", False, found, advice)
    if many.content != one.content and not runs.facts["is_stream"]:
        return Check(
            2,
            "random streams",
            False,
            f"the samples of {place} differ from those on one process, though their indices agree",
            "draw in a dataset only from Python's, NumPy's or torch's global generator, which are "
            "seeded for every sample, or from one that it holds; not from rank or time, nor from a "
            "generator that no seed reaches (made anew for each sample, of a module, in a closure)",
        )
    return None


def forwards_of(run: RunOnce) -> dict[tuple[int, int], Forward]:
    """Return what went through the task, by step and number of the micro-batch."""
    return {(f.step, f.number): f for record in run.records for f in record.forwards}


def names_that_differ(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return the names whose digests differ, or which only one of the two has."""
    names = dict.fromkeys([*mine, *theirs])
    return [name for name in names if mine.get(name) != theirs.get(name)]
