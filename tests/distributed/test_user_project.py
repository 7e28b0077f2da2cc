"""A user's own project, outside this repository, with the trainer installed from a wheel."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.timeout(600)  # many programs are run in one fixture

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = ("checkpoints", "metrics.jsonl", "run.json", "tensorboard")

CONFIG = """\
defaults:
  - trainer: default

task: {_target_: own.Line, slope: 2.0}
data: {_target_: own.Points}

trainer:
  accelerator: cpu
  devices: 2
  global_batch_size: 4
  max_epochs: 2
  log_every_n_steps: 1

callbacks:
  own: {_target_: own.Greeting, word: hello}

test: true
optimized_metric: val/loss
"""

OWN = """\
import time
import torch
from trainer import Callback, DataModule, TaskModule

class Line(TaskModule):
    def __init__(self, slope, fail=False, sleep=False):
        super().__init__()
        self.slope, self.fail, self.sleep = slope, fail, sleep
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, batch):
        if self.fail and self.run.rank == 1 and self.run.step == 3:
            raise RuntimeError("broken")
        if self.sleep and self.run.rank == 0 and self.run.step == 1:
            print("READY", flush=True)
            time.sleep(600)
        return batch * self.weight

    def loss(self, outputs, batch):
        return (outputs - self.slope * batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

class Points(DataModule):
    def train_dataset(self):
        return torch.linspace(-1, 1, 10)
    val_dataset = test_dataset = train_dataset

class Greeting(Callback):
    def __init__(self, word):
        self.word = word

    def on_fit_start(self, run):
        print(self.word, type(run.task).__name__, run.world_size, flush=True)
"""

TRAIN = """\
import trainer
from trainer import hydra_main, run

@hydra_main(config_path="conf", config_name="line")
def main(cfg):
    value = run(cfg)
    if value is not None:
        print("trainer", trainer.__file__)
        print("value", value)
    return value

main()
"""


class Project(NamedTuple):
    script: Path
    installed: Path
    env: dict[str, str]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The project, with the wheel of this checkout installed into a folder of its own."""
    root = tmp_path_factory.mktemp("user")
    source, installed = root / "source", root / "installed"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "trainer", source / "trainer", ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    build = [*pip, "install", "--no-deps", "--no-build-isolation", "--target", installed, source]
    subprocess.run(build, check=True, timeout=200)  # makes a wheel of it first

    folder = root / "project"
    (folder / "conf").mkdir(parents=True)
    (folder / "conf" / "line.yaml").write_text(CONFIG)
    (folder / "own.py").write_text(OWN)
    (folder / "train.py").write_text(TRAIN)
    return Project(folder / "train.py", installed, {**os.environ, "PYTHONPATH": str(installed)})


def run(project: Project, cwd: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=project.env, capture_output=True, text=True, timeout=200
    )


def events(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


Ended = tuple[Path, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def ended(project: Project, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Each of these commands, and the folder in which it ran; two at a time."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = str(project.script)
    commands = {
        "fit": [script],
        "sweep": [script, "--multirun", "trainer.devices=1,2", "hydra.sweep.dir=sweep"],
        "torchrun": [*torchrun, script],
        "failing": [script, "+task.fail=true"],
    }

    def end(name: str, folder: Path) -> Ended:
        return folder, run(project, folder, sys.executable, *commands[name])

    folders = map(tmp_path_factory.mktemp, commands)  # not safe in threads
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(commands, pool.map(end, commands, folders), strict=True))


def test_it_trains_from_another_folder(project: Project, ended: dict[str, Ended]) -> None:
    tmp_path, done = ended["fit"]
    assert (done.returncode, done.stderr) == (0, "")
    assert f"trainer {project.installed}" in done.stdout
    assert "hello Line 2" in done.stdout
    (folder,) = tmp_path.glob("outputs/*/*")
    assert {".hydra", ".lock", *WRITTEN} == set(os.listdir(folder))
    logged = events(folder)
    assert [e["step"] for e in logged if "train/loss" in e] == [1, 2, 3, 4, 5, 6]
    assert any("test/loss" in e for e in logged)
    value = float(re.search(r"value (\S+)", done.stdout)[1])
    assert value == pytest.approx([e["val/loss"] for e in logged if "val/loss" in e][-1], abs=1e-6)

    again = ["mode=test", "ckpt_path=best", "optimized_metric=test/loss"]
    again = [sys.executable, str(project.script), *again, f"trainer.run_dir={folder}"]
    tested = run(project, tmp_path, *again)
    assert (tested.returncode, tested.stderr) == (0, "")
    shown = float(re.search(r"value (\S+)", tested.stdout)[1])
    assert shown == pytest.approx(
        [e for e in logged if "test/loss" in e][-1]["test/loss"], rel=1e-4
    )
    assert (folder / ".hydra" / "config.yaml").read_text().count("mode: fit") == 1


def test_a_sweep_over_the_world_size_runs_each_job_once(ended: dict[str, Ended]) -> None:
    tmp_path, done = ended["sweep"]
    assert (done.returncode, done.stderr) == (0, "")
    assert re.findall(r"hello Line (\d)", done.stdout) == ["1", "2"]
    one, two = re.findall(r"value (\S+)", done.stdout)
    assert float(one) == pytest.approx(float(two), abs=1e-6)
    assert sorted(os.listdir(tmp_path)) == ["sweep"]
    assert sorted(os.listdir(tmp_path / "sweep")) == ["0", "1", "multirun.yaml"]
    assert [len(events(tmp_path / "sweep" / job)) for job in "01"] == [9, 9]


def test_under_torchrun_all_ranks_share_one_folder(ended: dict[str, Ended]) -> None:
    tmp_path, done = ended["torchrun"]
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("hello Line 2") == 1
    assert done.stdout.count("value ") == 1
    (folder,) = tmp_path.glob("outputs/*/*")
    assert {".hydra", ".lock", *WRITTEN} == set(os.listdir(folder))
    assert os.listdir(tmp_path) == ["outputs"]


def test_a_failing_rank_is_printed_once(ended: dict[str, Ended]) -> None:
    _, done = ended["failing"]
    assert done.returncode == 1
    assert done.stderr.startswith("rank 1, step 3:\nTraceback (most recent call last):\n")
    assert done.stderr.endswith("RuntimeError: broken\n")
    assert done.stderr.count("Traceback") == 1
    assert "hydra" not in done.stderr


def test_ctrl_c_ends_it_with_130(project: Project, tmp_path: Path) -> None:
    command = [sys.executable, str(project.script), "+task.sleep=true"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=project.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert any("READY" in line for line in process.stdout)
            start = time.monotonic()
            for _ in range(2):  # the step that it is asked to finish takes for ever
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does: every process gets it
                time.sleep(0.2)
            _, stderr = process.communicate(timeout=60)
            assert time.monotonic() - start < 30
            told = "\nstopping after this step, and saving; Ctrl-C again stops at once\n"
            told += "interrupted; there is no checkpoint yet to go on from\n"
            assert (process.returncode, stderr) == (130, told)
        finally:
            process.kill()
