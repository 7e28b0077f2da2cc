"""What every run says of itself in run.json."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support import Regression, fit, samples

from trainer import Callback
from trainer.reporting.run_file import FILE, read_run_file

OPTIONS: dict[str, Any] = {"train": samples(8), "global_batch_size": 2, "max_epochs": 1}


class Watching(Callback):
    """Notes what the file says at the first log event, and may end the run there."""

    def __init__(self, error: BaseException | None = None, number: int | None = None) -> None:
        self.error, self.number = error, number

    def on_log(self, run: Any, metrics: dict[str, float]) -> None:
        self.seen = read_run_file(run.run_dir)
        if self.number is not None:
            os.kill(os.getpid(), self.number)
        if self.error is not None:
            raise self.error


def test_it_says_that_a_run_is_at_work_and_then_how_it_ended(tmp_path: Path) -> None:
    callback = Watching()
    fit(Regression(), tmp_path, callbacks=[callback], val=samples(3), **OPTIONS)
    assert (callback.seen["status"], callback.seen["step"]) == ("running", 0)
    assert (callback.seen["ended"], callback.seen["config"]["trainer"]["max_epochs"]) == (None, 1)
    found = read_run_file(tmp_path)
    assert [found[key] for key in ("status", "error", "step", "total_steps", "epoch")] == [
        *("finished", None, 4, 4, 1)
    ]
    assert [found[key] for key in ("task", "world_size", "samples")] == ["Regression", 1, 8]
    assert found["metrics"].keys() >= {"train/loss", "val/loss"}
    assert found["started"] == callback.seen["started"] <= found["ended"]
    assert not (tmp_path / f"{FILE}.new").exists()


def test_it_names_the_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        fit(Regression(), tmp_path, callbacks=[Watching(KeyError("x"))], **OPTIONS)
    found = read_run_file(tmp_path)
    assert (found["status"], found["error"]) == ("failed", "KeyError: 'x'")


def test_it_names_the_signal(tmp_path: Path) -> None:
    options = OPTIONS | {"log_every_n_steps": 2}
    with pytest.raises(SystemExit):
        fit(Regression(), tmp_path, callbacks=[Watching(number=signal.SIGTERM)], **options)
    found = read_run_file(tmp_path)
    assert (found["status"], found["error"]) == ("stopped by SIGTERM", None)
    assert found["step"] < 4


def test_a_disk_that_is_full_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"{FILE}.new").mkdir()
    assert fit(Regression(), tmp_path, **OPTIONS).step == 4
    warning = f"WARNING: {tmp_path / FILE} cannot be written: Is a directory"
    assert capsys.readouterr().err.count(warning) == 2


@pytest.mark.parametrize(
    ("text", "match"), [("{", "is damaged"), ("[]", "not of a run"), ('{"a": 1}', "not of a run")]
)
def test_the_file_of_somebody_else_is_refused(text: str, match: str, tmp_path: Path) -> None:
    assert read_run_file(tmp_path) == {}
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ValueError, match=match):
        read_run_file(tmp_path)


def test_what_json_has_no_word_for_is_null(tmp_path: Path) -> None:
    class Infinite(Callback):
        def on_log(self, run: Any, metrics: dict[str, float]) -> None:
            metrics["x"] = float("inf")

    fit(Regression(), tmp_path, callbacks=[Infinite()], **OPTIONS)
    text = (tmp_path / FILE).read_text()
    assert "Infinity" not in text
    assert json.loads(text)["metrics"]["x"] is None
