"""What a run starts from: its own past, another run's weights, or nothing."""

import errno
import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import damage
from safetensors.torch import save_file
from support import Regression, assert_equal_bits, fit, measured, samples
from torch import nn

from benchmarks.faults import interfering
from trainer import OptimizerSetup
from trainer.callbacks import Callback, EarlyStopping, LearningRate
from trainer.checkpoint.saving import check_finite
from trainer.logbook import NotFiniteError

DATA: dict[str, Any] = {"train": samples(4), "val": samples(4)}


def diverging() -> Regression:
    return Regression(lambda params: torch.optim.SGD(params, lr=3.0))


def test_going_on_from_the_folder_of_a_run_means_its_last_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = fit(diverging(), tmp_path / "first", max_epochs=3, **DATA)
    assert first.best_checkpoint != first.last_checkpoint
    options = {"max_epochs": 4, "resume": str(tmp_path / "first")}
    second = fit(diverging(), tmp_path / "second", **DATA, **options)
    assert f"resuming from {first.last_checkpoint}" in capsys.readouterr().out
    assert second.step == 4


def test_a_new_run_starts_from_old_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = fit(diverging(), tmp_path / "first", max_epochs=3, **DATA)
    best, expected = Regression(), Regression()
    fit(best, tmp_path / "second", max_epochs=1, init_from=tmp_path / "first", **DATA)
    assert f"new run from the weights in {first.best_checkpoint}\n" in capsys.readouterr().out
    file = tmp_path / "weights.safetensors"
    path = first.best_checkpoint
    assert path is not None
    file.write_bytes((path / "model.safetensors").read_bytes())
    result = fit(expected, tmp_path / "third", max_epochs=1, init_from=file, **DATA)
    assert (result.step, result.epoch) == (1, 1)
    assert_equal_bits(best, expected)
    fit(expected, tmp_path / "fourth", max_epochs=1, **DATA)  # as a task that has those weights
    again = Regression()
    fit(again, tmp_path / "fifth", max_epochs=1, init_from=tmp_path / "second", **DATA)
    assert_equal_bits(again, expected)


def test_the_same_command_again_goes_on_instead_of_starting_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(Regression(), tmp_path / "old", max_epochs=1, **DATA)
    options = {"init_from": str(tmp_path / "old"), "resume": "auto", **DATA}
    fit(Regression(), tmp_path / "new", max_epochs=2, **options)
    said = capsys.readouterr().out
    assert "new run from the weights in" in said
    result = fit(Regression(), tmp_path / "new", max_epochs=3, **options)
    said = capsys.readouterr().out
    assert f"/new/checkpoints/step-00000002, not init_from={tmp_path / 'old'}\n" in said
    assert "new run" not in said
    assert result.step == 3


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    weights = {f"net.{name}": value for name, value in Regression().net.state_dict().items()}
    weights["head.weight"] = weights.pop("net.2.weight")
    save_file(weights, tmp_path / "a.safetensors")
    words = r"missing in the file: net\.2\.weight; unknown to the module: head\.weight.* by load_"
    with pytest.raises(ValueError, match=words + r"weights\(task, path, strict=False\)"):
        fit(Regression(), tmp_path, max_epochs=1, init_from=tmp_path / "a.safetensors", **DATA)


def test_a_finished_run_that_is_resumed_has_its_results(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [LearningRate(), EarlyStopping("val/loss", patience=2)]

    options = {"callbacks": callbacks(), "logger": None, "max_epochs": 9, **DATA}
    first = fit(diverging(), tmp_path, **options)
    assert first.stop_reason == "val/loss has not improved on 18.8217 in 2 validations"
    lines = (tmp_path / "metrics.jsonl").read_text()
    assert first.last_checkpoint is not None
    written = (first.last_checkpoint / "manifest.json").stat().st_mtime_ns
    again = fit(diverging(), tmp_path, **{**options, "callbacks": callbacks(), "resume": "auto"})
    first, again = (replace(each, metrics=measured(each.metrics)) for each in (first, again))
    assert again == first
    assert (first.last_checkpoint / "manifest.json").stat().st_mtime_ns == written
    assert (tmp_path / "metrics.jsonl").read_text() == lines
    patient = [LearningRate(), EarlyStopping("val/loss", patience=5)]
    options = {**options, "callbacks": patient, "resume": "auto"}
    assert fit(diverging(), tmp_path, **options).step > first.step


def test_state_that_nobody_takes_back_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(Regression(), tmp_path, max_epochs=1, callbacks=[EarlyStopping("val/loss")], **DATA)
    more = {"max_epochs": 2, "resume": "auto", "callbacks": [LearningRate()]}
    fit(Regression(), tmp_path, **more, **DATA)
    said = capsys.readouterr().out
    assert "resume: there is no callbacks/EarlyStopping any more, its state is dropped\n" in said
    assert "the checkpoint has no state for callbacks/LearningRate, which starts anew\n" in said


def test_a_step_that_is_saved_already_is_saved_again_once_it_knows_more(tmp_path: Path) -> None:
    checkpoint = {"every_n_steps": 1}
    options = {"max_steps": 3, "log_every_n_steps": 2, "global_batch_size": 1, "logger": None}
    fit(Regression(), tmp_path, checkpoint=checkpoint, **options, **DATA)
    lines = (tmp_path / "metrics.jsonl").read_text()
    assert len(lines.splitlines()) == 3, "of steps 2 and 3, and the validation"
    fit(Regression(), tmp_path, checkpoint=checkpoint, resume="auto", **options, **DATA)
    assert (tmp_path / "metrics.jsonl").read_text() == lines


def test_a_damaged_checkpoint_is_passed_over_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"checkpoint": {"every_n_steps": 1}, "global_batch_size": 1}
    fit(Regression(), tmp_path, max_steps=3, **options, **DATA)
    damage(tmp_path / "checkpoints/step-00000003/config.yaml", "flip", random.Random(0))
    capsys.readouterr()
    for which in ("last", "checkpoints/step-00000003", str(tmp_path)):
        words = r"config\.yaml is damaged.*newest valid one beside it is .*step-00000002: give that"
        with pytest.raises(ValueError, match=words):
            fit(Regression(), tmp_path, max_steps=4, resume=which, **options, **DATA)
    result = fit(Regression(), tmp_path, max_steps=4, resume="auto", **options, **DATA)
    told = capsys.readouterr()
    assert "NOT using a damaged checkpoint" in told.err
    assert "resuming from" in told.out
    assert "step-00000002\n" in told.out
    assert result.step == 4
    assert result.last_checkpoint == tmp_path / "checkpoints/step-00000004"


def test_a_slip_in_the_monitor_does_not_lose_the_work(tmp_path: Path) -> None:
    through = fit(Regression(), tmp_path / "through", max_epochs=2, **DATA)
    slip = {"monitor": "val/f1"}
    words = rf"val/f1 is measured by nobody.* go on with resume={tmp_path / 'run'}"
    with pytest.raises(ValueError, match=words):
        fit(Regression(), tmp_path / "run", max_epochs=2, checkpoint=slip, **DATA)
    resume = {"resume": str(tmp_path / "run"), "checkpoint": {"monitor": "val/loss"}}
    result = fit(Regression(), tmp_path / "run", max_epochs=2, **resume, **DATA)
    assert measured(result.metrics) == measured(through.metrics)
    assert result.best_checkpoint == tmp_path / "run/checkpoints/step-00000002"


@pytest.mark.parametrize("on_error", ["stop", "warn"])
def test_a_full_disk_in_mid_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], on_error: str
) -> None:
    steps: list[int] = []

    def before(name: str, args: tuple[Any, ...]) -> None:
        file = os.readlink(f"/proc/self/fd/{args[0]}") if name == "write" else ""
        if "step-00000002" in file or "step-00000003" in file:
            raise OSError(errno.ENOSPC, "No space left on device")

    class Counting(Regression):
        def after_optimizer_step(self) -> None:
            steps.append(1)

    checkpoint = {"every_n_steps": 1, "on_error": on_error}
    options: dict[str, Any] = {"checkpoint": checkpoint, "global_batch_size": 1, "max_steps": 4}
    with interfering(tmp_path / "checkpoints", before):
        if on_error == "stop":
            with pytest.raises(OSError, match=r"checkpoint of step 2 to .*No space left on device"):
                fit(Counting(), tmp_path, **options, **DATA)
            assert len(steps) == 3, "by the next step at the latest"
        else:
            result = fit(Counting(), tmp_path, **options, **DATA)
            told = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
            assert len(told) == 2
            assert result.last_checkpoint == tmp_path / "checkpoints/step-00000004"
    there = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert there == ["step-00000001", "step-00000004"][: 1 if on_error == "stop" else 2]


def test_weights_that_are_large_are_not_taken_for_infinite() -> None:
    large = nn.ParameterList([torch.full((8,), 3e38), torch.zeros(0), torch.ones(2).half() * 6e4])
    check_finite(large, 1)
    check_finite(nn.Identity(), 1)
    for value in (float("nan"), float("inf"), -float("inf")):
        large[2].data[1] = value
        with pytest.raises(NotFiniteError, match="at step 7 2 became NaN or infinite"):
            check_finite(large, 7)


class Copying(Callback):
    """Copies the first checkpoint of a step, and what is there beside it."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, run: Any, path: Path) -> None:
        target = run.run_dir.with_name("killed")
        if run.step == self.step and not target.exists():
            shutil.copytree(run.run_dir, target, symlinks=True)


def test_a_kill_before_the_last_events_repeats_and_loses_none(tmp_path: Path) -> None:
    def halving(params: Any) -> OptimizerSetup:
        optimizer = torch.optim.SGD(params, lr=0.1)
        return OptimizerSetup(optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))

    def events(run_dir: Path) -> list[Any]:
        lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        return [measured({n: v for n, v in line.items() if n != "time_s"}) for line in lines]

    options: dict[str, Any] = {"max_steps": 3, "log_every_n_steps": 2, "global_batch_size": 1}
    options |= {"logger": None, "checkpoint": {"every_n_steps": 1, "asynchronous": False}, **DATA}
    through = tmp_path / "through"
    fit(Regression(halving), through, callbacks=[LearningRate(), Copying(3)], **options)
    killed = tmp_path / "killed"
    assert [line["step"] for line in events(killed)] == [2]
    shutil.copy(through / "metrics.jsonl", killed)  # the events came, their checkpoint did not
    more = {"resume": "auto", "callbacks": [LearningRate()]}
    result = fit(Regression(halving), killed, **options, **more)
    assert result.step == 3
    assert events(killed) == events(through)
    assert [line.get("train/lr") for line in events(killed)] == [0.05, 0.025, None]


class Tied(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)).double()
        self.net[1].weight = self.net[0].weight


def test_tied_weights_go_on_tied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, through, again = Tied(), Tied(), Tied()
    through.load_state_dict(first.state_dict())
    fit(first, tmp_path / "a", max_epochs=1, **DATA)
    fit(again, tmp_path / "a", max_epochs=2, resume="auto", **DATA)
    fit(through, tmp_path / "b", max_epochs=2, **DATA)
    assert again.net[1].weight is again.net[0].weight
    assert_equal_bits(again, through)
