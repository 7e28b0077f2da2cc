"""A picture of the run at its end."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainer import messages
from trainer.callbacks.base import Callback
from trainer.diagnosis.failures import follows_from_another
from trainer.launching import attempt
from trainer.provenance import code_version, environment
from trainer.reporting import journal
from trainer.run import Run
from trainer.run_dir import set_aside
from trainer.speed.verdict import Verdict
from trainer.watch import Phase, watch

_MOST_WARNINGS = 100
_GROWTH = 1.05  # of a rank's peak memory, to be noted again


class Report(Callback):
    """Writes ``report.html`` into the run's folder when the fit ends, however it ends.

    What the metrics do not tell goes into ``journal.jsonl`` meanwhile: starts, warnings, memory by
    rank, the end. ``python -m trainer.report`` makes the page from the same files at any time.

    A report that fails is warned of, and fails nothing else.

    Raises:
        ValueError: If plotly is missing.
    """

    def __init__(self) -> None:
        from trainer.reporting.page import check_plotly

        check_plotly()
        self._run: Run | None = None
        self._show: Callable[..., Any] | None = None
        self._heard: set[str] = set()
        self._peaks_mb: list[float] = []

    def on_fit_start(self, run: Run) -> None:
        """Note where the run begins, and hear its warnings from now on."""
        self._verdict, self._heard, self._peaks_mb = Verdict(run), set(), []
        with _harmless():
            from trainer.reporting.page import FILE

            now = attempt.current()
            if run.step == 0 and not now.is_restart:
                for name in (journal.FILE, FILE):
                    set_aside(run.run_dir / name)
            facts = {
                "step": run.step,
                "samples": run.samples,
                "time_s": round(run.time_s, 3),
                "total_steps": run.total_steps,
                "restarts": now.number,
                "requeues": now.requeues,
                "task": type(run.task).__name__,
                "parameters": sum(p.numel() for p in run.task.parameters()),
                "environment": environment(run),
                "code": code_version(run.task),
                "config": dict(run.run_config),
            }
            journal.note(run.run_dir, "start", facts)
        self._run = run
        self._show, warnings.showwarning = warnings.showwarning, self._hear
        messages.hearers.append(self._note_warning)
        watch.tells(True)  # where another rank fails, this one gets the time to report

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        """Note how much memory each rank has had, where it has grown."""
        self._verdict.add(run, metrics)
        peaks = list(run.memory_mb)
        if not peaks:
            return
        before = self._peaks_mb or [0.0] * len(peaks)
        if any(new > _GROWTH * old for new, old in zip(peaks, before, strict=True)):
            self._peaks_mb = peaks
            self._note("memory", {"step": run.step, "by_rank_mb": [round(p, 1) for p in peaks]})

    def close(self) -> None:
        """Note the end, and write the report."""
        run = self._run
        if run is None:
            return
        messages.hearers.remove(self._note_warning)
        if warnings.showwarning == self._hear:  # nobody has put another one in its place
            assert self._show is not None
            warnings.showwarning = self._show
        with watch.excused(Phase.FINISHING), _harmless():
            from trainer.reporting.page import write_report

            facts = {
                "step": run.step,
                "status": run.status,
                "reason": run.stop_reason,
                "error": _text(sys.exc_info()[1]),
                "limited_by": self._verdict.line(run),
            }
            self._note("end", facts)
            self._run = None
            begun = time.monotonic()
            path = write_report(run.run_dir)
            print(f"report      {path} ({time.monotonic() - begun:.1f} s)", flush=True)

    def _hear(
        self, message: Warning | str, category: type[Warning], *place: Any, **more: Any
    ) -> None:
        assert self._show is not None
        self._show(message, category, *place, **more)
        self._note_warning(str(message), category.__name__)

    def _note_warning(self, text: str, category: str = "trainer") -> None:
        if self._run is None or text in self._heard or len(self._heard) == _MOST_WARNINGS:
            return
        self._heard.add(text)
        self._note("warning", {"step": self._run.step, "text": text, "category": category})

    def _note(self, event: journal.Event, facts: dict[str, Any]) -> None:
        if self._run is not None:
            with _harmless():
                journal.note(self._run.run_dir, event, facts)


@contextmanager
def _harmless() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        print(
            f"WARNING: the report failed: {type(error).__name__}: {error}; nothing else did",
            file=sys.stderr,
            flush=True,
        )


def _text(error: BaseException | None) -> str | None:
    """Return what to say of the error that ends the run."""
    if error is None:
        return None
    if follows_from_another(error):
        return "a rank other than 0 failed; what the run has printed tells which one, and why"
    return f"{type(error).__name__}: {error}".strip(": ")
