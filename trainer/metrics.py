"""Torchmetrics over several ranks.

Torchmetrics' own synchronisation raises or hangs when a rank saw no batch, so the states are
gathered here, from the ranks that have any, in rank order, and combined by each state's own
reduction, as torchmetrics would.

A sum of floats depends on the order of its terms, and a list of samples on the order of its
entries: on which rank computed what. Where the last bit matters (``exact``) such states are taken
out of a metric after every micro-batch, and combined in the order of the micro-batches, as if each
of them were a rank. Sums of integers, minima and maxima are exact as they are.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from trainer import distributed
from trainer.metric_states import (
    State,
    combined,
    is_exact,
    load,
    metrics_in,
    packed,
    state_of,
    unpacked,
)
from trainer.trees import detached

if TYPE_CHECKING:
    from torchmetrics import Metric

    from trainer.task import TaskModule

Place = tuple[int, int]
# Of a metric's name and the number of a part of it: states in the order in which they combine.
Kept = dict[tuple[str, int], list[tuple[Place, State]]]


class MetricSet(dict[str, Any]):
    """The metrics of one split by name, and what has been taken out of them.

    Attributes:
        exact: Whether their values must not depend on which rank computed what.
        fresh: States of this rank that have not been gathered yet.
        kept: Rank 0's: states that were gathered, of all ranks.
    """

    def __init__(self, metrics: Mapping[str, Any], exact: bool) -> None:
        super().__init__(metrics)
        self.exact = exact
        self.fresh: Kept = defaultdict(list)
        self.kept: Kept = defaultdict(list)


def place(metrics: Mapping[str, Any], device: torch.device, exact: bool) -> MetricSet:
    """Move metrics to ``device`` and take synchronisation out of their own hands.

    Args:
        metrics: By name.
        device: Where they are updated.
        exact: Whether their values must have the same bits at any world size.

    Raises:
        ValueError: If a value is not a torchmetrics ``Metric`` or ``MetricCollection``.
    """
    if not metrics:
        return MetricSet({}, exact)
    from torchmetrics import Metric, MetricCollection

    placed = {}
    for name, metric in metrics.items():
        if not isinstance(metric, Metric | MetricCollection):
            raise ValueError(
                f"build_metrics returned a {type(metric).__name__} for {name!r}; it must be a "
                "torchmetrics.Metric or MetricCollection"
            )
        # A clone, for a task may give one object for several splits.
        placed[name] = metric = metric.clone().to(device)
        for part in metrics_in(metric):
            part.sync_on_compute = False
            part._to_sync = False
        for module in metric.modules():
            # Metrics whose states agree after a rank's first update, by chance perhaps, would
            # share one from then on. Only the user can know which ones may (a list of groups).
            if isinstance(module, MetricCollection) and module._enable_compute_groups is True:
                module._enable_compute_groups = False
    return MetricSet(placed, exact)


@contextmanager
def synchronised_here(metrics: MetricSet) -> Iterator[None]:
    """Take the synchronisation of a user's metrics out of their own hands meanwhile."""
    parts = [part for metric in metrics.values() for part in metrics_in(metric)]
    before = [(part, part.sync_on_compute, part._to_sync) for part in parts]
    for part in parts:
        part.sync_on_compute = part._to_sync = False
    try:
        yield
    finally:
        for part, on_compute, to_sync in before:
            part.sync_on_compute, part._to_sync = on_compute, to_sync


def gather_here(metrics: MetricSet, check: Callable[[str], None]) -> Callable[[], None]:
    """Have the ``compute`` of a user's metrics see the updates of all ranks.

    It is a collective from now on: every rank must call it, those without an update too.

    Args:
        metrics: Each by itself.
        check: Called with the name of what is about to be computed; raises where a rank may not.

    Returns:
        Undoes it.
    """
    own = [(metric, metric.compute) for metric in metrics.values()]
    for metric, compute in own:
        metric.compute = _over_ranks(metric, compute, check)

    def undo() -> None:
        for metric, compute in own:
            metric.compute = compute

    return undo


def _over_ranks(
    metric: Metric, own: Callable[..., Any], check: Callable[[str], None]
) -> Callable[..., Any]:
    """Return ``metric.compute`` over all ranks, given that of one rank."""

    @functools.wraps(own)
    def compute(*args: Any, **kwargs: Any) -> Any:
        if not metric._to_sync:  # the value of one batch, or the user does not want it
            return own(*args, **kwargs)
        check(f"{type(metric).__name__}.compute()")
        before = state_of(metric)
        every = distributed.all_gather_object(packed(before))
        states = [unpacked(state) for state in every if state is not None]
        metric._to_sync = False
        try:
            load(metric, combined(metric, states) if states else None)
            return own(*args, **kwargs)
        finally:
            load(metric, before)
            metric._to_sync = True

    return compute


def reset(metrics: MetricSet) -> None:
    """Start every metric anew."""
    for metric in metrics.values():
        metric.reset()
        for part in metrics_in(metric):
            part._update_count = 0  # a composition's own reset forgets its own
    metrics.fresh.clear()
    metrics.kept.clear()


def update(task: TaskModule, metrics: MetricSet, outputs: Any, batch: Any, place: Place) -> None:
    """Let ``task`` update its metrics with one micro-batch: in full precision, without gradients.

    Args:
        task: Is asked only if there are any metrics.
        metrics: Of the current split.
        outputs: What ``forward`` returned.
        batch: The micro-batch, whole.
        place: Where it is among all micro-batches: step and position.
    """
    if not metrics:
        return
    with torch.no_grad(), torch.autocast(task.run.device.type, enabled=False):
        task.update_metrics(metrics, detached(outputs), batch)
    after_update(metrics, place)


def after_update(metrics: MetricSet, place: Place) -> None:
    """Take out what depends on the order of the updates, if that matters.

    Args:
        metrics: Have been updated with one micro-batch, whole.
        place: Where that is among all micro-batches: step and position.
    """
    if not metrics.exact:
        return
    for name, metric in metrics.items():
        for number, part in enumerate(metrics_in(metric)):
            state = state_of(part)
            if state is not None and not is_exact(part, state):
                metrics.fresh[name, number].append((place, state))
                load(part, None)


def compute(metrics: MetricSet) -> dict[str, float]:
    """Return the values over all ranks' updates; must be called on every rank.

    A metric that no rank has updated is left out. A metric with several values gives one entry for
    each: ``name/0``, ``name/1``, ... or ``name/<key>``. The local states are left as they are.
    """
    if not metrics:
        return {}
    values: dict[str, float] = {}
    ranks = _gather(metrics)
    if ranks is not None:
        for name, metric in metrics.items():
            parts = metrics_in(metric)
            states = [
                [state for _, state in metrics.kept.get((name, number), ())]
                + [state for rank in ranks if (state := rank[name][number]) is not None]
                for number in range(len(parts))
            ]
            values.update(_compute(name, metric, parts, states))
    return distributed.broadcast_object(values)


def state(metrics: MetricSet) -> dict[str, Any]:
    """Return what `restore` needs to go on in mid-epoch; must be called on every rank.

    Returns:
        Tensors and plain values on rank 0, nothing elsewhere. The tensors may be the metrics' own.
    """
    ranks = _gather(metrics) if metrics else None
    if ranks is None:
        return {}
    kept = [
        [name, number, place, state]
        for (name, number), states in metrics.kept.items()
        for place, state in states
    ]
    return {"layout": _layout(metrics), "ranks": ranks, "kept": kept}


def restore(metrics: MetricSet, state: Mapping[str, Any]) -> None:
    """Go on from ``state``, which `state` returned; must be called on every rank.

    At the world size of that time each rank has its own states again. At another one rank 0 keeps
    them all, to be combined with the states to come as if they were of further ranks.
    """
    reset(metrics)
    if not state:
        return
    was, layout = state["layout"], _layout(metrics)
    names = [name for name in layout if layout[name] == was.get(name)]
    changed = sorted((was.keys() | layout.keys()).difference(names))
    rank, ranks = distributed.rank(), state["ranks"]
    if changed and rank == 0:
        print(f"resume: other train metrics than before, which start anew: {', '.join(changed)}")
    is_same_size = len(ranks) == distributed.world_size()
    for name in names if is_same_size else ():
        for part, own in zip(metrics_in(metrics[name]), ranks[rank][name], strict=True):
            load(part, own)
    if rank != 0:
        return
    for name, number, place, kept in state["kept"]:
        if name in names:
            metrics.kept[name, number].append((place, kept))
    for former, states in enumerate(ranks if not is_same_size else ()):
        for name in names:
            for number, kept in enumerate(states[name]):
                if kept is not None:
                    metrics.kept[name, number].append(((-1, former), kept))


def merged(logged: Mapping[str, float], computed: Mapping[str, float]) -> dict[str, float]:
    """Put logged values and metrics together.

    Raises:
        ValueError: If a name is used for both.
    """
    twice = sorted(logged.keys() & computed.keys())
    if twice:
        raise ValueError(
            f"{', '.join(twice)} is both logged and a metric of build_metrics; rename one of them"
        )
    return {**logged, **computed}


def _gather(metrics: MetricSet) -> list[dict[str, list[State | None]]] | None:
    """Return every rank's current states, by name and part, on rank 0; None elsewhere.

    What has been taken out since the last time goes to rank 0's ``kept``.
    """
    own = {
        name: [state_of(part) for part in metrics_in(metric)] for name, metric in metrics.items()
    }
    gathered = distributed.gather_object(packed((own, dict(metrics.fresh))))
    metrics.fresh.clear()
    if gathered is None:
        return None
    ranks, fresh = zip(*unpacked(gathered), strict=True)
    for taken in fresh:
        for key, states in taken.items():
            metrics.kept[key] += states
    for states in metrics.kept.values():
        states.sort(key=lambda entry: entry[0])
    return list(ranks)


def _compute(
    name: str, metric: Any, parts: list[Metric], states: list[list[State]]
) -> dict[str, float]:
    """Put the combined states of every part in, compute, and put this rank's own states back."""
    own = [state_of(part) for part in parts]
    try:
        for part, theirs in zip(parts, states, strict=True):
            if theirs:
                load(part, combined(part, theirs))
        return dict(_flat(name, metric.compute())) if any(states) else {}
    finally:
        for part, state in zip(parts, own, strict=True):
            load(part, state)


def _layout(metrics: MetricSet) -> dict[str, list[list[str]]]:
    """Name the states of every part of every metric."""
    return {
        name: [list(part._defaults) for part in metrics_in(metric)]
        for name, metric in metrics.items()
    }


def _flat(name: str, value: Any) -> list[tuple[str, float]]:
    if isinstance(value, Mapping):
        return [pair for key, part in value.items() for pair in _flat(f"{name}/{key}", part)]
    if isinstance(value, list | tuple):
        return [pair for i, part in enumerate(value) for pair in _flat(f"{name}/{i}", part)]
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return _flat(name, value.tolist())
    return [(name, float(value))]
