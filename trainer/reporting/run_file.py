"""``run.json``: what a run is, and how it ended. Every run has one, whatever it logs."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from trainer.diagnosis.failures import follows_from_another
from trainer.loggers.base import Logger
from trainer.messages import reason, warn
from trainer.run import Run

FILE = "run.json"
_LONGEST = 500  # characters of an error
_LARGEST = 1e12  # count, or seconds
_AMOUNTS = ("step", "epoch", "samples", "total_steps", "world_size", "time_s")
_TEXTS = ("reason", "error", "task", "started", "ended")


class RunFile(Logger):
    """Writes ``run.json`` when a fit starts and when it ends, however it ends.

    It says ``running`` from the start on, so one that still says so though nobody holds the lock
    of the folder is of a run that died. A file that cannot be written is warned of.
    """

    def open(self, run: Run) -> None:
        """Say that the run is at work."""
        self._started = _now()
        self._write(run, {})

    def end(self, run: Run) -> None:
        """Say how it has ended."""
        values = {name: v if math.isfinite(v) else None for name, v in run.metrics.items()}
        facts = {"error": _text(sys.exc_info()[1]), "ended": _now(), "metrics": values}
        self._write(run, facts)

    def _write(self, run: Run, facts: dict[str, Any]) -> None:
        task: Any = run.task.module if run.task._speaks_for_another else run.task
        whole = {
            "status": run.status,
            "reason": run.stop_reason,
            "error": None,
            "task": type(task).__name__,
            "step": run.step,
            "epoch": run.epoch,
            "samples": run.samples,
            "total_steps": run.total_steps,
            "world_size": run.world_size,
            "time_s": round(run.time_s, 3),
            "started": self._started,
            "ended": None,
            **facts,
            "config": dict(run.run_config),
        }
        path = run.run_dir / FILE
        new = path.with_name(f"{FILE}.new")
        try:
            new.write_text(json.dumps(whole, indent=2, default=str) + "\n", encoding="utf-8")
            os.replace(new, path)  # a reader never sees half of one
        except OSError as error:
            warn(f"{path} cannot be written: {reason(error)}; training goes on")


def read_run_file(run_dir: Path) -> dict[str, Any]:
    """Return what ``run.json`` says; empty where there is none.

    Raises:
        ValueError: If it is not one of ours.
        OSError: If it cannot be read.
    """
    path = run_dir / FILE
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict) or not _is_sound(found):
        raise ValueError(f"{path} is not of a run of this trainer")
    return found


def is_number(value: Any) -> bool:
    """Whether a value in a file may be a count, a time, or what was measured."""
    return isinstance(value, int | float)


def is_amount(value: Any) -> bool:
    """Whether a value in a file may be a count or a time."""
    return is_number(value) and 0 <= value < _LARGEST  # NaN is neither


def _is_sound(facts: Mapping[str, Any]) -> bool:
    """Whether the values are of the kinds that a run's are; some may be missing."""
    known = {name: value for name, value in facts.items() if value is not None}
    metrics = known.get("metrics", {})
    return (
        isinstance(known.get("config"), dict)
        and isinstance(known.get("status"), str)
        and all(isinstance(known.get(name, ""), str) for name in _TEXTS)
        and all(is_amount(known.get(name, 0)) for name in _AMOUNTS)
        and isinstance(metrics, dict)
        and all(value is None or is_number(value) for value in metrics.values())
    )


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _text(error: BaseException | None) -> str | None:
    if error is None:
        return None
    if follows_from_another(error):
        return "another rank failed"
    return f"{type(error).__name__}: {error}".strip(": ")[:_LONGEST]
