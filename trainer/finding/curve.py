"""What a curve of losses over rising learning rates says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MEMORY = 0.9  # of the moving average: what it keeps of the past in each step
_WORSE = 3.0  # of the best loss, added to it: more than that is divergence
_FEWEST = 5  # points before there is a trend
_AT_LOW_RATES = 4  # one part of so many: the curve's level before it falls
_LEFT = 0.1  # of the way down: there the curve has left its level
_PARTS = 20  # of the curve: a slope is looked for over one to each side


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return the exponential moving average, corrected for its start at 0 (Kingma and Ba 2014)."""
    average, found = 0.0, []
    for number, loss in enumerate(losses, 1):
        average = _MEMORY * average + (1 - _MEMORY) * loss
        found.append(average / (1 - _MEMORY**number))
    return found


def is_beyond(curve: Sequence[float]) -> bool:
    """Whether the smoothed loss has come to four times its best value.

    That is where Gugger (2018, "How do you find a good learning rate") stops.
    """
    settled = curve[_FEWEST:]  # the average of a few losses may be low by chance
    return bool(settled) and curve[-1] > min(settled) + _WORSE * abs(min(settled))


def is_falling(curve: Sequence[float]) -> bool:
    """Whether the smoothed loss is about to fall further."""
    return int(np.argmin(curve)) >= len(curve) - _FEWEST


def steepest(rates: Sequence[float], curve: Sequence[float]) -> int | None:
    """Return where the smoothed loss falls fastest over the logarithm of the rate.

    Looked for from where it leaves its level at low rates for good, up to its minimum; None if it
    does not fall. The slope is that of a line through a tenth of the curve. Elsewhere, and between
    two points alone, it is mostly noise.
    """
    settled = np.asarray(curve[_FEWEST:])
    end = int(np.argmin(settled)) if len(settled) else 0
    if end == 0:
        return None
    level = float(np.median(settled[: max(1, len(settled) // _AT_LOW_RATES)]))
    still = np.flatnonzero(settled[: end + 1] >= level - _LEFT * (level - settled[end]))
    begin = int(still[-1]) if len(still) else 0
    logs, reach = np.log(rates[_FEWEST:]), max(1, len(settled) // _PARTS)
    slopes = []
    for middle in range(begin, end + 1):
        near = slice(max(0, middle - reach), middle + reach + 1)
        slopes.append(np.polyfit(logs[near], settled[near], 1)[0])
    return _FEWEST + begin + int(np.argmin(slopes))
