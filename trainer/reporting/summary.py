"""What a row in a list of runs says, and where the runs below a folder are."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trainer.checkpoint.manifest import CONFIG, FOLDER, read_manifest, step_folders
from trainer.config import DEFAULT_MONITORS
from trainer.lock import is_held
from trainer.reporting import journal, run_file
from trainer.reporting.record import CLOCKS, METRICS
from trainer.reporting.run_file import is_amount, is_number

FACTS = (*CLOCKS, "total_steps", "world_size", "started", "task")
_MARKS = (run_file.FILE, METRICS, journal.FILE, FOLDER)  # whoever has one of them may be a run
_OWN = {FOLDER, "aside", "tensorboard"}  # folders inside a run


class Measured(NamedTuple):
    """The values of one metric in a run.

    Attributes:
        last: The last one.
        best: The smallest or the largest one that is a number.
        best_step: When that was measured; None if no file tells.
    """

    last: float
    best: float
    best_step: int | None


@dataclass
class Summary:
    """A run in one row.

    Attributes:
        folder: Its folder.
        state: ``running``; ``finished``; ``failed`` by an error; ``stopped`` by a signal; ``died``
            without a word, as after a SIGKILL; ``unknown`` if no file tells.
        reason: Why it ended: an option, a callback's reason, a signal, or the error.
        facts: ``step``, ``total_steps``, ``epoch``, ``samples``, ``time_s``, ``world_size``,
            ``started`` and ``task``, as far as they are known.
        config: Every option by its dotted name.
        values: Of each metric, the last value, where ``run.json`` has one.
        problems: What could not be read.
    """

    folder: Path
    state: str = "unknown"
    reason: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def monitor(self) -> tuple[str, str]:
        """The metric that its best checkpoint is chosen by; whether ``min`` or ``max`` is best."""
        by_default = next((n for n in DEFAULT_MONITORS if n in self.values), DEFAULT_MONITORS[0])
        name = str(self.config.get("trainer.checkpoint.monitor") or by_default)
        mode = self.config.get("trainer.checkpoint.mode")
        return name, mode if mode in ("min", "max") else "min"

    def measured(self, modes: Mapping[str, str], others: bool = False) -> dict[str, Measured]:
        """Return the values of metrics, from the run's files; those without any are missing.

        Args:
            modes: The names of the metrics, each with what is best: ``min`` or ``max``.
            others: Whether to return all other metrics too, as if ``min`` were best.
        """
        found: dict[str, Measured] = {}
        keys = [b'":'] if others else [f"{json.dumps(name)}:".encode() for name in modes]
        for event in _events(self.folder / METRICS, keys):
            for name in event.keys() - set(CLOCKS) if others else event.keys() & modes.keys():
                last = math.nan if event[name] is None else event[name]
                old, mode = found.get(name), modes.get(name, "min")
                if old is None or math.isnan(old.best) or _is_better(last, old.best, mode):
                    found[name] = Measured(last, last, event["step"])
                else:
                    found[name] = old._replace(last=last)
        for name, value in self.values.items():
            if name not in found and (others or name in modes):  # there is no metrics.jsonl
                found[name] = Measured(value, value, None)
        return found


def find_runs(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the folders of runs at and below ``folder``, and those that have files but no run.

    Of the latter only the topmost. Links to folders are not followed.
    """
    runs: list[Path] = []
    others: list[Path] = []
    if _walk(folder, runs, others) and not runs:
        others = [folder]
    return runs, others


def _walk(folder: Path, runs: list[Path], others: list[Path]) -> bool:
    """Add to both; return whether there are files below ``folder``, but no run."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return True
    is_run = any(entry.name in _MARKS for entry in entries)
    if is_run:
        runs.append(folder)
    below = [
        Path(entry.path)
        for entry in entries
        if entry.is_dir(follow_symlinks=False)
        and entry.name not in _OWN
        and not entry.name.startswith(".")
    ]
    count = len(runs)
    beside: list[Path] = []
    without = [path for path in below if _walk(path, runs, beside)]
    if is_run:  # what lies beside its files belongs to it
        return False
    if len(runs) > count:
        others += [*beside, *without]
        return False
    return bool(without) or len(entries) > len(below)


def read_summary(folder: Path) -> Summary:
    """Read what there is of a run, fast: no metric but where the clock stands.

    Raises:
        ValueError: If there is no run in the folder, with what is wrong with its files.
    """
    run = Summary(folder)
    facts: dict[str, Any] = {}
    try:
        facts = run_file.read_run_file(folder)
    except (ValueError, OSError) as error:
        run.problems.append(str(error))
    run.facts = {key: facts[key] for key in FACTS if facts.get(key) is not None}
    run.values = {
        key: math.nan if value is None else value
        for key, value in (facts.get("metrics") or {}).items()
    }
    run.state = _state(folder, facts)
    run.reason = facts.get("error") or facts.get("reason")
    last = _last_event(folder / METRICS)
    if last is not None and last["step"] >= run.facts.get("step", 0):
        run.facts |= {key: last[key] for key in CLOCKS}
    checkpoint = None if facts else _newest_checkpoint(folder, run.problems)
    if checkpoint is not None:
        manifest = read_manifest(checkpoint)
        run.facts = {key: manifest[key] for key in ("step", "world_size")} | run.facts
    if not facts and last is None and checkpoint is None:
        raise ValueError(
            "; ".join(run.problems)
            or f"no {run_file.FILE}, no event in {METRICS} and no checkpoint"
        )
    run.config = flattened(facts.get("config") or _config(folder, checkpoint))
    return run


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested config by their dotted names; a list is one value."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _is_better(value: float, than: float, mode: str) -> bool:
    return value < than if mode == "min" else value > than


def _state(folder: Path, facts: Mapping[str, Any]) -> str:
    status = str(facts.get("status", "unknown"))
    if status in ("running", "unknown"):  # else it has ended, and no other one has begun since
        try:
            held = is_held(folder)
        except OSError:
            held = None
        if held:
            return "running"
        if held is False and status == "running":
            return "died"
    return status.partition(" ")[0]


def _events(path: Path, keys: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """Yield those events in which one of ``keys`` stands, as they are in the file."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if any(key in line for key in keys):
                event = _event(line)
                if event is not None:
                    yield event


def _last_event(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        for length in (1 << 16, size):
            file.seek(max(size - length, 0))
            for line in reversed(file.read().splitlines()):
                event = _event(line)
                if event is not None:
                    return event
    return None


def _event(line: bytes) -> dict[str, Any] | None:
    """Return the numbers in a line; None for a torn line, or one that somebody else wrote."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    if not isinstance(found, dict) or not all(is_amount(found.get(name)) for name in CLOCKS):
        return None
    return {name: v for name, v in found.items() if v is None or is_number(v)}


def _newest_checkpoint(folder: Path, problems: list[str]) -> Path | None:
    for path in reversed(step_folders(folder / FOLDER)):
        try:
            read_manifest(path)
        except ValueError as error:
            problems.append(str(error))
        else:
            return path
    return None


def _config(folder: Path, checkpoint: Path | None) -> Mapping[str, Any]:
    from omegaconf import OmegaConf

    for path in (checkpoint and checkpoint / CONFIG, folder / ".hydra" / "config.yaml"):
        if path is not None and path.is_file():
            loaded: Any = OmegaConf.to_container(OmegaConf.load(path))
            return dict(loaded)
    return {}
