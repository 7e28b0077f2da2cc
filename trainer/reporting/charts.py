"""The charts of a report: what plotly draws, as plain values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainer.reporting import traces
from trainer.reporting.record import Floats, Ints, Record
from trainer.reporting.traces import Clocks, Trace

SPLITS = ("train", "val", "test")
_SPEEDS = {
    "perf/samples_per_s": "samples per second",
    "perf/steps_per_s": "steps per second",
}
# The parts of a step, in the order in which they are stacked, and their colors.
_PARTS = {
    "data": "#8c8c8c",
    "forward": "#3b7dd8",
    "backward": "#7a5cc4",
    "exposed comm": "#d9534f",
    "waiting": "#e8963c",
    "optimizer": "#3fa66b",
}
_HIDDEN_COLOR = "#3fa66b"
_KNOWN = re.compile(
    r"perf/((step|data|forward|backward|optimizer|comm|comm_hidden|wait|slowest_by)_ms|slowest_rank"
    r"|(samples|steps)_per_s|memory_mb)$"
)
_FROM_ZERO = {"yaxis": {"rangemode": "tozero"}}


@dataclass
class Chart:
    """One chart.

    Attributes:
        title: What it shows.
        section: Where it stands: ``curves``, ``speed`` or ``memory``.
        traces: Of plotly. One over time has no ``x``, but ``clocks``: x by the name of the clock.
        layout: Of plotly, beside what all charts have.
        note: What one should know to read it.
    """

    title: str
    section: str
    traces: list[Trace]
    layout: dict[str, Any] = field(default_factory=dict)
    note: str = ""


class Charts:
    """Makes the charts of one run."""

    def __init__(self, record: Record) -> None:
        """Choose the unit of time."""
        self._record = record
        seconds = record.clocks["time_s"]
        longest = float(seconds[-1]) if len(seconds) else 0.0
        unit, name = next(
            ((u, n) for u, n in ((3600, "h"), (60, "min")) if longest >= 2 * u), (1, "s")
        )
        self._clocks = {
            "step": record.clocks["step"],
            "samples": record.clocks["samples"],
            "time": seconds / unit,
        }
        self._unit = unit
        self.clock_names = {"step": "step", "samples": "samples", "time": f"time ({name})"}

    def all(self) -> list[Chart]:
        """Return them, in the order of the page."""
        return [*self._curves(), *self._speed(), *self._memory()]

    def marks(self) -> list[dict[str, Any]]:
        """Return the places on the clocks where the run went on from a checkpoint."""
        return [
            {
                "text": "resumed",
                "clocks": {
                    "step": start.facts["step"],
                    "samples": start.facts["samples"],
                    "time": start.facts["time_s"] / self._unit,
                },
            }
            for start in self._record.starts
            if start.facts["step"]
        ]

    def _curves(self) -> Iterator[Chart]:
        """One chart for each kind of value, of all splits; the loss comes first."""
        series = self._record.series
        sets = _val_sets(series)
        groups: dict[str, list[str]] = {"loss": []}
        for name in series:
            if not name.startswith("perf/"):
                groups.setdefault(_kind(name, sets), []).append(name)
        rates = groups.pop("lr", [])
        for kind, names in groups.items():
            if names:
                yield Chart(kind, "curves", self._lines(names))
        if rates:
            axis = {"rangemode": "tozero", "exponentformat": "e"}
            layout = {"yaxis": axis, "showlegend": len(rates) > 1}
            yield Chart("learning rate", "curves", self._lines(rates, marked=False), layout)

    def _speed(self) -> Iterator[Chart]:
        series = self._record.series
        alone = {**_FROM_ZERO, "showlegend": False}
        for name, title in _SPEEDS.items():
            if name in series:
                yield Chart(title, "speed", self._lines([name]), alone)
        parts, at = self._step_parts()
        if parts:
            yield self._mean_step(parts, at)
            yield Chart(
                "parts of a step (ms)",
                "speed",
                traces.stacked(parts, self._at(at), _PARTS),
                {**_FROM_ZERO, "showlegend": False},
                "The colors are those of the mean step.",
            )
        comm, at = self._columns(["comm_ms", "comm_hidden_ms"])
        if comm:
            shown = {"hidden": comm["comm_hidden_ms"]}
            shown["exposed"] = np.maximum(comm["comm_ms"] - comm["comm_hidden_ms"], 0)
            colors = {"hidden": _HIDDEN_COLOR, "exposed": _PARTS["exposed comm"]}
            total = float(comm["comm_ms"].sum())
            share = float(shown["hidden"].sum()) / total if total > 0 else 0.0
            note = f"{100 * share:.0f} % is hidden: it passes while backward still computes."
            areas = traces.stacked(shown, self._at(at), colors)
            yield Chart("communication (ms)", "speed", areas, _FROM_ZERO, note)
        slow, _ = self._columns(["slowest_rank", "slowest_by_ms"])
        if slow:
            yield _slowest(slow["slowest_rank"], slow["slowest_by_ms"])
        for name in series:  # somebody's own
            if name.startswith("perf/") and not _KNOWN.match(name):
                yield Chart(name.removeprefix("perf/"), "speed", self._lines([name]), alone)

    def _memory(self) -> Iterator[Chart]:
        if "perf/memory_mb" in self._record.series:
            layout = {**_FROM_ZERO, "showlegend": False}
            note = "The most that the rank with the most has had so far."
            lines = self._lines(["perf/memory_mb"])
            yield Chart("peak memory (MB)", "memory", lines, layout, note)
        ranks = self._record.memory_mb
        if len(ranks) > 1:
            yield Chart(
                "peak memory of each rank (MB)",
                "memory",
                [traces.bars([f"rank {n}" for n in range(len(ranks))], ranks, "%{y:,.0f} MB")],
                {"xaxis": {"type": "category"}},
            )

    def _lines(self, names: Iterable[str], marked: bool = True) -> list[Trace]:
        found: list[Trace] = []
        for number, name in enumerate(names):
            series = self._record.series[name]
            found += traces.line(name, number, self._at(series.at), series.values, marked)
        return found

    def _at(self, events: Ints) -> Clocks:
        return {clock: values[events] for clock, values in self._clocks.items()}

    def _columns(self, names: Sequence[str]) -> tuple[dict[str, Floats], Any]:
        """Return ``perf/`` values of the events that have all of ``names``, and their numbers."""
        series = self._record.series
        found = [series.get(f"perf/{name}") for name in names]
        at: Any = None
        for each in found:
            if each is None:
                return {}, None
            known = each.at[np.isfinite(each.values)]
            at = known if at is None else np.intersect1d(at, known)
        if not len(at):
            return {}, None
        columns = {
            name: each.values[np.searchsorted(each.at, at)]
            for name, each in zip(names, found, strict=True)
            if each is not None
        }
        return columns, at

    def _step_parts(self) -> tuple[dict[str, Floats], Any]:
        """Return the parts of a step, where they are known; one rank alone waits for nobody."""
        own = ["data_ms", "forward_ms", "backward_ms", "optimizer_ms"]
        found, at = self._columns(own)
        if not found:
            return {}, None
        comm, hidden, wait = (self._filled(f"{n}_ms", at) for n in ("comm", "comm_hidden", "wait"))
        parts = {name.removesuffix("_ms"): found[name] for name in own[:3]}
        if comm.any():
            parts["exposed comm"] = np.maximum(comm - hidden, 0)
        if wait.any():
            parts["waiting"] = wait
        parts["optimizer"] = found["optimizer_ms"]
        return parts, at

    def _filled(self, name: str, at: Any) -> Floats:
        """Return a ``perf/`` value of the events ``at``, and 0 where there is none."""
        whole: Floats = np.zeros(len(self._clocks["step"]))
        series = self._record.series.get(f"perf/{name}")
        if series is not None:
            whole[series.at] = np.nan_to_num(series.values)
        filled: Floats = whole[at]
        return filled

    def _mean_step(self, parts: Mapping[str, Floats], at: Any) -> Chart:
        """Bars of the means, each event weighing as much as it has steps; without the first."""
        steps = np.diff(self._clocks["step"][at], prepend=0)
        first = 1 if len(at) > 1 else 0
        weight = steps[first:] / max(1, steps[first:].sum())
        means = {n: float(v[first:] @ weight) for n, v in parts.items()}
        total = sum(means.values()) or 1.0
        names = list(means)[::-1]  # plotly begins at the bottom
        bar = {
            "type": "bar",
            "orientation": "h",
            "y": names,
            "x": traces.numbers(np.array([means[name] for name in names])),
            "text": [f"{means[n]:.3g} ms, {100 * means[n] / total:.0f} %" for n in names],
            "textposition": "outside",
            "marker": {"color": [_PARTS[name] for name in names]},
            "hovertemplate": "%{text}<extra></extra>",
            "cliponaxis": False,
        }
        room = 1.7 * max(*means.values(), 1e-6)  # for what stands beside the longest
        layout = {"xaxis": {"range": [0, room]}}
        note = f"A step takes {total:.3g} ms on average" + (
            ", the first log event left out." if first else "."
        )
        return Chart("a mean step (ms)", "speed", [bar], layout, note)


def _slowest(ranks: Floats, by_ms: Floats) -> Chart:
    """Bars: in what share of the log events each rank was the slowest."""
    numbers, counts = np.unique(ranks.astype(int), return_counts=True)
    shares = 100 * counts / len(ranks)
    behind = [float(by_ms[ranks == number].mean()) for number in numbers]
    labels = [f"rank {number}" for number in numbers]
    bar = traces.bars(labels, shares.tolist(), "%{y:.0f} %, then by %{customdata:.3g} ms")
    note = "In how many of 100 log events a rank had the most to do."
    layout = {"xaxis": {"type": "category"}, "yaxis": {"range": [0, 100]}}
    return Chart(
        "slowest rank (%)", "speed", [{**bar, "customdata": traces.numbers(behind)}], layout, note
    )


def _val_sets(names: Iterable[str]) -> set[str]:
    """Return the names of the sets in ``val/<set>/loss`` and ``test/<set>/loss``."""
    parts = [name.split("/") for name in names]
    return {p[1] for p in parts if len(p) == 3 and p[0] != "train" and p[2] == "loss"}


def _kind(name: str, sets: set[str]) -> str:
    """Return what a value is of, apart from its split, its set and its part."""
    split, _, rest = name.partition("/")
    if split not in SPLITS or not rest:
        return split
    in_set, _, metric = rest.partition("/")
    if split != "train" and metric and in_set in sets:
        rest = metric
    return rest.partition("/")[0]
