"""A logger that cannot write stops the run or is told of once."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support import Regression, fit, samples

from trainer.loggers import Logger


class Full(Logger):
    """Writes to a disk that is full from the second event on, also when it closes."""

    def __init__(self) -> None:
        self.tried: list[int] = []

    def log(self, run: Any, metrics: Mapping[str, float]) -> None:
        self.tried.append(run.step)
        self.close()

    def close(self) -> None:
        if len(self.tried) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "events")


OPTIONS: dict[str, Any] = {
    "train": samples(8),
    "global_batch_size": 2,
    "max_epochs": 1,
    "log_every_n_steps": 1,
}


def test_it_stops_the_run_and_is_named(tmp_path: Path) -> None:
    logger = Full()
    match = r"^Full failed: No space left on device \(events\); checkpoint.on_error=warn trains on$"
    with pytest.raises(OSError, match=match):
        fit(Regression(), tmp_path, logger=[logger], **OPTIONS)
    assert logger.tried == [1, 2]


def test_with_warn_the_training_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = Full()
    result = fit(
        Regression(), tmp_path, logger=[logger], checkpoint={"on_error": "warn"}, **OPTIONS
    )
    assert result.step == 4
    assert result.last_checkpoint is not None
    assert logger.tried == [1, 2, 3, 4]  # it may be able to again
    warning = "WARNING: Full failed: No space left on device (events); training goes on\n"
    assert capsys.readouterr().err == warning


class Status(Logger):
    """Notes how the run has ended, before anything is closed."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def open(self, run: Any) -> None:
        self.seen.append(run.status)

    def end(self, run: Any) -> None:
        self.seen.append(run.status)

    def close(self) -> None:
        self.seen.append("closed")


class CannotOpen(Logger):
    def open(self, run: Any) -> None:
        raise ZeroDivisionError


def test_one_that_cannot_open_has_the_others_closed(tmp_path: Path) -> None:
    logger, unopened = Status(), Status()
    with pytest.raises(ZeroDivisionError):
        fit(Regression(), tmp_path, logger=[logger, CannotOpen(), unopened], **OPTIONS)
    assert logger.seen == ["running", "failed", "closed"]
    assert unopened.seen == []


class Ends(Regression):
    """Ends the run in its second step."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def before_optimizer_step(self) -> None:
        if self.run.step == 1 and self.how == "error":
            raise ZeroDivisionError
        if self.run.step == 1 and self.how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("how", "error", "status"),
    [
        ("well", None, "finished"),
        ("error", ZeroDivisionError, "failed"),
        ("signal", SystemExit, "stopped by SIGTERM"),
    ],
)
def test_loggers_learn_how_the_run_has_ended(
    tmp_path: Path, how: str, error: type[BaseException] | None, status: str
) -> None:
    logger = Status()
    with pytest.raises(error) if error else nullcontext():
        fit(Ends(how), tmp_path, logger=[logger], **OPTIONS)
    assert logger.seen == ["running", status, "closed"]
