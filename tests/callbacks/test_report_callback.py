"""The report of a run on real ranks, and of runs that end badly."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import Regression, fit, on_ranks, samples

from trainer import distributed, messages
from trainer.callbacks import LearningRate, Report, Throughput
from trainer.loggers import JsonlLogger
from trainer.messages import warn
from trainer.reporting.record import read_record
from trainer.run import Run

pytestmark = pytest.mark.timeout(60)

Output = pytest.CaptureFixture[str]


class Troubled(Regression):
    """Warns in every forward, and raises at a step on one rank."""

    def __init__(self, step: int = -1, rank: int = 0) -> None:
        super().__init__()
        self.fails_at, self.fails_on = step, rank

    def forward(self, batch: Any) -> Any:
        warnings.warn("the sea is rough", stacklevel=1)
        if self.run.step == self.fails_at and self.run.rank == self.fails_on:
            raise RuntimeError("no more disk")
        return super().forward(batch)


def run(folder: Path, task: Regression, **options: Any) -> Path:
    first = distributed.rank() == 0
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        fit(
            task,
            folder,
            train=samples(16),
            val=samples(4),
            global_batch_size=4,
            log_every_n_steps=2,
            callbacks=[LearningRate(), Throughput(), Report()] if first else False,
            logger=[JsonlLogger()] if first else False,
            **options,
        )
    return folder


def a_resumed_run(folder: Path) -> None:
    run(folder, Regression(), max_steps=4)
    run(folder, Regression(), max_steps=8, resume="auto")


def test_one_page_for_a_whole_run(tmp_path: Path, capfd: Output) -> None:
    on_ranks(2, a_resumed_run, tmp_path)
    assert f"report      {tmp_path}/report.html" in capfd.readouterr().out
    first, second = read_record(tmp_path).starts
    assert (first.facts["step"], second.facts["step"]) == (0, 4)
    assert first.facts["environment"]["world_size"] == 2
    assert first.end is not None
    assert second.end is not None
    assert (first.end["step"], second.end["step"]) == (4, 8)
    assert second.end["status"] == "finished"
    assert len(second.memory_mb) == 2
    assert min(second.memory_mb) > 50
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for expected in ("train/loss", "val/loss", "peak memory of each rank", "resumed at step 4"):
        assert expected in page
    assert not list(tmp_path.glob("*.part"))


def test_a_new_run_begins_a_new_journal(tmp_path: Path, capfd: Output) -> None:
    for _ in range(2):
        run(tmp_path, Regression(), max_steps=2)
    assert len(read_record(tmp_path).starts) == 1
    assert {path.name for path in (tmp_path / "aside").iterdir()} >= {
        "journal.jsonl",
        "report.html",
    }


def test_a_run_that_dies_is_reported_with_its_warnings(tmp_path: Path) -> None:
    show = warnings.showwarning
    with pytest.raises(RuntimeError, match="no more disk"):
        run(tmp_path, Troubled(step=3), max_steps=8)
    assert warnings.showwarning is show
    (start,) = read_record(tmp_path).starts
    assert start.end is not None
    assert (start.end["status"], start.end["error"]) == ("failed", "RuntimeError: no more disk")
    assert start.warnings == {"the sea is rough": "UserWarning, step 0"}
    assert "no more disk" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_another_rank_dies_and_the_run_starts_again(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no more disk"):
        run(tmp_path, Troubled(3, rank=1), max_steps=8, devices=2, max_restarts=1)
    first, second = read_record(tmp_path).starts
    assert (first.facts["restarts"], second.facts["restarts"]) == (0, 1)
    for start in (first, second):
        assert start.end is not None
        assert start.end["error"].startswith("a rank other than 0 failed")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "started again (1)" in page


def test_what_the_trainer_warns_of_is_noted_once(make_run: Callable[..., Run]) -> None:
    view, report = make_run(), Report()
    report.on_fit_start(view)
    for _ in range(2):
        warn("MLflow failed")
    report.close()
    assert not messages.hearers
    warn("nobody hears this")
    (start,) = read_record(view.run_dir).starts
    assert start.warnings == {"MLflow failed": "trainer, step 0"}


def test_a_signal_is_how_it_ended(tmp_path: Path) -> None:
    class Stopped(Regression):
        def before_optimizer_step(self) -> None:
            if self.run.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit, match="143"):
        run(tmp_path, Stopped(), max_steps=100)
    (start,) = read_record(tmp_path).starts
    assert start.end is not None
    assert start.end["status"] == "stopped by SIGTERM"
    assert "stopped by SIGTERM" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_report_that_fails_fails_nothing_else(
    tmp_path: Path, capfd: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("trainer.reporting.page.write_report", broken)
    monkeypatch.setattr("trainer.reporting.journal.note", broken)
    run(tmp_path, Regression(), max_steps=2)
    told = capfd.readouterr().err
    assert "WARNING: the report failed: OSError: no space left; nothing else did" in told


def test_without_plotly_it_says_so_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install plotly"):
        Report()


def test_memory_is_noted_where_it_has_grown(make_run: Callable[..., Run]) -> None:
    view, report = make_run(), Report()
    report.on_fit_start(view)
    for peaks in ((100, 100), (101, 102), (101, 120)):
        view.memory_mb = peaks
        report.on_log(view, {})
    report.close()
    lines = (view.run_dir / "journal.jsonl").read_text().splitlines()
    noted = [json.loads(line) for line in lines]
    assert [n["by_rank_mb"] for n in noted if n["event"] == "memory"] == [[100, 100], [101, 120]]
