"""The page of a report: one file of HTML that needs no network."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from trainer.checkpoint.files import replace_file
from trainer.reporting.charts import Charts
from trainer.reporting.record import Checkpoint, Record, Start, read_record

FILE = "report.html"

# What a config may hold that is nobody else's business; a report is made to be passed on.
_SECRET = re.compile(r"(api_?key|access_?key|auth_?token|access_?token|password|secret)$", re.I)


def write_report(run_dir: Path, path: Path | None = None) -> Path:
    """Write the report of the run in ``run_dir``, in place of an older one.

    Args:
        run_dir: The folder of the run; the run may still be at work.
        path: The file to write; ``report.html`` in the folder if None.

    Raises:
        ValueError: If the folder holds no run, or plotly is missing.
        OSError: If the file cannot be written.
    """
    check_plotly()
    path = path or run_dir / FILE
    text = page(read_record(run_dir))
    replace_file(path, lambda file: file.write(text.encode()))
    return path


def check_plotly() -> None:
    """Refuse to go on where plotly is missing, without loading it.

    Raises:
        ValueError: Saying how to install it.
    """
    from importlib.util import find_spec

    if find_spec("plotly") is None:
        raise ValueError("a report needs plotly, which is not installed: pip install plotly")


def page(record: Record) -> str:
    """Return the report of a run as HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    charts = Charts(record)
    numbered = [{"id": f"chart-{n}", **asdict(each)} for n, each in enumerate(charts.all())]
    facts = record.starts[-1].facts if record.starts else {}
    return environment.get_template("page.html").render(
        plotly=get_plotlyjs(),
        title=f"{record.task}, {record.run_dir.name}" if record.task else record.run_dir.name,
        status=_status(record),
        facts=_summary(record, facts),
        problems=list(_problems(record)),
        limited_by=(record.end or {}).get("limited_by"),
        charts=numbered,
        clock_names=charts.clock_names,
        marks=charts.marks(),
        checkpoints=[_row_of_checkpoint(each) for each in record.checkpoints],
        starts=[_row_of_start(each) for each in record.starts],
        environment=_environment(record, facts),
        config=_yaml(record.config),
    )


def _status(record: Record) -> str:
    if record.end is not None:
        return str(record.end["status"])
    if record.is_running:
        return "running"
    return "ended without a word (killed?)" if record.task else "not known"


def _summary(record: Record, facts: Mapping[str, Any]) -> dict[str, str]:
    """Return what a person wants to know first."""
    found: dict[str, str] = {}
    clocks = {name: values[-1] for name, values in record.clocks.items() if len(values)}
    if clocks:
        total = facts.get("total_steps")
        found["steps"] = f"{clocks['step']:,.0f}" + (f" of {total:,}" if total else "")
        found["epochs"] = f"{clocks['epoch']:.0f}"
        found["samples"] = f"{clocks['samples']:,.0f}"
        found["time"] = str(timedelta(seconds=round(clocks["time_s"])))
    speed = record.series.get("perf/samples_per_s")
    if speed is not None:
        found["samples per second"] = f"{np.nanmedian(speed.values):,.4g}"
    if facts:
        where = facts["environment"]
        found["ranks"] = f"{where['world_size']} on {where['device']}"
        found["parameters"] = f"{facts['parameters']:,}"
    best = next((c for c in record.checkpoints if "best" in c.marks and c.metric is not None), None)
    if best is not None:
        found[f"best {best.monitor or 'val/loss'}, step {best.step:,}"] = f"{best.metric:.4g}"
    memory = record.series.get("perf/memory_mb")
    if memory is not None:
        found["peak memory"] = f"{np.nanmax(memory.values):,.0f} MB"
    return found


def _problems(record: Record) -> Iterator[str]:
    """Yield what a person should look at."""
    end = record.end or {}
    if end.get("error"):
        yield f"The run failed: {end['error']}"
    for name, series in record.series.items():
        bad = series.at[~np.isfinite(series.values)]
        if len(bad):
            step = record.clocks["step"][bad[0]]
            times = "once" if len(bad) == 1 else f"{len(bad):,} times"
            yield f"{name} was NaN or infinite {times}, first at step {step:,.0f}."
    for checkpoint in record.checkpoints:
        if checkpoint.problem:
            yield checkpoint.problem
    memory = record.memory_mb
    if memory and max(memory) > 1.5 * min(memory):
        yield (
            f"Ranks need different amounts of memory: rank {int(np.argmax(memory))} "
            f"{max(memory):,.0f} MB, rank {int(np.argmin(memory))} {min(memory):,.0f} MB."
        )
    if not record.series:
        yield "There are no metrics: no JsonlLogger has written metrics.jsonl."
    warned = {
        text: when for start in reversed(record.starts) for text, when in start.warnings.items()
    }
    yield from (f"{text} ({when})" for text, when in warned.items())


def _row_of_checkpoint(checkpoint: Checkpoint) -> Sequence[str]:
    metric = checkpoint.metric
    value = "" if metric is None else f"{checkpoint.monitor or 'val/loss'} {metric:.5g}"
    step = "" if checkpoint.step is None else f"{checkpoint.step:,}"
    size = f"{checkpoint.num_bytes / 1e6:,.3g} MB" if checkpoint.num_bytes else ""
    note = "cannot be read" if checkpoint.problem else ", ".join(checkpoint.marks)
    return checkpoint.name, step, value, size, note


def _row_of_start(start: Start) -> Sequence[str]:
    facts, end = start.facts, start.end
    how = f"resumed at step {facts['step']:,}" if facts["step"] else "from the beginning"
    again = facts["restarts"] + facts["requeues"]
    if again:
        how += f", started again ({again})"
    where = facts["environment"]
    ended = "" if end is None else f"{end['status']} at step {end['step']:,}"
    why = "" if end is None else end["error"] or end["reason"] or ""
    if why and why not in ended:
        ended += f": {shorten(why, 200)}"
    return _time(facts), how, f"{where['world_size']} on {where['hosts']}", _time(end), ended


def _time(facts: Mapping[str, Any] | None) -> str:
    return "" if facts is None else facts["time"][:19].replace("T", " ")


def _environment(record: Record, facts: Mapping[str, Any]) -> dict[str, str]:
    found = {name: str(value) for name, value in facts.get("environment", {}).items()}
    code = facts.get("code") or {}
    if code:
        dirty = " with changes that are not committed" if code.get("dirty") else ""
        found["git commit"] = f"{code['commit']}{dirty}"
    return {**found, "run_dir": str(record.run_dir)}


def _yaml(config: Mapping[str, Any] | None) -> str:
    from omegaconf import OmegaConf

    return "" if config is None else OmegaConf.to_yaml(_without_secrets(config))


def _without_secrets(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {
            str(name): "(not shown)" if v and _SECRET.search(str(name)) else _without_secrets(v)
            for name, v in node.items()
        }
    if isinstance(node, Sequence) and not isinstance(node, str):
        return [_without_secrets(each) for each in node]
    is_plain = node is None or isinstance(node, str | bool | int | float)
    return node if is_plain and not (isinstance(node, float) and math.isnan(node)) else str(node)
