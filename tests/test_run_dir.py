"""Where a run writes."""

import os
import resource
import time
from pathlib import Path

import pytest
from support import Regression, assert_equal_bits, on_ranks, samples, weights

from trainer import Trainer
from trainer.config import TrainerConfig
from trainer.run_dir import check_writable, choose_run_dir, set_aside


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
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
    monkeypatch.setenv("SLURM_PROCID", "0")
    for resume in (None, "auto"):
        assert choose_run_dir(TrainerConfig(resume=resume)) == elsewhere / "runs/mnist-42"
    assert choose_run_dir(TrainerConfig(run_dir="own")) == elsewhere / "own"


@pytest.mark.parametrize(
    "shell",
    [
        {"SLURM_JOB_NAME": "interactive"},  # of salloc
        {"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"},  # of salloc, on a node
        {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_PTY_PORT": "40000"},  # srun --pty bash
    ],
)
def test_every_run_in_a_shell_of_slurm_gets_a_new_folder(elsewhere, monkeypatch, shell):
    for name, value in {"SLURM_JOB_ID": "42", **shell}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(time, "strftime", lambda _: "now")
    found = [choose_run_dir(TrainerConfig()).name for _ in range(2)]
    assert found == ["now", "now_1"]
    with pytest.raises(ValueError, match="resume=auto looks for checkpoints in run_dir"):
        choose_run_dir(TrainerConfig(resume="auto"))


def test_a_task_of_an_array_has_its_own_folder(elsewhere, monkeypatch):
    # The job id of a task is SLURM's own affair; the place in the array is what stays.
    monkeypatch.setenv("SLURM_JOB_NAME", "a/b")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "42")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    for job in ("45", "99"):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        assert choose_run_dir(TrainerConfig()) == elsewhere / "runs/a_b-42_3"


def test_a_requeued_job_goes_on_by_itself(elsewhere, monkeypatch, capsys):
    def train(max_steps, **options):
        task = Regression()
        trainer = Trainer(
            max_steps=max_steps, accelerator="cpu", callbacks=False, logger=False, **options
        )
        trainer.fit(task, train=samples(128 * 4))
        return weights(task)

    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_JOB_NAME", "mnist")
    monkeypatch.setenv("SLURM_PROCID", "0")
    train(9)  # what an earlier run left in a folder that is named
    (elsewhere / "runs/mnist-42").rename("named")
    train(2)
    assert "from" not in capsys.readouterr().out
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    resumed = train(4)
    assert "restarting from" in (out := capsys.readouterr().out)
    assert "mnist-42/checkpoints/step-00000002" in out
    monkeypatch.setenv("SLURM_JOB_ID", "43")
    train(1, run_dir="named")  # was requeued before it had saved anything
    assert "from" not in capsys.readouterr().out
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    assert_equal_bits(resumed, train(4))


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


def test_a_disk_without_room_is_refused(elsewhere):
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, old[1]))  # an empty file can be made, as there
    try:
        with pytest.raises(ValueError, match=r"run_dir .* cannot be written: File too large"):
            choose_run_dir(TrainerConfig(run_dir="run"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_folder_is_checked_without_being_made(elsewhere):
    for run_dir in ("new/below", "file:///tmp/run"):
        check_writable(run_dir)
    assert list(elsewhere.iterdir()) == []
    Path("file").touch()
    for folder in ("file", "file/below"):
        with pytest.raises(ValueError, match=rf"run_dir {folder} cannot be written: .*file is not"):
            check_writable(folder)
    for folder in ("/proc/nothing", "n" * 300, "strange://bucket/run"):
        with pytest.raises(ValueError, match=f"{folder}"):
            check_writable(folder)


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
