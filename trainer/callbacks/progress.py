"""What a person sees of a run."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from trainer.callbacks.base import Callback
from trainer.run import Run
from trainer.speed.verdict import Verdict

if TYPE_CHECKING:
    from rich.live import Live

SPEED_WINDOW_S = 10.0
_SPLITS = ("train", "val", "test")
_NO_SPLIT = "logged"  # the column of what a LightningModule logs, under names of its own
EVALUATING = {"val": "validating", "test": "testing"}


class ProgressBar(Callback):
    """Prints what starts, how it goes and how it ended.

    On a terminal a bar is redrawn by time; elsewhere (a file, a pipe, a notebook) a plain line
    comes every few seconds. A thread that reads the run does both, so that a step costs nothing.

    Args:
        refresh_s: Seconds between two redraws on a terminal.
        line_every_s: Seconds between two lines elsewhere.
    """

    def __init__(self, refresh_s: float = 0.2, line_every_s: float = 5.0) -> None:
        for name, value in (("refresh_s", refresh_s), ("line_every_s", line_every_s)):
            if not value > 0:
                raise ValueError(f"ProgressBar({name}={value}): it must be more than 0 seconds")
        self.refresh_s = refresh_s
        self.line_every_s = line_every_s
        self._live: Live | None = None
        self._thread: Thread | None = None
        self._ended = Event()

    def on_fit_start(self, run: Run) -> None:
        """Print the size of things, and begin to show progress."""
        print(_header(run), flush=True)
        self._run, self._shown = run, run.step
        self._verdict = Verdict(run)
        self._start_time, self._start_step = time.monotonic(), run.step
        on_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        interval = self.refresh_s if on_terminal else self.line_every_s
        self._points: deque[tuple[float, int]] = deque(
            [(self._start_time, run.samples)], maxlen=max(2, round(SPEED_WINDOW_S / interval))
        )
        if on_terminal:
            self._live = _start_live(self._draw, self.refresh_s)
        else:
            self._ended.clear()
            self._thread = Thread(target=self._print_lines, name="progress", daemon=True)
            self._thread.start()

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        """Take in what limits the run."""
        self._verdict.add(run, metrics)

    def on_validation_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Print the results."""
        self._shown = run.step
        values = "  ".join(f"{name} {_number(value)}" for name, value in metrics.items())
        print(f"{_epoch(run)}  step {run.step}  {values}", flush=True)
        # The speed is that of training: measure it afresh.
        self._points = deque([(time.monotonic(), run.samples)], maxlen=self._points.maxlen)

    def on_fit_end(self, run: Run) -> None:
        """Print how it ended: the final metrics, what limited it, and where the checkpoint is."""
        self.close()
        seconds = time.monotonic() - self._start_time
        print(_summary(run, seconds, self._verdict.line(run)), flush=True)

    def close(self) -> None:
        """Stop showing progress and leave the terminal as it was."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ended.set()
            thread.join()

    def _print_lines(self) -> None:
        while not self._ended.wait(self.line_every_s):
            if self._run.step != self._shown:
                self._shown = self._run.step
                print(self._line(), flush=True)

    def _draw(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar as Bar
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 1))
        grid.add_column(max_width=24)  # where it is narrow, the bar gives way before the text
        grid.add_column(no_wrap=True, overflow="ellipsis")
        total = self._run.total_steps
        bar = Bar(total=total, completed=self._run.step, pulse=total is None)
        grid.add_row(bar, Text(self._line()))
        # The cursor rests on an empty line, so that whatever is printed after a kill starts on one.
        return Group(grid, Text())

    def _line(self) -> str:
        run = self._run
        step, samples, now = run.step, run.samples, time.monotonic()
        points = self._points
        if samples != points[-1][1]:
            points.append((now, samples))
        parts = [_epoch(run), f"step {step}" + (f"/{run.total_steps}" if run.total_steps else "")]
        loss = run.metrics.get("train/loss")
        if loss is not None:
            parts.append(f"loss {_number(loss)}")
        shown = [name for name in run.task._shown if name in run.metrics]
        parts += [f"{name} {_number(run.metrics[name])}" for name in shown]
        (t0, first), (t1, last) = points[0], points[-1]
        if t1 > t0:
            parts.append(f"{(last - first) / (t1 - t0):,.0f} samples/s")
        done = step - self._start_step
        if run.task.run.split in EVALUATING:
            parts.append(EVALUATING[run.task.run.split])
        elif run.total_steps and 0 < done < run.total_steps - self._start_step:
            left = (run.total_steps - step) * (now - self._start_time) / done
            parts.append(f"{_duration(left)} left")
        return "  ".join(parts)


def _start_live(draw: Any, refresh_s: float) -> Live:
    from rich.console import Console
    from rich.live import Live

    class VisibleCursorConsole(Console):
        def show_cursor(self, show: bool = True) -> bool:
            return False  # a process that is killed while it hides the cursor never shows it again

    live = Live(
        console=VisibleCursorConsole(force_jupyter=False),
        get_renderable=draw,
        refresh_per_second=1 / refresh_s,
        transient=True,
    )
    live.start()
    return live


def _header(run: Run) -> str:
    parameters = list(run.task.parameters())
    count = sum(p.numel() for p in parameters)
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    size = sum(t.numel() * t.element_size() for t in (*parameters, *run.task.buffers()))
    name = type(run.task).__name__
    return _aligned(
        {
            "task": f"{name}, {count:,} parameters ({trainable:,} trainable), {_bytes(size)}",
            "world size": f"{run.world_size} on {run.device}, precision {run.config.precision}"
            + (", reproducible" if run.config.reproducible else ""),
            "batch": f"global {run.global_batch_size}, micro {run.micro_batch_size}, "
            f"accumulation steps {run.accumulation_steps}",
            "run_dir": str(run.run_dir),
        }
    )


def _summary(run: Run, seconds: float, limit: str | None) -> str:
    ended = f"{_count(run.step, 'step')}, {_count(run.epoch, 'epoch')}, {_duration(seconds)}"
    if run.stop_reason is not None:
        ended += f"; stopped: {run.stop_reason}"
    lines = {"done": ended}
    if limit is not None:
        lines["limited by"] = limit
    last, best = run.last_checkpoint, run.best_checkpoint
    if last is not None:
        lines["last, best" if best == last else "last"] = str(last)
    if best is not None and best != last:
        lines["best"] = str(best)
    return "\n".join([*_table(run.metrics), _aligned(lines)])


def _table(metrics: Mapping[str, float]) -> list[str]:
    """Lay the metrics out: one row per name, one column per split, and one for those of none."""
    cells: dict[str, dict[str, str]] = {}
    splits = []
    for split in (*_SPLITS, _NO_SPLIT):
        for full_name, value in metrics.items():
            begin, name = _split_and_name(full_name)
            if begin == split and not full_name.startswith("train/lr"):
                cells.setdefault(name, {})[split] = _number(value)
                splits += [split] if split not in splits else []
    if not cells:
        return []
    width = max(map(len, cells))
    rows = [
        ("", splits),
        *((name, [row.get(s, "") for s in splits]) for name, row in cells.items()),
    ]
    lines = (f"{name:<{width}}" + "".join(f"  {c:>10}" for c in row) for name, row in rows)
    return [line.rstrip() for line in lines]


def _split_and_name(full_name: str) -> tuple[str, str]:
    split, _, name = full_name.partition("/")
    return (split, name) if split in (*_SPLITS, "perf") else (_NO_SPLIT, full_name)


def _aligned(rows: Mapping[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows.items())


def _epoch(run: Run) -> str:
    # The epoch of the last step done, so that a validation at its end belongs to it.
    epoch, most = max(1, run.epoch + (run.step_in_epoch > 0)), run.config.max_epochs
    return f"epoch {epoch}" if most is None else f"epoch {epoch}/{most}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _number(value: float) -> str:
    return f"{value:.4g}"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _bytes(size: int) -> str:
    value = float(size)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"
