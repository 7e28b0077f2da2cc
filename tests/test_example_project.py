"""The example project of the documentation: used as its readers would, from its own folder."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file
from support import assert_equal_bits

from trainer import Trainer, load_task, run
from trainer.hydra.command_line import Place, check_command_line
from trainer.hydra.composition import register_configs

SOURCE = Path(__file__).parents[1] / "docs" / "example_project"
QUICK = ["experiment=quick", "trainer.accelerator=cpu"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, elsewhere."""
    folder = tmp_path_factory.mktemp("users") / "example_project"
    shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("__pycache__", "outputs"))
    return folder


@pytest.fixture(scope="module")
def sweep(project: Path) -> Path:
    """A sweep over ranks and widths, of which one cannot be built; its folder."""
    overrides = ["trainer.devices=1,2", "task.width=8,-1,8", "hydra.sweep.dir=sweep"]
    done = subprocess.run(
        [sys.executable, "-m", "spirals.train", *QUICK, "--multirun", *overrides],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=60,
    )
    (project / "sweep" / "stdout").write_text(done.stdout)
    (project / "sweep" / "stderr").write_text(done.stderr)
    assert done.returncode == 1
    return project / "sweep"


def values(path: Path) -> dict[str, float]:
    """The last value of each metric."""
    found: dict[str, float] = {}
    for line in path.read_text().splitlines():
        found.update(json.loads(line))
    return found


def test_each_job_of_a_sweep_has_a_folder_and_runs_once(sweep: Path) -> None:
    folders = sorted(path.name for path in sweep.iterdir() if path.is_dir())
    assert folders == ["0", "1", "2", "3", "4", "5"]
    assert (sweep / "stdout").read_text().count("launcher: ") == 4  # the others failed before
    for job, devices in ("0", 1), ("2", 1), ("3", 2), ("5", 2):
        assert sorted(os.listdir(sweep / job)) == [
            *(".hydra", ".lock", "checkpoints", "metrics.jsonl", "picture.txt"),
            *("run.json", "tensorboard"),
        ]
        overrides = (sweep / job / ".hydra" / "overrides.yaml").read_text()
        assert f"trainer.devices={devices}\n" in overrides
    assert "trainer.devices=1,2" in (sweep / "multirun.yaml").read_text()


def test_the_jobs_that_fail_say_so_once_and_the_others_go_on(sweep: Path) -> None:
    shown = (sweep / "stderr").read_text()
    assert shown.count("Traceback") == 2
    for number in 1, 4:
        assert shown.count(f"job {number} (") == 1
    assert shown.count("job 1 failed: RuntimeError: Trying to create tensor with negative") == 1
    assert "hydra/_internal/hydra.py" not in shown


def test_the_jobs_of_a_sweep_are_the_same_run_on_one_rank_and_on_two(sweep: Path) -> None:
    one, two = (values(sweep / job / "metrics.jsonl") for job in ("0", "3"))
    for name in "train/loss", "val/loss", "test/loss", "val/accuracy":
        assert one[name] == pytest.approx(two[name], rel=1e-5)


def test_a_job_gets_nothing_from_those_before_it(sweep: Path) -> None:
    first, again = (sweep / job / "checkpoints/last/model.safetensors" for job in ("0", "2"))
    assert first.read_bytes() == again.read_bytes()


def test_a_checkpoint_is_tested_and_loaded(
    sweep: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(project))
    monkeypatch.chdir(project)
    overrides = ["task.width=8", "mode=test", "ckpt_path=sweep/3/checkpoints/best"]
    register_configs()
    with initialize_config_dir(str(project / "spirals" / "conf"), version_base="1.3"):
        cfg = compose("config", overrides=[*QUICK, *overrides])
    expected = values(sweep / "3" / "metrics.jsonl")["test/loss"]
    assert run(cfg)["test/loss"] == pytest.approx(expected, rel=1e-5)

    task = load_task(sweep / "2" / "checkpoints" / "best")
    saved = load_file(sweep / "2" / "checkpoints" / "best" / "model.safetensors")
    assert task.net[0].weight.shape == (8, 2)  # type: ignore[index, union-attr]
    assert_equal_bits(dict(sorted(task.state_dict().items())), dict(sorted(saved.items())))


def test_the_presets_compose(project: Path) -> None:
    place = Place(str(project / "spirals" / "conf"), "config")
    try:
        for preset in sorted((project / "spirals" / "conf" / "experiment").glob("*.yaml")):
            check_command_line(place, [f"experiment={preset.stem}"], multirun=False)
    finally:
        register_configs()


def test_the_task_learns(monkeypatch: pytest.MonkeyPatch, project: Path, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(project))
    from spirals.callbacks import Picture
    from spirals.data import Spirals
    from spirals.task import SpiralTask

    trainer = Trainer(
        max_epochs=10,
        global_batch_size=64,
        accelerator="cpu",
        run_dir=str(tmp_path),
        logger=False,
        callbacks={"picture": Picture(width=20)},
    )
    result = trainer.fit(SpiralTask(), Spirals())
    assert result.metrics["val/accuracy"] > 0.9
    picture = (tmp_path / "picture.txt").read_text().splitlines()
    assert [len(line) for line in picture] == [20] * 10
    assert set("".join(picture)) == {"#", "."}
