"""`Trainer.plan`: from what was measured to the report."""

from __future__ import annotations

from trainer.config import TrainerConfig
from trainer.messages import counted
from trainer.planning.measuring import Measured
from trainer.planning.network import Link
from trainer.planning.options import PlanConfig
from trainer.planning.report import PlanReport, duration
from trainer.planning.scaling import Row, Scaling, ladder

_MISS = 0.2  # how far the simulation of the ranks that measured may be off
_MOST = 1.05  # efficiency: more than 1 is noise


def plan(measured: Measured, config: TrainerConfig, options: PlanConfig) -> PlanReport:
    """Simulate 1 to ``max_ranks`` ranks, and write the report into the run's folder."""
    scaling = Scaling(measured, config, options)
    ranks = ladder(options.max_ranks, measured.world_size)
    strong, weak = scaling.strong(ranks), scaling.weak(ranks)
    report = PlanReport(
        title=f"{measured.task} on 1 to {counted(options.max_ranks, 'rank')} ({measured.device}, "
        f"{config.precision}), simulated from {counted(measured.world_size, 'process')}",
        facts=_facts(measured, scaling),
        strong=strong,
        weak=weak,
        notes=_doubts(measured, scaling, [*strong, *weak])
        + _notes(measured, scaling, strong, ranks),
        measured=measured,
    )
    report.write()
    return report


def _facts(measured: Measured, scaling: Scaling) -> dict[str, str]:
    profile, network = measured.profile, scaling.network
    forward, backward, optimizer = (
        f"{seconds * 1e3:.3g}"
        for seconds in (profile.forward_s[-1], profile.backward_s[-1], profile.optimizer_s)
    )
    facts = {
        "compute": f"forward {forward} + backward {backward} + optimizer {optimizer} ms for "
        f"{counted(profile.sizes[-1], 'sample')}; {profile.sizes[0]} to {profile.sizes[-1]} were "
        "measured",
        "gradients": f"{measured.gradient_bytes / 2**20:.4g} MiB of "
        f"{counted(len(measured.parameters), 'parameter')}, in "
        f"{counted(len(scaling.own_layout), 'bucket')}",
    }
    if network.ranks_per_node > 1:
        facts["in a machine"] = _link(network.within)
    facts["machines"] = f"{counted(network.ranks_per_node, 'rank')} each, {_link(network.between)}"
    if measured.step_s is not None:
        expected_s = scaling.own_step(measured.world_size).step_s
        facts["check"] = (
            f"{counted(measured.world_size, 'rank')}: simulated {expected_s * 1e3:.3g} ms per step,"
            f" measured {measured.step_s * 1e3:.3g} ms ({expected_s / measured.step_s - 1:+.0%})"
        )
    facts["checkpoint"] = (
        f"training stands still for {duration(measured.stall_s)}, it is written after "
        f"{duration(measured.write_s)}"
    )
    return facts


def _link(link: Link) -> str:
    return f"{link.latency_s * 1e6:.3g} us, {link.bandwidth * 8 / 1e9:.3g} Gbit/s ({link.source})"


def _doubts(measured: Measured, scaling: Scaling, rows: list[Row]) -> list[str]:
    """Return a warning if the measurements do not go together."""
    reasons = []
    if measured.step_s is not None:
        miss = scaling.own_step(measured.world_size).step_s / measured.step_s - 1
        if abs(miss) > _MISS:
            reasons.append(
                f"the simulation of {counted(measured.world_size, 'rank')} is {miss:+.0%} off what "
                "they took"
            )
    best = max(rows, key=lambda row: row.efficiency)
    if best.efficiency > _MOST:
        reasons.append(
            f"{counted(best.ranks, 'rank')} would be {best.efficiency:.0%} efficient, and more "
            "than 100% cannot be"
        )
    if not reasons:
        return []
    return [
        f"WARNING: this measurement is not to be trusted: {'; '.join(reasons)}. Was the machine "
        "busy, or the task too small to time? Measure again on a quiet machine, with more "
        "plan.steps."
    ]


def _notes(measured: Measured, scaling: Scaling, strong: list[Row], ranks: list[int]) -> list[str]:
    best = min(strong, key=lambda row: row.tree_s if scaling.has_trees else row.ring_s)
    notes = [
        f"* extrapolated from {counted(measured.world_size, 'rank')}. Loading, evaluation and "
        "waiting for slower ranks are not in it.",
        f"A global batch of {measured.global_batch_size} is fastest on "
        f"{counted(best.ranks, 'rank')}.",
        f"lr: lr_scaling={scaling.lr_rule} from a batch of {scaling.lr_reference}; -: that rule "
        "has none for a batch so large.",
    ]
    if len(strong) < len(ranks):
        notes.append(f"On more than {strong[-1].ranks:,} ranks: {measured.too_small}.")
    if not scaling.has_trees:
        notes.append("Gloo has rings only: all but `tree ms` is for them.")
    return notes
