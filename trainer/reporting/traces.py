"""What plotly draws in a chart, as plain values.

A trace over time has no ``x`` but ``clocks``: x by the name of each clock; the page chooses one.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from trainer.reporting.record import Floats

MOST_POINTS = 1000  # of a curve; of more, this many stretches are drawn
_MOST_MARKED = 40  # a curve of so few points shows each of them
_COLORS = ("#3b7dd8", "#e8743b", "#3fa66b", "#b0519e", "#8a6d3b", "#19a2b5", "#c94c4c", "#6b6bd6")

Trace: TypeAlias = dict[str, Any]
Clocks: TypeAlias = Mapping[str, Floats]


def line(name: str, number: int, clocks: Clocks, values: Floats, marked: bool) -> list[Trace]:
    """Return the curve of ``values``; of many, the means of stretches, and a band around them.

    Args:
        name: In the legend.
        number: Among the lines of its chart, for its color.
        clocks: Of each value.
        values: NaN where there is a gap.
        marked: Whether to show the points, where they are few.
    """
    label, color = html.escape(name, quote=False), _COLORS[number % len(_COLORS)]
    curve = {
        "type": "scatter",
        "name": label,
        "mode": "lines+markers" if marked and len(values) <= _MOST_MARKED else "lines",
        "line": {"color": color, "width": 1.8},
        "marker": {"size": 5},
        "hovertemplate": "%{y:.5g}",
    }
    if len(values) <= MOST_POINTS:
        return [{**curve, "clocks": _plain(clocks), "y": numbers(values)}]
    clocks, mean, low, high = _thinned(clocks, values)
    known = np.isfinite(low)
    band = {
        "type": "scatter",
        "name": label,
        "legendgroup": label,
        "mode": "lines",
        "fill": "toself",
        "line": {"color": color, "width": 0},
        "opacity": 0.35,
        "hoverinfo": "skip",
        "showlegend": False,
        "clocks": _plain({k: np.r_[v[known], v[known][::-1]] for k, v in clocks.items()}),
        "y": numbers(np.r_[high[known], low[known][::-1]]),
    }
    means = {
        "legendgroup": label,
        "clocks": _plain(clocks),
        "y": numbers(mean),
        "customdata": [list(pair) for pair in zip(numbers(low), numbers(high), strict=True)],
        "hovertemplate": "%{y:.5g} (%{customdata[0]:.4g} to %{customdata[1]:.4g})",
    }
    return [band, {**curve, **means}]


def stacked(parts: Mapping[str, Floats], clocks: Clocks, colors: Mapping[str, str]) -> list[Trace]:
    """Return areas of milliseconds, one upon the other; of many values, the means of stretches."""
    found = []
    for name, values in parts.items():
        places = clocks
        if len(values) > MOST_POINTS:
            places, values, _, _ = _thinned(clocks, values)
        area = {
            "type": "scatter",
            "name": name,
            "mode": "lines",
            "stackgroup": "parts",
            "line": {"width": 0.5, "color": colors[name]},
            "hovertemplate": "%{y:.3g} ms",
            "clocks": _plain(places),
            "y": numbers(values),
        }
        found.append(area)
    return found


def bars(labels: Sequence[str], values: Sequence[float], hover: str) -> Trace:
    """Return one bar for each label; ``hover`` is what its value looks like."""
    return {
        "type": "bar",
        "x": list(labels),
        "y": numbers(values),
        "marker": {"color": _COLORS[0]},
        "width": min(0.8, 0.12 * len(labels)),
        "hovertemplate": f"{hover}<extra>%{{x}}</extra>",
    }


def numbers(values: Iterable[float]) -> list[float | None]:
    """Return numbers for JSON, which has no NaN, in as many digits as can be seen."""
    return [float(f"{v:.7g}") if math.isfinite(v) else None for v in map(float, values)]


def _thinned(clocks: Clocks, values: Floats) -> tuple[Clocks, Floats, Floats, Floats]:
    """Return the means of so many stretches, with the least and the largest value of each."""
    starts = np.arange(MOST_POINTS) * len(values) // MOST_POINTS
    sizes = np.diff(starts, append=len(values))
    known = np.isfinite(values)
    counts = np.add.reduceat(known.astype(float), starts)
    with np.errstate(invalid="ignore"):  # 0 / 0 where a stretch has no value
        mean = np.add.reduceat(np.where(known, values, 0), starts) / counts
    return (
        {name: np.add.reduceat(each, starts) / sizes for name, each in clocks.items()},
        mean,
        np.fmin.reduceat(values, starts),
        np.fmax.reduceat(values, starts),
    )


def _plain(clocks: Clocks) -> dict[str, list[float | None]]:
    return {name: numbers(values) for name, values in clocks.items()}
