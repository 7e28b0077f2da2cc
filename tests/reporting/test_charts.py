from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reporting.folders import start, trained, write_events

from trainer.reporting import journal
from trainer.reporting.charts import Chart, Charts
from trainer.reporting.record import read_record
from trainer.reporting.traces import MOST_POINTS


def charts_of(folder: Path) -> dict[str, Chart]:
    return {chart.title: chart for chart in Charts(read_record(folder)).all()}


def names(chart: Chart) -> list[str]:
    return [trace["name"] for trace in chart.traces]


def test_what_belongs_together_is_in_one_chart(tmp_path: Path) -> None:
    values = [
        "train/accuracy",
        "train/loss/critic",
        "train/loss/generator",
        "train/lr/critic",
        "train/lr/generator",
        "train/norm/first",
        "train/norm/last",
        "val/accuracy",
        "val/night/accuracy",
        "val/night/loss",
        "test/accuracy",
        "grad/all",
    ]
    write_events(tmp_path, {"step": 1, **dict.fromkeys(values, 1.0)})
    found = {title: names(chart) for title, chart in charts_of(tmp_path).items()}
    assert next(iter(found)) == "loss"
    assert found == {
        "loss": ["train/loss/critic", "train/loss/generator", "val/night/loss"],
        "accuracy": ["train/accuracy", "val/accuracy", "val/night/accuracy", "test/accuracy"],
        "norm": ["train/norm/first", "train/norm/last"],
        "grad": ["grad/all"],
        "learning rate": ["train/lr/critic", "train/lr/generator"],
    }


def test_every_value_is_in_some_chart(tmp_path: Path) -> None:
    own = {"step": 70, "perf/cache_hits": 0.5}
    record = read_record(write_events(trained(tmp_path), own))
    drawn = {name for chart in Charts(record).all() for name in names_of_values(chart)}
    of_steps = {name for name in record.series if name.startswith("perf/")}
    assert set(record.series) - of_steps <= drawn
    assert {"perf/samples_per_s", "perf/memory_mb", "perf/cache_hits"} <= drawn
    assert "perf/step_ms" not in drawn  # it is the sum of the parts


def names_of_values(chart: Chart) -> set[str]:
    return {str(trace.get("name")) for trace in chart.traces}


def test_long_curves_are_thinned_out_and_hide_nothing(tmp_path: Path) -> None:
    losses: list[float | None] = [1.0 + (n % 2) for n in range(20_000)]
    losses[7_000], losses[123] = 50.0, None
    write_events(tmp_path, *({"step": n, "train/loss": v} for n, v in enumerate(losses)))
    band, line = charts_of(tmp_path)["loss"].traces
    assert len(line["y"]) == len(line["clocks"]["step"]) == MOST_POINTS
    assert max(band["y"]) == 50
    assert min(band["y"]) == 1
    assert sum(line["y"]) / MOST_POINTS == pytest.approx(1.5 + 48.5 / 20_000, rel=1e-3)
    spike = int(np.argmax(line["y"]))
    assert line["clocks"]["step"][spike] == pytest.approx(7_000, abs=20)
    assert line["customdata"][spike] == [1, 50]


def test_short_curves_are_drawn_as_they_are(tmp_path: Path) -> None:
    write_events(tmp_path, {"step": 1, "val/loss": 0.5}, {"step": 2, "val/loss": None})
    (line,) = charts_of(tmp_path)["loss"].traces
    assert line["y"] == [0.5, None]
    assert line["clocks"] == {"step": [1, 2], "samples": [128, 256], "time": [0.25, 0.5]}


def test_the_parts_are_the_step(tmp_path: Path) -> None:
    trained(tmp_path, num_events=3, ranks=2)
    trained(tmp_path, num_events=3, ranks=1, first=3)  # went on with one rank
    charts = charts_of(tmp_path)
    parts = {trace["name"]: trace["y"] for trace in charts["parts of a step (ms)"].traces}
    assert list(parts) == [
        "data",
        "forward",
        "backward",
        "exposed comm",
        "waiting",
        "optimizer",
    ]
    assert parts["exposed comm"] == [2, 2, 2, 0, 0, 0]
    steps = read_record(tmp_path).series["perf/step_ms"].values
    assert np.array(list(parts.values())).sum(axis=0) == pytest.approx(steps)
    (bar,) = charts["a mean step (ms)"].traces
    # Without the first of six events of ten steps each.
    assert sum(bar["x"]) == pytest.approx(steps[1:].mean())
    hidden, exposed = charts["communication (ms)"].traces
    assert (hidden["y"], exposed["y"]) == ([3] * 3, [2] * 3)
    assert charts["communication (ms)"].note.startswith("60 %")
    assert charts["slowest rank (%)"].traces[0]["y"] == pytest.approx([100 / 3, 200 / 3])


def test_one_rank_has_no_charts_about_others(tmp_path: Path) -> None:
    titles = list(charts_of(trained(tmp_path, ranks=1)))
    assert titles == [
        "loss",
        "learning rate",
        "samples per second",
        "a mean step (ms)",
        "parts of a step (ms)",
        "peak memory (MB)",
    ]


def test_memory_by_rank(tmp_path: Path) -> None:
    start(trained(tmp_path))
    journal.note(tmp_path, "memory", {"step": 5, "by_rank_mb": [200.0, 210.0]})
    (bar,) = charts_of(tmp_path)["peak memory of each rank (MB)"].traces
    assert (bar["x"], bar["y"]) == (["rank 0", "rank 1"], [200, 210])


def test_resumes_are_marked_on_every_clock(tmp_path: Path) -> None:
    trained(tmp_path)
    start(tmp_path)
    start(tmp_path, 30)
    (mark,) = Charts(read_record(tmp_path)).marks()
    assert mark["clocks"] == {"step": 30, "samples": 3840, "time": 7.5}


@pytest.mark.parametrize(("step", "unit", "last"), [(4, "s", 1), (4 * 7200, "h", 2)])
def test_time_is_in_a_fitting_unit(tmp_path: Path, step: int, unit: str, last: float) -> None:
    write_events(tmp_path, {"step": step, "train/loss": 1.0})
    charts = Charts(read_record(tmp_path))
    assert charts.clock_names["time"] == f"time ({unit})"
    assert charts.all()[0].traces[0]["clocks"]["time"] == [last]


@pytest.mark.parametrize("num_events", [1, 6, 3000])
def test_plotly_takes_them(tmp_path: Path, num_events: int) -> None:
    import plotly.graph_objects as go

    start(trained(tmp_path, num_events))
    journal.note(tmp_path, "memory", {"step": 5, "by_rank_mb": [200.0, 210.0]})
    charts = Charts(read_record(tmp_path)).all()
    assert len(charts) > 8
    for chart in charts:
        traces: list[dict[str, Any]] = [dict(trace) for trace in chart.traces]
        for trace in traces:
            if clocks := trace.pop("clocks", None):
                trace["x"] = clocks["step"]
            assert len(trace["x"]) == len(trace["y"])
            assert not any(isinstance(y, float) and math.isnan(y) for y in trace["y"])
        go.Figure(traces, chart.layout)  # refuses a name or value that it does not know
