"""The commit of the code that trains, where there is one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainer import TaskModule
from trainer.provenance import code_version, environment
from trainer.run import Run


class Here(TaskModule):
    pass


def git(folder: Path, *command: str) -> str:
    who = ("-c", "user.name=A", "-c", "user.email=a@b.c")
    done = subprocess.run(
        ["git", "-C", str(folder), *who, *command],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    return done.stdout.strip()


def test_a_task_that_was_typed_in_belongs_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    task = type("Typed", (TaskModule,), {"__module__": "__main__"})()
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    assert code_version(task) == {}
    git(tmp_path, "init")
    assert code_version(task) == {}  # there is no commit yet
    (tmp_path / "train.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert code_version(task) == {"commit": commit, "dirty": False}
    (tmp_path / "train.py").write_text("2")
    assert code_version(task) == {"commit": commit, "dirty": True}


def test_the_code_is_that_of_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = code_version(Here())
    assert found.get("commit") == git(Path(__file__).parent, "rev-parse", "HEAD")


def test_the_code_is_that_of_the_module_for_which_a_task_speaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    task = type("Theirs", (TaskModule,), {"_speaks_for_another": True, "__module__": "gone"})()
    task.module = Here()
    assert code_version(task).get("commit") == git(Path(__file__).parent, "rev-parse", "HEAD")


def test_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code_version(Here()) == {}


def test_environment(make_run: Callable[..., Run]) -> None:
    found = environment(make_run(hosts=["one", "two"]))
    assert found["hosts"] == "one, two"
    assert found["world_size"] == 2
    assert found["torch"] == torch.__version__
    assert type(found["torch"]) is str  # torch's own class is not plain
