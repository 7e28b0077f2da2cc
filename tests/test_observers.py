"""A logger that cannot write stops the run or is told of once."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
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
