"""Folders of runs that never ran."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from trainer.reporting import journal

ENVIRONMENT = {"python": "3.12", "torch": "2.13", "world_size": 2, "hosts": "one", "device": "cpu"}


def write_events(folder: Path, *events: dict[str, Any]) -> Path:
    """Write metrics.jsonl; an event needs no more than its step."""
    with (folder / "metrics.jsonl").open("a") as file:
        for event in events:
            step = event["step"]
            clock = {"epoch": step // 50, "samples": 128 * step, "time_s": step / 4}
            file.write(json.dumps({**clock, **event}) + "\n")
    return folder


def trained(folder: Path, num_events: int = 6, ranks: int = 2, first: int = 0) -> Path:
    """Write what a run with log events every 10 steps writes, and some validations."""
    parts = {"data": 1.0, "forward": 4.0, "backward": 7.0, "optimizer": 2.0}
    if ranks > 1:
        parts |= {"comm": 5.0, "comm_hidden": 3.0, "wait": 1.5}
    for number in range(first + 1, first + num_events + 1):
        loss = math.exp(-number / (first + num_events))
        step_ms = sum(parts.values()) - 2 * parts.get("comm_hidden", 0)
        event: dict[str, Any] = {
            "step": 10 * number,
            "train/loss": loss,
            "train/lr": 0.001,
            "perf/samples_per_s": 1000.0,
            "perf/step_ms": step_ms,
            **{f"perf/{name}_ms": ms for name, ms in parts.items()},
            "perf/memory_mb": 300.0 + number,
        }
        if ranks > 1:
            event |= {"perf/slowest_rank": number % ranks, "perf/slowest_by_ms": 2.0}
        write_events(folder, event)
        if number % 3 == 0:
            write_events(folder, {"step": 10 * number, "val/loss": loss + 0.1})
    return folder


def start(folder: Path, step: int = 0, **facts: Any) -> None:
    """Note a start in the journal."""
    usual = {
        "step": step,
        "samples": 128 * step,
        "time_s": step / 4,
        "total_steps": 100,
        "restarts": 0,
        "requeues": 0,
        "task": "Net",
        "parameters": 1200,
        "environment": ENVIRONMENT,
        "code": {"commit": "abc123", "dirty": True},
        "config": {"trainer": {"devices": 2}},
    }
    journal.note(folder, "start", {**usual, **facts})


def end(folder: Path, step: int, status: str = "finished", **facts: Any) -> None:
    """Note an end in the journal."""
    usual = {"step": step, "status": status, "reason": None, "error": None, "limited_by": None}
    journal.note(folder, "end", {**usual, **facts})
