"""How checkpoints are written, which ones stay, and what survives a kill."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import snapshot, step_at, steps, write
from safetensors.torch import load_file
from torch import nn

from trainer.checkpoint import manifest
from trainer.checkpoint import writer as writer_module
from trainer.checkpoint.manifest import newest_valid, verify
from trainer.checkpoint.weights import load_weights
from trainer.checkpoint.writer import CheckpointWriter, read_state
from trainer.config import CheckpointConfig

# --- what is in a checkpoint --------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [True, False])
def test_files_and_manifest(tmp_path: Path, asynchronous: bool) -> None:
    writer = CheckpointWriter(tmp_path / "checkpoints", CheckpointConfig(asynchronous=asynchronous))
    writer.save(snapshot(500, metric=0.25))
    writer.close()
    path = tmp_path / "checkpoints" / "step-00000500"
    assert writer.finished() == [path]
    assert writer.finished() == []
    assert writer.last == writer.best == path
    files = {p.name for p in path.iterdir()}
    assert files == {"model.safetensors", "state.pt", "config.yaml", "manifest.json"}
    facts = json.loads((path / "manifest.json").read_text())
    assert (facts["step"], facts["world_size"], facts["metric"]) == (500, 2, 0.25)
    for name in files - {"manifest.json"}:
        content = (path / name).read_bytes()
        assert facts["files"][name]["size"] == len(content)
        assert facts["files"][name]["sha256"] == hashlib.sha256(content).hexdigest()
    assert set(load_file(path / "model.safetensors")) == {"weight", "bias"}
    assert (path / "config.yaml").read_text() == "trainer:\n  max_epochs: 2\n"
    assert read_state(path)["optimizer"]["state"][0]["exp_avg"].tolist() == [500.0] * 3


def test_state_is_copied_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    write_weights = writer_module.write_weights

    def slow(*args: Any) -> None:
        assert go.wait(10)
        write_weights(*args)

    monkeypatch.setattr(writer_module, "write_weights", slow)
    writer = CheckpointWriter(tmp_path, CheckpointConfig())
    weight, moment = torch.ones(4), torch.ones(4)
    writer.save(snapshot(1, weights={"w": weight}, state={"m": moment}))
    assert writer.finished() == []
    assert writer.last is None
    with torch.no_grad():
        weight.zero_()  # the training goes on
        moment.zero_()
    go.set()
    writer.close()
    [path] = writer.finished()
    assert load_file(path / "model.safetensors")["w"].tolist() == [1.0] * 4
    assert read_state(path)["m"].tolist() == [1.0] * 4


def test_one_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing: list[int] = []
    most: list[int] = []
    write_weights = writer_module.write_weights

    def counted(*args: Any) -> None:
        writing.append(1)
        most.append(len(writing))
        write_weights(*args)
        writing.pop()

    monkeypatch.setattr(writer_module, "write_weights", counted)
    writer = write(tmp_path, *(snapshot(i) for i in range(1, 6)), keep=None)
    assert most == [1] * 5
    assert [p.name[-1] for p in writer.finished()] == list("12345")


def optimizers(module: nn.Module) -> list[tuple[torch.optim.Optimizer, Any]]:
    lr = torch.optim.lr_scheduler
    sgd = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    adamw = torch.optim.AdamW(module.parameters(), lr=0.1, amsgrad=True)
    return [
        (sgd, lr.MultiStepLR(sgd, [1, 1, 5])),
        (sgd, lr.SequentialLR(sgd, [lr.LinearLR(sgd), lr.CosineAnnealingLR(sgd, 9)], [3])),
        (adamw, lr.OneCycleLR(adamw, 0.5, total_steps=20)),
        (adamw, lr.LambdaLR(adamw, lambda step: 1 / (step + 1))),
        (adamw, lr.ReduceLROnPlateau(adamw)),
    ]


@pytest.mark.parametrize("index", range(5))
def test_torch_optimizers_and_schedulers_fit(tmp_path: Path, index: int) -> None:
    module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer, scheduler = optimizers(module)[index]
    module(torch.randn(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    scheduler.step(
        *([1.0] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else [])
    )
    state = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    write(tmp_path, snapshot(1, state=state))
    loaded = read_state(tmp_path / "step-00000001")
    again, schedule = optimizers(module)[index]
    again.load_state_dict(loaded["optimizer"])
    schedule.load_state_dict(loaded["scheduler"])
    assert schedule.state_dict() == scheduler.state_dict()
    for old, new in zip(optimizer.state.values(), again.state.values(), strict=True):
        for name in old:
            if isinstance(old[name], torch.Tensor):
                assert torch.equal(old[name], new[name])
                assert old[name].stride() == new[name].stride()  # fused kernels rely on it


def test_plain_values(tmp_path: Path) -> None:
    state = {
        "n": np.float64(0.5),
        "deep": [(1, {"s": "x", 3: None})],
        "counter": Counter([1]),
        "big": 2**70,
    }
    write(tmp_path, snapshot(1, state=state))
    loaded = read_state(tmp_path / "step-00000001")
    assert loaded == state
    assert type(loaded["n"]) is float
    assert type(loaded["counter"]) is Counter


def test_anything_else_is_refused_by_name(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, CheckpointConfig())
    with pytest.raises(ValueError, match=r"state\['callbacks'\]\['mine'\]\[0\] is of type pathlib"):
        writer.save(snapshot(1, state={"callbacks": {"mine": [Path("x")]}}))
    with pytest.raises(ValueError, match=r"extra is of type builtins\.function"):
        writer.save(snapshot(1, weights={"extra": lambda: 0}))
    writer.close()
    assert list(tmp_path.iterdir()) == []


# --- which ones stay ----------------------------------------------------------------------------


def test_keep_never_removes_best_or_last(tmp_path: Path) -> None:
    metrics = [5.0, 1.0, 3.0, 4.0, 3.5, 2.0]
    writer = write(tmp_path, *(snapshot(i, m) for i, m in enumerate(metrics)), keep=2)
    assert steps(tmp_path) == [1, 4, 5]
    assert step_at(tmp_path, "best") == 1
    assert step_at(tmp_path, "last") == 5
    assert writer.best == tmp_path / "step-00000001"
    assert not list(tmp_path.glob(".tmp-*"))
    assert len(writer.finished()) == 6


@pytest.mark.parametrize(
    ("mode", "metrics", "best"),
    [
        ("min", [2.0, 1.0, 1.0], 1),  # the first of equals
        ("max", [2.0, 3.0, -1.0], 1),
        ("min", [2.0, float("nan"), float("-inf")], 0),
        ("max", [None, 3.0, None], 1),
        ("min", [None, None, None], 2),  # no metric: the last
    ],
)
def test_best(tmp_path: Path, mode: str, metrics: list[float | None], best: int) -> None:
    write(tmp_path, *(snapshot(i, m) for i, m in enumerate(metrics)), keep=1, mode=mode)
    assert step_at(tmp_path, "best") == best
    assert steps(tmp_path) == sorted({best, 2})


def test_keep_all(tmp_path: Path) -> None:
    write(tmp_path, *(snapshot(i) for i in range(5)), keep=None)
    assert steps(tmp_path) == [0, 1, 2, 3, 4]


def test_resumed_writer_goes_on(tmp_path: Path) -> None:
    write(tmp_path, snapshot(1, 0.1), snapshot(2, 0.5), snapshot(3, 0.4), keep=2)
    writer = CheckpointWriter(tmp_path, CheckpointConfig(keep=2), step=3)
    assert writer.best == tmp_path / "step-00000001"
    assert writer.last == tmp_path / "step-00000003"
    assert writer.finished() == []
    writer.save(snapshot(4, 0.3))
    writer.close()
    assert steps(tmp_path) == [1, 3, 4]
    assert step_at(tmp_path, "best") == 1


def test_values_of_another_monitor_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, snapshot(1, 0.1), monitor="val/loss")
    write(tmp_path, snapshot(2, 0.9), monitor="val/accuracy", mode="max")
    assert step_at(tmp_path, "best") == 2


def test_resuming_before_the_last_sets_the_others_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, *(snapshot(i, -float(i)) for i in (1, 2, 3)))
    writer = CheckpointWriter(tmp_path, CheckpointConfig(), step=1)
    assert "moved 2 checkpoints beyond step 1" in capsys.readouterr().err
    assert writer.best == writer.last == tmp_path / "step-00000001"
    assert step_at(tmp_path, "best") == step_at(tmp_path, "last") == 1
    writer.save(snapshot(2, 5.0))
    writer.close()
    assert steps(tmp_path) == [1, 2]
    assert step_at(tmp_path, "best") == 1
    assert newest_valid(tmp_path.parent) is None  # only looks into checkpoints/
    assert steps(tmp_path / "aside") == [2, 3]
    verify(tmp_path / "aside" / "step-00000003")
    CheckpointWriter(tmp_path, CheckpointConfig(), step=0)  # a new run in the same folder
    assert [p.name for p in tmp_path.iterdir()] == ["aside"]


def test_same_step_again_replaces(tmp_path: Path) -> None:
    first, second = snapshot(1, 0.5), snapshot(1, 0.25, state={"epoch": 1})
    writer = write(tmp_path, first, second, keep=1)
    assert steps(tmp_path) == [1]
    assert read_state(tmp_path / "step-00000001") == {"epoch": 1}
    assert writer.best == writer.last == tmp_path / "step-00000001"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "last", "step-00000001"]


# --- what survives ------------------------------------------------------------------------------

KILLED = """
import os, sys
import omegaconf, safetensors.torch  # once, not in every child
from pathlib import Path
import torch
from trainer.checkpoint import writer as writer_module
from trainer.config import CheckpointConfig

def snapshot(step):
    return writer_module.Snapshot(step, {"w": torch.full((3,), float(step))}, {"step": step}, {}, 1)

def save_until(moment, folder):
    calls = 0

    def deadly(function):
        def wrapped(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == moment:
                os._exit(9)
            return function(*args, **kwargs)
        return wrapped

    os.fsync = lambda descriptor: None  # what a killed process wrote is there without it
    config = CheckpointConfig(keep=1, asynchronous=False)
    writer = writer_module.CheckpointWriter(folder, config)
    writer.save(snapshot(1))
    for owner, name in [
        (os, "fsync"), (Path, "rename"), (Path, "replace"), (Path, "symlink_to"), (Path, "mkdir"),
        (Path, "write_text"), (torch, "save"), (writer_module, "write_weights"),
        (writer_module, "_write_config"), (writer_module.shutil, "rmtree"), (os, "unlink"),
    ]:
        setattr(owner, name, deadly(getattr(owner, name)))
    for again in range(2):  # a new step, then the same one again
        writer.save(snapshot(2))
    print(calls, flush=True)
    os._exit(0)

moment, code = 0, 9
while code == 9:  # one interpreter, and a fork per moment: cheap
    moment += 1
    pid = os.fork()
    if pid == 0:
        save_until(moment, Path(sys.argv[1]) / f"run-{moment}" / "checkpoints")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
sys.exit(code)
"""


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Ends the writer before each of its file operations, in a child forked for each."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    runs = sorted(tmp_path.glob("run-*"), key=lambda p: int(p.name[4:]))
    assert len(runs) - 1 == int(done.stdout) > 20
    seen = set()
    for run in runs:
        path = newest_valid(run)
        assert path is not None, run
        step = read_state(path)["step"]
        seen.add(step)
        module = nn.ParameterDict({"w": torch.zeros(3)})
        load_weights(module, path)
        assert module["w"].tolist() == [float(step)] * 3
        # The next start cleans up.
        writer = CheckpointWriter(run / "checkpoints", CheckpointConfig())
        assert writer.last == run / "checkpoints" / f"step-{step:08d}"
        names = {p.name for p in (run / "checkpoints").iterdir()}
        assert names <= {"best", "last", "step-00000001", "step-00000002"}
    assert seen == {1, 2}


def test_hostile_pickle_is_refused(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "owned"),)

    write(tmp_path, snapshot(1))
    path = tmp_path / "step-00000001"
    torch.save(Hostile(), path / "state.pt")
    facts = json.loads((path / "manifest.json").read_text())
    del facts["sha256"]
    facts["files"]["state.pt"] = writer_module.seal(path / "state.pt")
    (path / "manifest.json").write_text(writer_module.manifest_text(facts))
    verify(path)
    with pytest.raises(ValueError, match="cannot be read as tensors and plain values"):
        read_state(path)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    writer = CheckpointWriter(tmp_path, CheckpointConfig(asynchronous=asynchronous))
    writer.save(snapshot(1))
    writer.close()
    writer = CheckpointWriter(tmp_path, CheckpointConfig(asynchronous=asynchronous))

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    def save_and_wait() -> None:
        writer.save(snapshot(2))
        writer.close()

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "fsync", full)
        with pytest.raises(OSError, match=r"checkpoint of step 2 to .* failed .*No space left"):
            save_and_wait()
    assert writer.last == tmp_path / "step-00000001"
    verify(tmp_path / "step-00000001")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "last", "step-00000001"]
    writer = CheckpointWriter(tmp_path, CheckpointConfig(asynchronous=asynchronous))
    writer.save(snapshot(2))  # and when there is room again, it goes on
    writer.close()
    assert writer.last == tmp_path / "step-00000002"


def test_error_of_the_thread_comes_up_once(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "checkpoints", CheckpointConfig())
    shutil.rmtree(tmp_path / "checkpoints")  # a mount that vanished
    writer.save(snapshot(1))
    assert writer._pending is not None
    writer._pending.exception(timeout=10)
    with pytest.raises(OSError, match=r"checkpoint of step 1 to .* failed"):
        writer.finished()
    assert writer.finished() == []
    writer.close()


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file, not a folder")
    with pytest.raises(ValueError, match="set run_dir to a folder that can be written"):
        CheckpointWriter(tmp_path / "run" / "checkpoints", CheckpointConfig())
