"""The processes that the checkpoint benchmark kills."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest

from benchmarks import survival


@pytest.fixture(autouse=True)
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr(survival, "save_all", fail)


@pytest.fixture
def in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", lambda: 0)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(signal, "alarm", lambda _: None)


@pytest.mark.usefixtures("in_the_child")
def test_one_that_fails_before_it_is_killed_says_so_and_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="1"):
        next(survival.kills())
    assert "OSError: no room" in capsys.readouterr().err


@pytest.fixture
def in_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", lambda: 123)
    monkeypatch.setattr(os, "waitpid", lambda pid, _: (pid, 1 << 8))


@pytest.mark.usefixtures("in_the_parent")
def test_it_ends_the_trials() -> None:
    with pytest.raises(RuntimeError, match="failed before it was killed"):
        next(survival.kills())
