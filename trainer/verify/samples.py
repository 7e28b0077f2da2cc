"""Checks 1 and 3: who gets which samples, and what a step is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.data.fetching import Request, plain
from trainer.messages import counted
from trainer.verify.record import Forward, Record
from trainer.verify.report import Check
from trainer.verify.runs import RunOnce, Runs


def check_samples(runs: Runs) -> Iterator[Check]:
    """Every sample on exactly one rank, and another order in every epoch."""
    if any(run.phase == "data" for run in runs.failed):
        yield runs.failure(1, "set-up")
        return
    check = _stream if runs.facts["is_stream"] else _indexed
    yield from check(runs)


def check_batch(runs: Runs) -> Iterator[Check]:
    """The global batch is what the user thinks it is, and so is the learning rate."""
    if not all(run.records and run.first.hyperparameters for run in runs.both):
        yield Check(3, "global batch", None, "not reached")
        return
    if not runs.failed:
        yield _global_batch(runs)
    yield _learning_rate(runs)


def _indexed(runs: Runs) -> Iterator[Check]:
    records, facts = runs.many.records, runs.facts
    faults = [fault for epoch in range(2) for fault in _faults(records, epoch)]
    order = _order(records, 0)
    if faults:
        yield Check(1, "samples", False, faults[0], "the data must be the same on every rank")
    elif order != _order(runs.one.records, 0):
        yield Check(
            1,
            "samples",
            False,
            f"in another order than on one process: {facts['order']} depends on the world size",
            "let it yield the whole order on every rank: the Trainer cuts it",
        )
    else:
        counts = [sum(len(r.indices) for r in record.epochs[0]) for record in records]
        found = f"{len(order):,} in an epoch, each on one rank only ({_joined(counts)})"
        if (different := len(set(order))) < len(order):
            found += f"; {different:,} different ones, as {facts['order']} repeats some"
        elif left := (facts["num_samples"] or 0) - len(order):
            found += f"; {left:,} of the data set are left out"
        yield Check(1, "samples", True, found)
    yield _reshuffled(records, order, facts)


def _reshuffled(records: list[Record], order: list[Any], facts: dict[str, Any]) -> Check:
    name = facts["order"]
    if any(order != _order(records, epoch) for epoch in range(1, len(records[0].epochs))):
        return Check(1, "new order", True, f"every epoch has its own ({name})")
    if len(order) < 2:
        return Check(1, "new order", True, "there is only one sample")
    if not facts["order_changes"]:
        return Check(1, "new order", True, f"every epoch has the same, as {name} says")
    return Check(
        1,
        "new order",
        False,
        f"epochs 0 and 1 have the same order: {name} ignores the epoch",
        f"let {name} draw its order from its argument epoch"
        if name.endswith("train_indices")
        else f"give {name} a method set_epoch(epoch), which the Trainer calls, and draw from it; "
        "or leave the sampler out, for shuffle=true",
    )


def _faults(records: list[Record], epoch: int) -> Iterator[str]:
    """Say which positions of an epoch two ranks have, or none."""
    reached = 0
    for position, rank, request in _in_order(records, epoch):
        if position != reached:
            what = f"positions {min(position, reached)} to {max(position, reached) - 1}"
            how = "loaded twice, by this rank and another" if position < reached else "left out"
            yield f"{what} of epoch {epoch} are {how}, where the part of rank {rank} begins"
        reached = max(reached, position + len(request.indices))


def _order(records: list[Record], epoch: int) -> list[Any]:
    """Return the indices of an epoch, over all ranks."""
    return [i for _, _, request in _in_order(records, epoch) for i in plain(request.indices)]


def _in_order(records: list[Record], epoch: int) -> list[tuple[int, int, Request]]:
    parts = [
        (request.position, record.rank, request)
        for record in records
        for request in (record.epochs[epoch] if record.epochs else ())
        if len(request.indices)
    ]
    return sorted(parts, key=lambda part: part[:2])


def _stream(runs: Runs) -> Iterator[Check]:
    steps = counted(len(runs.many.first.losses), "step")
    if runs.facts["is_sharded"]:
        yield _shards(runs.many.records, steps)
        return
    one, many = _by_position(runs.one), _by_position(runs.many)
    different = [key for key in many.keys() & one.keys() if many[key].content != one[key].content]
    if different:
        step, position = min(different)
        yield Check(
            1,
            "samples",
            False,
            f"the stream yields other samples on {runs.many.name} than on one, first at position "
            f"{position} of step {step}",
            "let it yield the same on every rank, whoever reads it: the Trainer keeps each rank's "
            "part; random choices only by Python's, NumPy's or torch's global generator",
        )
        return
    total = sum(forward.num_samples for forward in many.values())
    yield Check(1, "samples", True, f"a stream; {total:,} in {steps}, each on one rank only")


def _shards(records: list[Record], steps: str) -> Check:
    rows = [{row for f in record.forwards for row in f.content} for record in records]
    for rank, mine in enumerate(rows):
        for other in range(rank):
            if 2 * len(mine & rows[other]) > len(mine):  # a few can be alike by nature
                return Check(
                    1,
                    "samples",
                    False,
                    f"ranks {other} and {rank} get the same samples from the stream's shard method",
                    "let shard(rank, world_size) return the part of that rank",
                )
    found = f"the stream shards itself; no rank had the samples of another in {steps}"
    return Check(1, "samples", True, found)


def _by_position(run: RunOnce) -> dict[tuple[int, int], Forward]:
    return {(f.step, f.position): f for record in run.records for f in record.forwards}


def _global_batch(runs: Runs) -> Check:
    one, many = (_sizes(run) for run in runs.both)
    facts, world_size = runs.facts, runs.many.world_size
    for step in range(1, len(runs.many.first.losses) + 1):
        computed, planned = many[step]
        # A stream that shards itself ends on one process where it ends.
        alone = planned if facts["is_sharded"] else one.get(step, many[step])[0]
        if not computed == planned == alone:
            return Check(
                3,
                "global batch",
                False,
                f"step {step} has {computed} samples on {runs.many.name}, {alone} on one, and "
                f"{planned} planned",
                "the data must have the same length on every rank",
            )
    size, micro = facts["global_batch_size"], facts["micro_batch_size"]
    if size is None:
        return Check(3, "global batch", True, "as many samples as the batch sampler says")
    steps = facts["accumulation_steps"]
    product = f"{micro} in a micro-batch x {steps} accumulated x {world_size} ranks"
    if micro * steps * world_size == size:
        found = f"{size} = {product}"
    else:
        first = [sum(f.num_samples for f in r.forwards if f.step == 1) for r in runs.many.records]
        found = f"{size} = {' + '.join(map(str, first))} on the ranks, at most {product}"
    if runs.config.micro_batch_size is None:
        found += f"; micro_batch_size=null follows the world size, so it is fixed at {micro} here"
    return Check(3, "global batch", True, found)


def _sizes(run: RunOnce) -> dict[int, tuple[int, int]]:
    """Return by step the samples that were computed, and those that were planned."""
    sizes: dict[int, tuple[int, int]] = {}
    for record in run.records:
        for forward in record.forwards:
            computed, _ = sizes.get(forward.step, (0, 0))
            sizes[forward.step] = (computed + forward.num_samples, forward.global_size)
    return sizes


def _learning_rate(runs: Runs) -> Check:
    first = runs.many.first
    others = [(f"rank {record.rank}", record) for record in runs.many.records[1:]]
    for name, other in [*others, ("one process", runs.one.first)]:
        found = _first_difference(first.hyperparameters, other.hyperparameters)
        if found is not None:
            step, key, here, there = found
            on = f"rank 0 of {runs.many.name}"
            depends = "the world size" if name == "one process" else "the rank"
            return Check(
                3,
                "learning rate",
                False,
                f"{key} depends on {depends}: in step {step} it is {_short(here)} on {on}, and "
                f"{_short(there)} on {name}",
                "the global batch is the same at any world size, so the rate is too: leave rank "
                "and world size out of configure_optimizers; lr_scaling makes the rate follow the "
                "global batch",
            )
    rates = [group["lr"] for groups in first.hyperparameters for group in groups]
    span = _short(min(rates))
    if min(rates) < max(rates):
        span += f" to {_short(max(rates))}"
    scaling = runs.config.lr_scaling
    rule = "" if scaling == "none" else f", lr_scaling={scaling} included"
    return Check(3, "learning rate", True, f"{span}{rule}, on every rank as on one process")


def _first_difference(
    mine: list[list[dict[str, Any]]], theirs: list[list[dict[str, Any]]]
) -> tuple[int, str, Any, Any] | None:
    for step, (groups, others) in enumerate(zip(mine, theirs, strict=False), start=1):
        for group, other in zip(groups, others, strict=True):
            for key in group:
                if group[key] != other.get(key):
                    name = "the learning rate" if key == "lr" else f"{key} of the optimizer"
                    return step, name, group[key], other.get(key)
    return None


def _joined(counts: list[int]) -> str:
    return " + ".join(f"{count:,}" for count in counts)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
