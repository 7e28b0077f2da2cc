"""What a report tells beside the metrics: when a run was started, on what, and how it ended.

``journal.jsonl`` has one JSON object per line. A run that is started again goes on in it, so it
holds all the starts of a run, those that died included.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

FILE = "journal.jsonl"

Event = Literal["start", "warning", "memory", "end"]


def note(run_dir: Path, event: Event, facts: Mapping[str, Any]) -> None:
    """Add a line to the journal of the run in ``run_dir``."""
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    line = json.dumps({"event": event, "time": now, **facts}, default=str) + "\n"
    with (run_dir / FILE).open("ab", buffering=0) as file:  # whole lines, also after a kill
        file.write(line.encode())


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a file, one per line; a line that a kill has torn is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found
