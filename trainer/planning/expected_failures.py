"""How often a run of many ranks fails, and how often to save it."""

from __future__ import annotations

import math


def checkpoint_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return the seconds of training between two checkpoints that lose the least time.

    The first term, sqrt(2 cost mtbf), is Young's (1974, "A first order approximation to the optimum
    checkpoint interval"), the others Daly's (2006, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", equation 37).

    Args:
        cost_s: How long training stands still for a checkpoint.
        mtbf_s: Mean time between two failures of the whole run.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def lost_share(interval_s: float, cost_s: float, redo_s: float, mtbf_s: float) -> float:
    """Return the share of all time that is no progress, to first order; at most 1.

    Args:
        interval_s: Seconds of training between two checkpoints.
        cost_s: How long training stands still for a checkpoint.
        redo_s: What a failure costs besides half an interval that is trained again.
        mtbf_s: Mean time between two failures of the whole run.
    """
    saving = cost_s / (interval_s + cost_s)
    return min(1.0, saving + (interval_s / 2 + redo_s) / mtbf_s)
