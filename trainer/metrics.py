"""Torchmetrics over several ranks.

Torchmetrics' own synchronisation raises or hangs when a rank saw no batch, so the states are
gathered here, from the ranks that have any, in rank order, and combined by each state's own
reduction, as torchmetrics would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from trainer import distributed

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

    Metrics = Mapping[str, Metric | MetricCollection]


def place(metrics: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Move metrics to ``device`` and take synchronisation out of their own hands.

    Raises:
        ValueError: If a value is not a torchmetrics ``Metric`` or ``MetricCollection``.
    """
    if not metrics:
        return {}
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
        for part in _metrics_in(metric):
            part.sync_on_compute = False
            part._to_sync = False
    return placed


def reset(metrics: Metrics) -> None:
    """Start every metric anew."""
    for metric in metrics.values():
        metric.reset()


def compute(metrics: Metrics) -> dict[str, float]:
    """Return the values over all ranks' updates; must be called on every rank.

    A metric that no rank has updated is left out. A metric with several values gives one entry for
    each: ``name/0``, ``name/1``, ... or ``name/<key>``. The local states are left as they are.
    """
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        parts = _metrics_in(metric)
        states = distributed.gather_object([_state(part) for part in parts])
        if states is not None:
            values.update(_compute(name, metric, parts, states))
    return distributed.broadcast_object(values)


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


def _compute(name: str, metric: Any, parts: list[Metric], states: list[Any]) -> dict[str, float]:
    """On rank 0: put the combined states in, compute, and put this rank's own states back."""
    own = [_state(part) for part in parts]
    updated = False
    try:
        for number, part in enumerate(parts):
            theirs = [rank[number] for rank in states if rank[number] is not None]
            if theirs:
                updated = True
                _load(part, _combine(part, theirs))
        return dict(_flat(name, metric.compute())) if updated else {}
    finally:
        for part, state in zip(parts, own, strict=True):
            if state is None:
                part.reset()
            else:
                _load(part, state)


def _metrics_in(module: Any) -> list[Metric]:
    """Every metric with states of its own, those inside collections and wrappers included.

    Raises:
        ValueError: For a wrapper whose states depend on the order of the updates.
    """
    from torchmetrics import Metric, MetricCollection
    from torchmetrics.wrappers.abstract import WrapperMetric

    if isinstance(module, MetricCollection):
        # Reading the values makes the members of a compute group share their states.
        parts: Any = module.values()
    else:
        parts = list(module.children())
    found = [metric for part in parts for metric in _metrics_in(part)]
    if not isinstance(module, WrapperMetric):
        return [module, *found] if isinstance(module, Metric) else found
    # Wrappers leave states to what they wrap; ClasswiseWrapper shows those as if they were its own.
    if module._defaults and not any(module._defaults is metric._defaults for metric in found):
        raise ValueError(
            f"build_metrics returned a {type(module).__name__}, which follows the order of its "
            "updates; over several ranks there is no such order: use the metric without it"
        )
    return found


def _state(metric: Metric) -> dict[str, Any] | None:
    if metric._update_count == 0:
        return None
    return {
        "_update_count": metric._update_count,
        **{name: _on_cpu(getattr(metric, name)) for name in metric._defaults},
    }


def _on_cpu(state: Any) -> Any:
    return [part.cpu() for part in state] if isinstance(state, list) else state.detach().cpu()


def _combine(metric: Metric, states: list[dict[str, Any]]) -> dict[str, Any]:
    if len(states) == 1:
        return states[0]
    combined: dict[str, Any] = {"_update_count": sum(s["_update_count"] for s in states)}
    for name, reduction in metric._reductions.items():
        parts = [state[name] for state in states]
        combine = cast(Callable[[Any], Any], reduction)  # torchmetrics has turned names into these
        if isinstance(parts[0], list):
            joined: Any = [tensor for part in parts for tensor in part]
            if reduction is not None and joined:
                joined = [combine(joined)]
        else:
            joined = torch.stack(parts)
            if reduction is not None:
                joined = combine(joined)
        combined[name] = joined
    return combined


def _load(metric: Metric, state: dict[str, Any]) -> None:
    metric._computed = None
    metric._update_count = state["_update_count"]
    for name in metric._defaults:
        value = state[name]
        device = metric.device
        moved = [v.to(device) for v in value] if isinstance(value, list) else value.to(device)
        setattr(metric, name, moved)


def _flat(name: str, value: Any) -> list[tuple[str, float]]:
    if isinstance(value, Mapping):
        return [pair for key, part in value.items() for pair in _flat(f"{name}/{key}", part)]
    if isinstance(value, list | tuple):
        return [pair for i, part in enumerate(value) for pair in _flat(f"{name}/{i}", part)]
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return _flat(name, value.tolist())
    return [(name, float(value))]
