"""Checks 4 and 5: the loss, and the weights that come of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean, stdev

import torch

from trainer.messages import counted, listed
from trainer.verify.record import digest
from trainer.verify.report import Check
from trainer.verify.runs import FIRST, Runs
from trainer.verify.start import names_that_differ

# How far apart rounding may bring two runs. For a loss: relative to it, or to a hundredth of the
# largest where it is almost 0. A squared error that has fallen so far has ten times the relative
# rounding error that it began with: 0.04 in bf16.
LOSS_BOUNDS = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.02}
# For the first loss, computed in one piece or in two.
PARTS_BOUNDS = {"fp32": 1e-3, "bf16": 0.01, "fp16": 0.01}
# For weights: the norm of the difference, relative to that of what training changed. Adam moves a
# weight by as much for a gradient that is nothing but rounding.
WEIGHT_BOUNDS = {"fp32": 0.01, "bf16": 0.1, "fp16": 0.1}
# For both, with a comm_hook: gradients are rounded on several processes, and on one they are not.
COMPRESSED_BOUND = 0.1
EQUAL_BITS = "reproducible=true promises equal bits"


def check_losses(runs: Runs, failed_before: bool) -> Iterator[Check]:
    """The two curves agree, the loss can be divided, and it falls."""
    yield _curves(runs, failed_before)
    yield _dependence(runs)
    if not runs.failed:
        if runs.facts["num_turns"] > 1:
            found = "not judged: several optimizers may work against each other"
            yield Check(4, "loss falls", None, found)
        else:
            yield _falls([loss for loss in runs.many.first.losses if loss is not None])


def check_weights(runs: Runs, failed_before: bool) -> Iterator[Check]:
    """After the last step all ranks have the same weights, and the single process has them too."""
    if runs.failed:
        yield Check(5, "equal weights", None, "not reached")
        return
    equal = _equal_weights(runs)
    yield equal
    yield _same_weights(runs, failed_before or not equal.passed)


def _curves(runs: Runs, failed_before: bool) -> Check:
    if runs.failed:
        if any(run.phase in ("data", "start") for run in runs.failed):
            return Check(4, "loss curves", None, "not reached")
        return runs.failure(4, "loss curves", failed_before)
    if runs.facts["is_sharded"]:
        found = "not compared: the stream shards itself, so the order of its samples depends on"
        return Check(4, "loss curves", None, f"{found} the world size")
    one, many = (run.first.losses for run in runs.both)
    if [loss is None for loss in one] != [loss is None for loss in many]:
        return Check(4, "loss curves", False, "steps without weight on one and not on the other")
    pairs = [(a, b) for a, b in zip(one, many, strict=True) if a is not None and b is not None]
    if not pairs:
        advice = "return the loss from loss(outputs, batch)"
        return Check(4, "loss curves", False, "no step has a loss", advice)
    if digest(one) == digest(many):
        return Check(4, "loss curves", True, f"equal bits in {counted(len(pairs), 'step')}")
    floor = 0.01 * max(abs(a) for a, _ in pairs) or 1.0
    differences = [abs(a - b) / max(abs(a), floor) for a, b in pairs]
    worst = max(differences)
    step = differences.index(worst) + 1
    bound = _bound(runs, LOSS_BOUNDS)
    limit = f"at most {bound:g}"
    if runs.config.reproducible:
        limit = EQUAL_BITS
    elif worst <= bound:
        found = f"largest relative difference {worst:.1e}, in step {step} ({limit})"
        return Check(4, "loss curves", True, found)
    found = f"they differ by {worst:.1e}, relatively, in step {step} ({limit})"
    return Check(4, "loss curves", False, found, _why_apart(runs, failed_before))


def _bound(runs: Runs, bounds: dict[str, float]) -> float:
    return COMPRESSED_BOUND if runs.config.comm_hook else bounds[runs.config.precision]


def _why_apart(runs: Runs, failed_before: bool) -> str:
    if failed_before:
        return FIRST
    if any(record.final != runs.many.first.final for record in runs.many.records):
        return "the ranks do not train the same model: see 5 equal weights"
    if hook := runs.config.comm_hook:
        return (
            f"comm_hook={hook} rounds the gradients that ranks send, and one process sends none: "
            "verify with comm_hook=null, which shows whether anything else differs"
        )
    if not runs.same_cut:
        return "the two cut into micro-batches differently, so dropout does: compare without it"
    return (
        "something computes by rank or world size: look for run.rank, run.world_size and "
        "torch.distributed in the task and the data"
    )


def _dependence(runs: Runs) -> Check:
    records = [*runs.one.records, *runs.many.records]
    found = next((r.batch_dependence for r in records if r.batch_dependence), None)
    if runs.facts.get("global_loss"):
        text = "global_loss=True: the loss sees the whole global batch at any world size"
        return Check(4, "loss by parts", True, text)
    if found is None and runs.failed:
        return Check(4, "loss by parts", None, "not reached")
    if found is None:
        text = "not compared: micro-batches of one sample, or a loss that is random or not finite"
        return Check(4, "loss by parts", None, text)
    numbers = f"{found.whole:.6g} for a micro-batch, {found.halves:.6g} for its halves together"
    if found.difference <= PARTS_BOUNDS[runs.config.precision]:
        return Check(4, "loss by parts", True, f"does not depend on the cut: {numbers}")
    return Check(
        4,
        "loss by parts",
        False,
        f"the loss depends on what else is in the micro-batch: {numbers}; so it depends on the "
        "world size where the cut does",
        "if it compares samples with one another (contrastive), set global_loss = True in the "
        "task; if it is a sum, or a mean over something else than samples (tokens), return "
        "WeightedLoss(total, weight)",
    )


def _falls(losses: list[float]) -> Check:
    third = len(losses) // 3
    if third < 2:
        found = f"not judged: only {counted(len(losses), 'step')}"
        return Check(4, "loss falls", None, found, "verify more steps")
    begin, end = losses[:third], losses[-third:]
    rise = fmean(end) - fmean(begin)
    span = f"from {fmean(begin):.4g} to {fmean(end):.4g} (means of {third} steps)"
    if rise < 0:
        return Check(4, "loss falls", True, span)
    scatter = math.hypot(stdev(begin), stdev(end)) / math.sqrt(third)
    advice = "more steps show more: Trainer.verify(..., steps=100)"
    if rise <= 2 * scatter:
        return Check(4, "loss falls", True, f"within its scatter it stays: {span}", advice)
    return Check(4, "loss falls", False, f"it rises {span}", f"lower the learning rate; {advice}")


def _equal_weights(runs: Runs) -> Check:
    first = runs.many.first
    for record in runs.many.records:
        if different := names_that_differ(first.final, record.final):
            return Check(
                5,
                "equal weights",
                False,
                f"after {counted(len(first.losses), 'step')} rank {record.rank} has other values "
                f"than rank 0 in {listed(different)}",
                "gradients or weights change where DDP does not see it: keep every call of a layer "
                "in forward or loss, and do not call backward or change weights in hooks by what "
                "only one rank knows",
            )
    count = counted(len(first.final), "parameter")
    found = f"{count}, the same bits on every rank after the last step"
    return Check(5, "equal weights", True, found)


def _same_weights(runs: Runs, failed_before: bool) -> Check:
    if runs.facts["is_sharded"]:
        return Check(5, "same weights", None, "not compared, as the loss curves")
    start, one, many = runs.one.weights["initial"], runs.one.weights["final"], runs.many.weights
    apart = {name: _norm(many["final"][name] - one[name]) for name in one}
    moved = math.hypot(*(_norm(one[name] - start[name]) for name in one))
    if not moved:
        advice = "check the optimizer's parameters, and that the learning rate is not 0"
        return Check(5, "same weights", False, "training has changed no parameter", advice)
    if runs.one.first.final == runs.many.first.final:
        return Check(5, "same weights", True, "the same bits as on one process")
    difference = math.hypot(*apart.values()) / moved
    bound = _bound(runs, WEIGHT_BOUNDS)
    limit = EQUAL_BITS if runs.config.reproducible else f"at most {bound:g}"
    found = f"{difference:.1e} of what training changed, away from those of one process ({limit})"
    if difference <= bound and not runs.config.reproducible:
        return Check(5, "same weights", True, found)
    worst = sorted(apart, key=lambda name: apart[name], reverse=True)
    found += f", most in {listed(worst, most=3)}"
    return Check(5, "same weights", False, found, _why_apart(runs, failed_before))


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))
