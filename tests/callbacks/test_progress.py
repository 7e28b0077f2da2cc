import os
import pty
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.callbacks import ProgressBar
from trainer.config import TrainerConfig
from trainer.run import Run
from trainer.task import RunFacts

Output = pytest.CaptureFixture[str]


def test_what_it_says_at_the_start(make_run: Callable[..., Run], capsys: Output) -> None:
    run, bar = make_run(), ProgressBar()
    bar.on_fit_start(run)
    bar.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split(maxsplit=1) == [
        "task",
        "Tiny, 1,200 parameters (1,100 trainable), 4.8 kB",
    ]
    assert lines[1] == "world size  2 on cpu, precision fp32"
    assert lines[2] == "batch       global 128, micro 32, accumulation steps 2"
    assert lines[3] == f"run_dir     {run.run_dir}"
    assert len(lines) == 4


class Intervals:
    """In place of the event that the printing thread waits for: the test lets the time pass."""

    def __init__(self) -> None:
        self._over: queue.Queue[bool] = queue.Queue()
        self._begun: queue.Queue[float] = queue.Queue()

    def wait(self, timeout: float) -> bool:
        self._begun.put(timeout)
        return self._over.get()

    def pass_one(self) -> float:
        """Return how long the interval is, after all that it brings has been printed."""
        self._over.put(False)
        return self._begun.get(timeout=30)

    def clear(self) -> None: ...

    def set(self) -> None:
        self._over.put(True)


def advance(run: Run, step: int, per_epoch: int = 50) -> None:
    run._state.step, run._state.samples = step, 100 * step
    run._state.epoch, run._state.step_in_epoch = divmod(step, per_epoch)


def test_lines_by_time_not_by_step(make_run: Callable[..., Run], capsys: Output) -> None:
    run, bar = make_run(metrics={"train/loss": 0.25}), ProgressBar(line_every_s=0.2)
    intervals = Intervals()
    bar._ended = intervals  # type: ignore[assignment]
    bar.on_fit_start(run)
    intervals._begun.get(timeout=30)
    capsys.readouterr()
    for step in range(1, 50):
        advance(run, step)
    assert capsys.readouterr().out == ""
    assert intervals.pass_one() == 0.2
    assert capsys.readouterr().out.startswith("epoch 1/2  step 49/100  loss 0.25")
    intervals.pass_one()
    assert capsys.readouterr().out == ""  # no step, no line
    advance(run, 50)
    intervals.pass_one()
    bar.close()
    (line,) = capsys.readouterr().out.splitlines()
    parts = line.split("  ")
    assert parts[:3] == ["epoch 1/2", "step 50/100", "loss 0.25"]
    assert parts[3].endswith(" samples/s")
    assert parts[4].endswith(" left")
    assert not [t for t in threading.enumerate() if t.name == "progress"]


def test_speed_and_time_left(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    run, bar = make_run(), ProgressBar()
    advance(run, 40)  # a resumed run
    bar.on_fit_start(run)
    bar.close()
    assert bar._line() == "epoch 1/2  step 40/100"
    now = 1002.0
    advance(run, 60)
    assert bar._line() == "epoch 2/2  step 60/100  1,000 samples/s  0:00:04 left"
    now = 1010.0
    bar.on_validation_end(run, {"val/loss": 0.123456, "val/accuracy": 0.99})
    now = 1011.0
    advance(run, 80)
    assert bar._line() == "epoch 2/2  step 80/100  2,000 samples/s  0:00:06 left"
    advance(run, 80, per_epoch=30)  # as after a change of the global batch
    assert bar._line().startswith("epoch 3/2"), "whatever the steps of an epoch are now"
    run.config = TrainerConfig(max_steps=9)
    run.total_steps = run.steps_per_epoch = None  # only the data's end tells
    assert bar._line() == "epoch 3  step 80  2,000 samples/s"
    assert "step 60  val/loss 0.1235  val/accuracy 0.99\n" in capsys.readouterr().out
    run.task.run = RunFacts(split="val")
    assert bar._line().endswith("  validating")


def test_no_time_is_left_after_the_last_step(make_run: Callable[..., Run]) -> None:
    run, bar = make_run(), ProgressBar()
    bar.on_fit_start(run)
    bar.close()
    advance(run, 100)
    assert "left" not in bar._line()
    run.task.run = RunFacts(split="test")
    line = bar._line()
    assert line.startswith("epoch 2/2  step 100/100  ")
    assert line.endswith("  testing")


def test_a_step_is_not_shown_again_after_its_validation(
    make_run: Callable[..., Run], capsys: Output
) -> None:
    run, bar = make_run(), ProgressBar(line_every_s=0.02)
    bar.on_fit_start(run)
    advance(run, 100)
    bar.on_validation_end(run, {"val/loss": 0.5})
    time.sleep(0.2)
    bar.close()
    assert capsys.readouterr().out.splitlines()[-1] == "epoch 2/2  step 100  val/loss 0.5"


@pytest.mark.parametrize("width", [75, 90, 120])
def test_the_bar_gives_way_before_the_text(
    make_run: Callable[..., Run], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    run, bar = make_run(), ProgressBar()
    bar.on_fit_start(run)
    bar.close()
    text = "epoch 1/10  step 1234/12345  loss 0.1234  12,345 samples/s  1:02:03 left"
    monkeypatch.setattr(bar, "_line", lambda: text)
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(bar._draw())
    drawn, empty = capture.get().splitlines()
    assert drawn.rstrip().endswith(f" {text}")
    assert empty == ""
    assert len(drawn) - len(text) - 1 == min(24, width - len(text) - 1)


def test_what_it_says_at_the_end(make_run: Callable[..., Run], capsys: Output) -> None:
    run, bar = make_run(), ProgressBar()
    bar.on_fit_start(run)
    capsys.readouterr()
    run._state.step, run._state.epoch = 80, 2
    run.metrics = {
        "train/loss": 0.5,
        "train/lr": 0.1,
        "perf/samples_per_s": 1.0,
        "val/loss": 0.25,
        "val/accuracy": 0.9,
        "test/accuracy": 0.875,
        "train_acc": 0.75,
    }
    run.last_checkpoint, run.best_checkpoint = Path("c/step-00000080"), Path("c/step-00000040")
    run.request_stop("val/loss has not improved")
    bar.on_fit_end(run)
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["train", "val", "test", "logged"]
    assert lines[1] == ["loss", "0.5", "0.25"]
    assert lines[2] == ["accuracy", "0.9", "0.875"]
    assert lines[3] == ["train_acc", "0.75"]
    assert out.splitlines()[3].endswith(" 0.75")
    assert len(out.splitlines()[3]) == len(out.splitlines()[0])
    assert out.splitlines()[2].index("0.9") > out.splitlines()[1].index("0.5")
    assert "80 steps, 2 epochs" in out
    assert "stopped: val/loss has not improved" in out
    assert lines[-2] == ["last", "c/step-00000080"]
    assert lines[-1] == ["best", "c/step-00000040"]
    run.best_checkpoint = run.last_checkpoint
    bar.on_fit_end(run)
    assert capsys.readouterr().out.splitlines()[-1] == "last, best  c/step-00000080"


def test_it_says_what_limits_the_run(make_run: Callable[..., Run], capsys: Output) -> None:
    run, bar = make_run(), ProgressBar()
    bar.on_fit_start(run)
    parts = {"data": 1.0, "forward": 3.0, "backward": 5.0, "optimizer": 1.0}
    for step in (50, 100):
        advance(run, step)
        metrics = {f"perf/{name}_ms": ms for name, ms in {"step": 10.0, **parts}.items()}
        bar.on_log(run, {"train/loss": 0.5, **metrics})
    bar.on_fit_end(run)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("limited by  compute: 90 % of the step")


def test_a_validation_belongs_to_the_epoch_that_it_ends(
    make_run: Callable[..., Run], capsys: Output
) -> None:
    run, bar = make_run(), ProgressBar()
    bar.on_fit_start(run)
    for step in (25, 50, 51, 100):
        advance(run, step)
        bar.on_validation_end(run, {"val/loss": 1.0})
    bar.close()
    shown = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[4:]]
    assert shown == ["epoch 1/2", "epoch 1/2", "epoch 2/2", "epoch 2/2"]


def test_an_end_with_nothing_to_show(make_run: Callable[..., Run], capsys: Output) -> None:
    run, bar = make_run(), ProgressBar()
    bar.on_fit_start(run)
    capsys.readouterr()
    bar.on_fit_end(run)
    bar.close()  # the loop always closes
    assert capsys.readouterr().out == "done  0 steps, 0 epochs, 0:00:00\n"
    run._state.step = run._state.epoch = 1
    bar.on_fit_end(run)
    assert capsys.readouterr().out == "done  1 step, 1 epoch, 0:00:00\n"
    ProgressBar().close()


@pytest.mark.parametrize("wrong", [{"refresh_s": 0}, {"line_every_s": -1.0}])
def test_wrong_options(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.*more than 0"):
        ProgressBar(**wrong)


# --- on a terminal ------------------------------------------------------------------------------

FIT = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
from conftest import Tiny
from trainer.callbacks import ProgressBar
from trainer.run import Run
from trainer.config import TrainerConfig

run = Run(Tiny(), TrainerConfig(max_epochs=1), ".", 1, 8, 8, 1, 100, 100, "cpu")
bar = ProgressBar(refresh_s=0.05)
bar.on_fit_start(run)
begun = time.monotonic()
try:
    for step in range(1, 51):
        run._state.step, run._state.samples = step, 8 * step
        time.sleep(0.01)
    while bar._points[-1][1] != run.samples:  # until the last step has been drawn
        time.sleep(0.01)
    print(f"TOOK {time.monotonic() - begun}")
    print("a line of the user")
    bar.on_validation_end(run, {"val/loss": 0.5})
    print("READY")
    if sys.argv[2] != "end":
        time.sleep(30)
    bar.on_fit_end(run)
finally:
    bar.close()
deadline = time.monotonic() + 10  # the thread that redraws may be on its way out
while threading.active_count() > 1 and time.monotonic() < deadline:
    time.sleep(0.01)
print("AFTER", threading.active_count())
"""


def in_terminal(end: str) -> tuple[str, int]:
    """Run FIT in a pseudo-terminal; return all that it wrote and its exit code."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", FIT, str(Path(__file__).parent.parent), end],
        stdout=slave,
        stderr=slave,
        stdin=slave,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
    )
    os.close(slave)
    written, deadline, sent = b"", time.monotonic() + 60, False
    while time.monotonic() < deadline:
        if not select.select([master], [], [], 1)[0]:
            continue
        try:
            chunk = os.read(master, 4096)
        except OSError:  # the other side is closed
            break
        if not chunk:
            break
        written += chunk
        if b"READY" in written and end != "end" and not sent:
            time.sleep(0.3)
            process.send_signal(getattr(signal, end))
            sent = True
    os.close(master)
    return written.decode(), process.wait(timeout=30)


@pytest.mark.parametrize("end", ["end", "SIGINT", "SIGTERM", "SIGKILL"])
def test_terminal(end: str) -> None:
    written, code = in_terminal(end)
    assert "\x1b[?25l" not in written  # the cursor is never hidden
    assert "step 50/100" in written
    assert "a line of the user\r\n" in written
    assert "step 50  val/loss 0.5" in written
    training, _, rest = written.partition("TOOK ")
    # By time: one of these for each step would be 50, whatever the time.
    assert 0 < training.count("samples/s") <= float(rest.split()[0]) / 0.05 + 5
    if end == "end":
        assert code == 0
        assert "AFTER 1\r\n" in written
        assert "done" in written
    elif end == "SIGINT":
        assert code != 0
        assert "KeyboardInterrupt" in written.split("READY")[1]
    else:
        assert code == -getattr(signal, end)
        # Whoever prints next starts on a line of their own.
        assert written.endswith("\n")
