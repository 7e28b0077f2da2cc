"""Sweeps with the sweepers and launchers that people use, and what they leave behind."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from support import is_running

from trainer.hydra.sweeps import JobFailed, check_run_dir, check_sweep
from trainer.launching.launcher import find_launcher

PROJECT = Path(__file__).parents[2] / "docs" / "example_project"
SHORT = [
    "trainer.accelerator=cpu",
    "trainer.limit_train_batches=3",
    "trainer.max_epochs=1",
    "test=false",
    "logger.tensorboard=null",  # a second in each process
    "hydra.sweep.dir=sweep",
]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copytree(PROJECT / "spirals", tmp_path / "spirals")
    return tmp_path


def start(project: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "spirals.train", *arguments],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def sweep(project: Path, *arguments: str) -> tuple[str, str]:
    program = start(project, *SHORT, *arguments)
    try:
        out, err = program.communicate(timeout=100)
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
    assert program.returncode == 0, err
    return out, err


def reached(job: Path) -> float:
    """The best validation accuracy that the job wrote down."""
    events = [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    return max(event["val/accuracy"] for event in events if "val/accuracy" in event)


def test_optuna_gets_the_values_of_jobs_that_joblib_runs_side_by_side(project: Path) -> None:
    side_by_side = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweeper.n_jobs=2"]
    sweep(
        project, "experiment=search", *side_by_side, "hydra.sweeper.n_trials=2", "trainer.devices=2"
    )
    study: Any = OmegaConf.load(project / "sweep" / "optimization_results.yaml")
    jobs = [project / "sweep" / name for name in ("0", "1")]
    assert study.best_value == max(map(reached, jobs))
    best = jobs[[reached(job) for job in jobs].index(study.best_value)]
    config: Any = OmegaConf.load(best / ".hydra" / "config.yaml")
    assert config.task.width == study.best_params["task.width"]
    assert config.task.learning_rate == study.best_params["task.learning_rate"]
    assert config.trainer.devices == 2


def test_submitit_runs_a_job_that_starts_ranks(project: Path) -> None:
    sweep(project, "--multirun", "hydra/launcher=submitit_local", "trainer.devices=2")
    assert 0 < reached(project / "sweep" / "0") < 1
    [log] = (project / "sweep").glob(".submitit/*/*_log.out")
    assert "2 processes on this machine" in log.read_text()


def test_an_interrupt_ends_the_whole_sweep(project: Path) -> None:
    long = ["trainer.max_epochs=100000", "trainer.checkpoint.every_n_epochs=1000", "test=false"]
    program = start(project, *SHORT, *long, "trainer.devices=2", "--multirun", "task.width=4,8")
    try:
        deadline = time.monotonic() + 60
        while not (project / "sweep" / "0" / "checkpoints").exists():
            assert time.monotonic() < deadline
            assert program.poll() is None
            time.sleep(0.1)
        ranks = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does
        _, err = program.communicate(timeout=30)
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
    assert program.returncode == 130
    assert err.splitlines()[-1].startswith("interrupted")
    assert not (project / "sweep" / "1").exists()
    assert not any(is_running(int(pid)) for pid in ranks)


def hydra_of(sweeper: str = "basic", launcher: str = "basic", **options: Any) -> Any:
    return OmegaConf.create(
        {
            "sweep": {"dir": "sweeps/${now:%Y}"},
            "launcher": options,
            "runtime": {"choices": {"hydra/sweeper": sweeper, "hydra/launcher": launcher}},
        }
    )


def test_a_sweep_that_cannot_work_is_refused() -> None:
    check_sweep({}, hydra_of())
    check_sweep({"optimized_metric": "val/loss"}, hydra_of("optuna"))
    check_sweep({"mode": "verify"}, hydra_of("optuna"))
    check_sweep({}, hydra_of(launcher="submitit_slurm", tasks_per_node=8))
    with pytest.raises(ValueError, match=r"name the metric: optimized_metric=val/loss"):
        check_sweep({}, hydra_of("optuna"))
    with pytest.raises(ValueError, match=r"2 runs in one folder.*set trainer.devices=2"):
        check_sweep({}, hydra_of(launcher="submitit_local", tasks_per_node=2))
    unwritable = hydra_of()
    unwritable.sweep.dir = "/dev/null/${now:%Y}"
    with pytest.raises(ValueError, match="cannot be written"):
        check_sweep({}, unwritable)
    with pytest.raises(ValueError, match=r"every job would write there; set hydra.sweep.dir"):
        check_run_dir("runs/mine")


def test_what_slurm_tells_a_job_of_submitit_is_taken_for_what_it_is() -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    step = {"SLURM_STEP_ID": "0", "SUBMITIT_EXECUTOR": "slurm"}
    one = {**job, **step, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}
    assert find_launcher("auto", one)[0] == "self"  # it starts the ranks
    several = {**one, "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}
    assert find_launcher("auto", several)[0] == "slurm"  # it is one of them


def test_a_failure_travels_to_the_sweeper() -> None:
    again = pickle.loads(pickle.dumps(JobFailed("job 1 failed: ValueError: no")))
    assert str(again) == "job 1 failed: ValueError: no"
