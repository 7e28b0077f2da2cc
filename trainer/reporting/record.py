"""What the folder of a run says about it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from trainer.checkpoint.manifest import CONFIG, FOLDER, read_manifest, step_folders
from trainer.lock import is_held
from trainer.reporting import journal
from trainer.reporting.run_file import read_run_file

METRICS = "metrics.jsonl"
CLOCKS = ("step", "epoch", "samples", "time_s")

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Series:
    """The values of one name.

    Attributes:
        at: The numbers of the events that have one.
        values: Of each; NaN where it was not finite.
    """

    at: Ints
    values: Floats


@dataclass(frozen=True)
class Checkpoint:
    """One in the run's folder.

    Attributes:
        name: Of its folder.
        step: Optimizer steps done.
        metric: The value of ``monitor`` then, or None.
        monitor: What the best one is chosen by.
        num_bytes: Of all its files.
        marks: ``best`` and ``last``, where it is that.
        problem: Why it cannot be read, or None.
    """

    name: str
    step: int | None = None
    metric: float | None = None
    monitor: str | None = None
    num_bytes: int = 0
    marks: Sequence[str] = ()
    problem: str | None = None


@dataclass
class Start:
    """One start of the run.

    Attributes:
        facts: What the journal says of it.
        warnings: What Python warned of, each once, and when first.
        memory_mb: The most memory that each rank has had, as last noted.
        end: What the journal says of its end; None where it has not said so.
    """

    facts: Mapping[str, Any]
    warnings: dict[str, str] = field(default_factory=dict)
    memory_mb: Sequence[float] = ()
    end: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Record:
    """A run, as its files have it.

    Attributes:
        run_dir: Its folder.
        clocks: For each name in `CLOCKS`, a value per event.
        series: The values by name.
        starts: In order; empty where no `trainer.callbacks.Report` took part.
        config: The config, in plain values; None where there is none.
        checkpoints: Oldest first.
        task: The name of the task's class, if that is known.
        end: How the last start ended, if that is known.
        is_running: Whether a fit is at work in the folder.
    """

    run_dir: Path
    clocks: Mapping[str, Floats]
    series: Mapping[str, Series]
    starts: Sequence[Start]
    config: Mapping[str, Any] | None
    checkpoints: Sequence[Checkpoint]
    task: str | None
    end: Mapping[str, Any] | None
    is_running: bool

    @property
    def memory_mb(self) -> Sequence[float]:
        """The most memory that each rank has had, in the last start of which that is known."""
        return next((start.memory_mb for start in reversed(self.starts) if start.memory_mb), ())


def read_record(run_dir: Path) -> Record:
    """Read what there is of a run.

    Raises:
        ValueError: If the folder holds no run.
    """
    run_dir = run_dir.resolve()
    clocks, series = _events(run_dir / METRICS)
    starts = _starts(run_dir)
    checkpoints = _checkpoints(run_dir / FOLDER)
    if not (series or starts or checkpoints):
        raise ValueError(
            f"{run_dir} holds no run: it has no {METRICS}, no {journal.FILE} and no checkpoint; "
            "give the folder that a run has printed as run_dir"
        )
    run_file = _run_file(run_dir)
    last = starts[-1] if starts else None
    if last is None or _began_later(run_file, last):  # without a Report
        end = run_file if run_file.get("status", "running") != "running" else None
    else:
        end = last.end
    return Record(
        run_dir,
        clocks,
        series,
        starts,
        run_file.get("config") or _config(run_dir, starts, checkpoints),
        checkpoints,
        task=run_file.get("task") or (None if last is None else last.facts["task"]),
        end=end,
        is_running=end is None and _is_at_work(run_dir),
    )


def _run_file(run_dir: Path) -> Mapping[str, Any]:
    try:
        return read_run_file(run_dir)
    except (ValueError, OSError):
        return {}


def _began_later(run_file: Mapping[str, Any], start: Start) -> bool:
    if "started" not in run_file:
        return False
    return datetime.fromisoformat(run_file["started"]) > datetime.fromisoformat(start.facts["time"])


def _is_at_work(run_dir: Path) -> bool:
    try:
        return bool(is_held(run_dir))
    except OSError:  # somebody else's folder
        return False


def _events(path: Path) -> tuple[dict[str, Floats], dict[str, Series]]:
    clocks: dict[str, list[float]] = {name: [] for name in CLOCKS}
    found: dict[str, tuple[list[int], list[float]]] = {}
    for number, event in enumerate(e for e in journal.read_lines(path) if e.keys() >= set(CLOCKS)):
        for name, value in event.items():
            if name in clocks:
                clocks[name].append(value)
                continue
            at, values = found.setdefault(name, ([], []))
            at.append(number)
            values.append(math.nan if value is None else value)
    return (
        {name: np.array(values, dtype=np.float64) for name, values in clocks.items()},
        {name: Series(np.array(at), np.array(vs, float)) for name, (at, vs) in found.items()},
    )


# What a line of the journal must have, by the event that it tells of.
_NEEDED: dict[str, set[str]] = {
    "start": {
        *("time", "step", "samples", "time_s", "task", "parameters", "restarts", "requeues"),
        *("environment", "config"),
    },
    "warning": {"text", "category", "step"},
    "memory": {"by_rank_mb"},
    "end": {"time"},
}


def _starts(run_dir: Path) -> list[Start]:
    starts: list[Start] = []
    for line in journal.read_lines(run_dir / journal.FILE):
        needed = _NEEDED.get(str(line.get("event")))
        if needed is None or not line.keys() >= needed:  # somebody else's
            continue
        if line["event"] == "start":
            starts.append(Start(line))
        elif not starts:
            continue
        elif line["event"] == "warning":
            starts[-1].warnings[line["text"]] = f"{line['category']}, step {line['step']:,}"
        elif line["event"] == "memory":
            starts[-1].memory_mb = line["by_rank_mb"]
        elif line["event"] == "end":
            starts[-1].end = line
    return starts


def _checkpoints(folder: Path) -> list[Checkpoint]:
    marks: dict[str, list[str]] = {}
    for mark in ("best", "last"):
        if (folder / mark).exists():
            marks.setdefault((folder / mark).resolve().name, []).append(mark)
    return [_checkpoint(path, marks.get(path.name, ())) for path in step_folders(folder)]


def _checkpoint(path: Path, marks: Sequence[str]) -> Checkpoint:
    try:
        facts = read_manifest(path)
    except ValueError as error:
        return Checkpoint(path.name, marks=marks, problem=str(error))
    return Checkpoint(
        path.name,
        facts["step"],
        facts["metric"],
        facts["monitor"],
        sum(file["size"] for file in facts["files"].values()),
        marks,
    )


def _config(
    run_dir: Path, starts: Sequence[Start], checkpoints: Sequence[Checkpoint]
) -> Mapping[str, Any] | None:
    if starts:
        found: Mapping[str, Any] = starts[-1].facts["config"]
        return found
    from omegaconf import OmegaConf

    whole = [c.name for c in checkpoints if c.problem is None]
    places = [run_dir / FOLDER / name / CONFIG for name in reversed(whole)]
    for path in (*places, run_dir / ".hydra" / "config.yaml"):
        if path.exists():
            loaded: Any = OmegaConf.to_container(OmegaConf.load(path))
            return {str(name): value for name, value in loaded.items()}
    return None
