"""Programs that run side by side, and what they say meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import on_machines

TESTS = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("on_machines.py")
ENV = {
    "PYTHONPATH": os.pathsep.join(map(str, [TESTS.parent, TESTS])),
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
_POLL_S = 0.05


class Running:
    """A program whose output is read while it runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @classmethod
    def program(cls, *command: str, cwd: Path, **env: str) -> Running:
        return cls(
            subprocess.Popen(
                command,
                cwd=cwd,
                env={**clean_environ(), **ENV, **env},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                **PIPED,
            )
        )

    @property
    def said(self) -> str:
        return "".join(self.lines)

    def wait_for(self, text: str, within_s: float = 60) -> None:
        """Wait until it has said this."""
        self._wait(lambda: text in self.said, within_s, f"did not say {text!r}")

    def end(self, within_s: float = 100) -> int:
        """Wait until it ends; return its exit code."""
        self._wait(lambda: self.process.poll() is not None, within_s, "did not end")
        self._reader.join(5)
        return self.process.returncode

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line)

    def _wait(self, holds: Callable[[], bool], within_s: float, problem: str) -> None:
        deadline = time.monotonic() + within_s
        while not holds():
            ended = self.process.poll() is not None and not self._reader.is_alive()
            if ended or time.monotonic() > deadline:
                assert holds(), f"{problem}, code {self.process.returncode}:\n{self.said}"
            time.sleep(_POLL_S)


PIPED: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def clean_environ() -> dict[str, str]:
    """The environment without what a launcher might have left in it."""
    ours = ("TRAINER_", "SLURM_", "PET_", "MASTER_", "TORCHELASTIC_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def fit_here(folder: Path, **options: Any) -> tuple[str, list[dict[str, Any]]]:
    """Train the same in this process, alone; return the weights' sum, and what was logged."""
    weights, _ = on_machines.fit(str(folder / "alone"), callbacks=False, **options)
    return weights, logged(folder / "alone")


def logged(run_dir: Path) -> list[dict[str, Any]]:
    """What a run has logged, without the time."""
    import json

    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    differ = ("time_s", "perf/")
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(differ)}
        for line in lines
    ]
