"""Metrics as one JSON object per line."""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.loggers.base import Logger
from trainer.run_dir import set_aside

if TYPE_CHECKING:
    from trainer.run import Run


class JsonlLogger(Logger):
    """Writes ``metrics.jsonl``: each event is a line of valid JSON, also after a kill.

    A line holds ``step``, ``epoch``, ``samples``, ``time_s`` and then the values by name. JSON has
    no NaN and no infinity: such a value is ``null``. A resumed run goes on in the same file, from
    which the lines that came after its checkpoint are cut off; a new run sets an older file aside.

    Args:
        filename: Name of the file in the run's folder.
    """

    def __init__(self, filename: str = "metrics.jsonl") -> None:
        self.filename = filename
        self._file: io.FileIO | None = None
        self._num_lines: int | None = None  # None where that is not known of a resumed run

    def open(self, run: Run) -> None:
        """Open the file, cut to what came before the checkpoint that the run goes on from."""
        path = run.run_dir / self.filename
        if run.step == 0:
            set_aside(path)
        lines = _lines_up_to(path, run.step)[: self._num_lines] if path.exists() else []
        self._num_lines = len(lines)
        # Unbuffered: one write per line, so that a kill cannot leave half of an older one behind.
        self._file = io.FileIO(path, "a")
        self._file.truncate(sum(map(len, lines)))

    def log(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Write one line."""
        assert self._file is not None, "log before open"
        clock = {
            "step": run.step,
            "epoch": run.epoch,
            "samples": run.samples,
            "time_s": round(run.time_s, 3),
        }
        values = {name: v if math.isfinite(v) else None for name, v in metrics.items()}
        line = (json.dumps({**clock, **values}, allow_nan=False) + "\n").encode()
        size = os.fstat(self._file.fileno()).st_size
        if self._file.write(line) < len(line):  # the disk is full now
            self._file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
        self._num_lines = (self._num_lines or 0) + 1

    def state_dict(self) -> dict[str, Any]:
        """Return how many lines there are: of this step, some may be written after a checkpoint."""
        return {"num_lines": self._num_lines}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        self._num_lines = state["num_lines"]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._num_lines = None


def _lines_up_to(path: Path, step: int) -> list[bytes]:
    """Return the whole lines at or before ``step``; steps only grow in the file."""
    lines = []
    with path.open("rb") as file:
        for line in file:
            try:
                beyond = json.loads(line)["step"] > step
            except ValueError:  # torn by a kill
                break
            if beyond or not line.endswith(b"\n"):
                break
            lines.append(line)
    return lines
