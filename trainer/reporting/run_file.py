"""``run.json``: what a run is, and how it ended. Every run has one, whatever it logs."""

from __future__ import annotations

import json
import math
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from trainer.diagnosis.failures import follows_from_another
from trainer.loggers.base import Logger
from trainer.messages import reason, warn
from trainer.run import Run

FILE = "run.json"
_LONGEST = 500  # characters of an error


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
    if not isinstance(found, dict) or not isinstance(found.get("config"), dict):
        raise ValueError(f"{path} is not of a run of this trainer")
    return found


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _text(error: BaseException | None) -> str | None:
    if error is None:
        return None
    if follows_from_another(error):
        return "another rank failed"
    return f"{type(error).__name__}: {error}".strip(": ")[:_LONGEST]
