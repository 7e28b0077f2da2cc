"""The states of one torchmetrics metric: taken out, put back, and combined with those of others.

They are combined by each state's own reduction, as torchmetrics would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from trainer.trees import map_leaves

if TYPE_CHECKING:
    from torchmetrics import Metric

State = dict[str, Any]

# An array travels in a thirtieth of the time of a tensor; others (bfloat16) have no array.
_ARRAY_DTYPES = frozenset(
    (torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
)


def metrics_in(module: Any) -> list[Metric]:
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
    found = [metric for part in parts for metric in metrics_in(part)]
    if not isinstance(module, WrapperMetric):
        return [module, *found] if isinstance(module, Metric) else found
    # Wrappers leave states to what they wrap; ClasswiseWrapper shows those as if they were its own.
    if module._defaults and not any(module._defaults is metric._defaults for metric in found):
        raise ValueError(
            f"build_metrics returned a {type(module).__name__}, which follows the order of its "
            "updates; over several ranks there is no such order: use the metric without it"
        )
    return found


def state_of(metric: Metric) -> State | None:
    """Return the metric's own tensors, and None before its first update."""
    if metric._update_count == 0:
        return None
    own = {name: getattr(metric, name) for name in metric._defaults}
    return {
        "_update_count": metric._update_count,
        **{name: list(v) if isinstance(v, list) else v for name, v in own.items()},
    }


def is_exact(metric: Metric, state: State) -> bool:
    """Whether the states would be the same, to the last bit, after other orders of the updates."""
    from torchmetrics.utilities.data import dim_zero_max, dim_zero_min, dim_zero_sum

    for name, reduction in metric._reductions.items():
        value = state[name]
        if isinstance(value, list):
            return False
        is_whole = not (value.is_floating_point() or value.is_complex())
        if reduction not in (dim_zero_max, dim_zero_min) and not (
            is_whole and reduction is dim_zero_sum
        ):
            return False
    return True


def combined(metric: Metric, states: list[State]) -> State:
    """Return one state for several, in their order."""
    if len(states) == 1:
        return states[0]
    whole: State = {"_update_count": sum(s["_update_count"] for s in states)}
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
        whole[name] = joined
    return whole


def load(metric: Metric, state: State | None) -> None:
    """Set the states; None is before the first update."""
    metric._computed = None
    metric._update_count = 0 if state is None else state["_update_count"]
    for name, default in metric._defaults.items():
        value = default if state is None else state[name]
        device = metric.device
        moved = [v.to(device) for v in value] if isinstance(value, list) else value.to(device)
        # A metric may add to its tensor in place.
        setattr(metric, name, moved.clone() if isinstance(moved, torch.Tensor) else moved)


def packed(tree: Any) -> Any:
    """Return nested states as they travel best."""
    return map_leaves(_packed, tree)


def unpacked(tree: Any) -> Any:
    """Return nested states from what `packed` returned."""
    return map_leaves(_unpacked, tree)


def _packed(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.detach().cpu()
    return leaf.numpy() if leaf.dtype in _ARRAY_DTYPES else leaf


def _unpacked(leaf: Any) -> Any:
    return torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf
