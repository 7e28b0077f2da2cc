"""Where a run writes."""

import time
from pathlib import Path

import pytest
from support import on_ranks

from trainer.config import TrainerConfig
from trainer.run_dir import check_writable, choose_run_dir, set_aside


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_folder_that_is_given_is_made(elsewhere):
    assert choose_run_dir(TrainerConfig(run_dir="a/b")) == elsewhere / "a/b"
    assert choose_run_dir(TrainerConfig(run_dir="a/b", resume="auto")) == elsewhere / "a/b"
    assert list((elsewhere / "a/b").iterdir()) == []


def test_every_run_gets_a_new_folder(elsewhere, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda _: "now")  # all within one second
    found = [choose_run_dir(TrainerConfig()) for _ in range(3)]
    assert found == [elsewhere / "runs" / name for name in ("now", "now_1", "now_2")]
    assert all(folder.is_dir() for folder in found)


def test_a_requeued_job_finds_its_folder_again(elsewhere, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_JOB_NAME", "mnist")
    for resume in (None, "auto"):
        assert choose_run_dir(TrainerConfig(resume=resume)) == elsewhere / "runs/mnist-42"
    assert choose_run_dir(TrainerConfig(run_dir="own")) == elsewhere / "own"


def test_resuming_in_a_new_folder_is_refused(elsewhere):
    with pytest.raises(
        ValueError, match="resume=auto looks for checkpoints in run_dir, and every "
    ):
        choose_run_dir(TrainerConfig(resume="auto"))
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/nothing"])
def test_a_folder_that_cannot_be_written_is_refused(elsewhere, folder):
    Path("file").touch()
    with pytest.raises(
        ValueError, match=r"run_dir .* cannot be written: .*; set run_dir=<a folder"
    ):
        choose_run_dir(TrainerConfig(run_dir=folder))


def test_a_folder_is_checked_without_being_made(elsewhere):
    check_writable(Path("new/below"))
    assert list(elsewhere.iterdir()) == []
    Path("file").touch()
    for folder in ("file", "file/below"):
        with pytest.raises(ValueError, match=rf"run_dir {folder} cannot be written: .*file is not"):
            check_writable(Path(folder))


def test_what_an_earlier_run_left_is_set_aside_each_time(elsewhere, capsys):
    set_aside(elsewhere / "metrics.jsonl")  # there is none
    assert list(elsewhere.iterdir()) == []
    for text in ("first", "second", "third"):
        (elsewhere / "metrics.jsonl").write_text(text)
        set_aside(elsewhere / "metrics.jsonl")
    found = {path.name: path.read_text() for path in (elsewhere / "aside").iterdir()}
    assert found == {
        "metrics.jsonl": "first",
        "metrics-1.jsonl": "second",
        "metrics-2.jsonl": "third",
    }
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"moved metrics.jsonl of an earlier run to {elsewhere}/aside/metrics.jsonl"
    assert len(lines) == 3


def test_a_new_folder_needs_a_parent_that_can_be_written(elsewhere):
    Path("runs").touch()
    with pytest.raises(ValueError, match=r"run_dir .*runs cannot be written"):
        choose_run_dir(TrainerConfig())


@pytest.mark.timeout(60)
def test_all_ranks_get_one_folder(elsewhere):
    first, second = on_ranks(2, lambda: [choose_run_dir(TrainerConfig()) for _ in range(2)])
    assert first == second
    assert sorted((elsewhere / "runs").iterdir()) == sorted(first)
