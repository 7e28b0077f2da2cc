"""Runs side by side: a row for each, with the options in which they differ."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from trainer.reporting.summary import FACTS, Measured, Summary

Row: TypeAlias = dict[str, Any]

_ALWAYS_DIFFERS = {"trainer.run_dir"}
_FALLBACK = "train/loss"  # for runs that have not measured what they monitor
_NOTHING = Measured(math.nan, math.nan, None)


class Comparison:
    """Several runs side by side.

    Attributes:
        runs: In the order of their names.
        modes: The metrics that are told of, each with what is best, ``min`` or ``max``.
        options: Those in which the runs differ, by dotted name; those that all have come first,
            and a task's own before the Trainer's.
    """

    def __init__(self, runs: Sequence[Summary], metrics: Sequence[str] = ()) -> None:
        """Read the metrics of ``runs``.

        Args:
            runs: At least one.
            metrics: The names of some; where the runs do not say what is best (by
                ``checkpoint.monitor`` and ``.mode``), the smallest value is, or what is written
                behind the name: ``val/accuracy:max``. None of them: what the runs monitor.

        Raises:
            ValueError: If no run has measured one of the ``metrics``.
        """
        base = os.path.commonpath([run.folder.absolute() for run in runs])
        names = {id(run): _name(run, base) for run in runs}
        self.runs = sorted(runs, key=lambda run: _natural(names[id(run)]))
        self._names = [names[id(run)] for run in self.runs]
        monitored = dict(run.monitor for run in self.runs)
        self.modes = dict(_asked(text, monitored) for text in metrics) or monitored
        self._read()
        if missing := [name for name in self.modes if name not in self._there] if metrics else []:
            known = {name for run in self.runs for name in run.values}
            raise ValueError(
                f"no run has measured {missing[0]}"
                + (f"; there are: {', '.join(sorted(known))}" if known else "")
            )
        if not self._there:
            self.modes = {_FALLBACK: "min"}
            self._read()
        self.modes = {name: mode for name, mode in self.modes.items() if name in self._there}
        self.options = _differing([run.config for run in self.runs if run.config])

    def rows(self, sort: str | None = None, reverse: bool = False) -> list[Row]:
        """Return a row per run, by column; None where it has no such value.

        Args:
            sort: The column to sort by; an option also by the last part of its name, and a metric
                by its best value, the best run first. None: by name.
            reverse: Whether to turn the order around. Runs without the value stay at the end.

        Raises:
            ValueError: If there is no such column.
        """
        rows = [self._row(number) for number in range(len(self.runs))]
        full = {short: name for name, short in short_names(self.options).items()}
        column = full.get(sort or "run", sort or "run")
        if column not in rows[0]:
            raise ValueError(
                f"cannot sort by {sort}; there are: {', '.join(rows[0])} (and every metric that "
                "--metric names)"
            )
        mode = self.modes.get(column)
        value = f"best {column}" if mode else column
        known = [row for row in rows if row[value] is not None]
        known.sort(key=lambda row: _sortable(row[value]), reverse=reverse != (mode == "max"))
        return known + [row for row in rows if row[value] is None]

    def _read(self) -> None:
        self._measured = [run.measured(self.modes) for run in self.runs]
        self._there = {name for found in self._measured for name in found}

    def _row(self, number: int) -> Row:
        run = self.runs[number]
        row: Row = {
            "run": self._names[number],
            "folder": str(run.folder),
            "state": run.state,
            "reason": run.reason,
            **{name: run.facts.get(name) for name in FACTS},
        }
        for name in self.modes:
            measured = self._measured[number].get(name, _NOTHING)
            row[name], row[f"best {name}"] = finite(measured.last), finite(measured.best)
            row[f"step of best {name}"] = measured.best_step
        return row | {n: run.config.get(n) for n in self.options if n not in row}


def differences(one: Summary, other: Summary) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Return what ``one`` has and what ``other`` has, where that is not the same.

    Returns:
        ``options`` by dotted name, and ``metrics``: every one, its last value, and its best one if
        it is monitored. None where a run has none.
    """
    both = (one, other)
    monitored = dict(run.monitor for run in both)
    measured = [run.measured(monitored, others=True) for run in both]
    metrics: dict[str, tuple[Any, Any]] = {}
    for name in sorted({*measured[0], *measured[1]}):
        left, right = (found.get(name, _NOTHING) for found in measured)
        metrics[name] = finite(left.last), finite(right.last)
        if name in monitored:
            metrics[f"best {name}"] = finite(left.best), finite(right.best)
    options = _differing([run.config for run in both])
    return {
        "options": {name: (one.config.get(name), other.config.get(name)) for name in options},
        "metrics": metrics,
    }


def finite(value: float) -> float | None:
    """Return a number that JSON has, or None."""
    return value if math.isfinite(value) else None


def short_names(options: Sequence[str]) -> dict[str, str]:
    """Return for each dotted name its last parts, as many as tell it from the others."""
    short: dict[str, str] = {}
    for name in options:
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            short[name] = ".".join(parts[-count:])
            if sum(f".{other}".endswith(f".{short[name]}") for other in options) == 1:
                break
    return short


def _asked(text: str, monitored: Mapping[str, str]) -> tuple[str, str]:
    name, _, mode = text.rpartition(":")
    if name and mode in ("min", "max"):
        return name, mode
    return text, monitored.get(text, "min")


def _name(run: Summary, base: str) -> str:
    path = run.folder.absolute()
    below = os.path.relpath(path, base)
    return path.name if below == "." else below


def _differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for config in configs for name in config)
    differing = [
        name
        for name in names
        if name not in _ALWAYS_DIFFERS
        and len({json.dumps(c.get(name), sort_keys=True, default=str) for c in configs}) > 1
    ]
    return sorted(
        differing,
        key=lambda name: (
            not all(name in config for config in configs),
            name.startswith("trainer."),
        ),
    )


def _natural(text: str) -> list[Any]:
    """Return what sorts ``job-10`` after ``job-9``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def _sortable(value: Any) -> tuple[int, Any]:
    return (0, value) if isinstance(value, int | float) else (1, _natural(str(value)))
