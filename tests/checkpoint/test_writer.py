"""How checkpoints are written, which ones stay, and what survives a kill."""

import errno
import hashlib
import json
import os
import random
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
from checkpoints import damage, open_writer, snapshot, step_at, steps, write
from safetensors.torch import load_file
from torch import nn

from benchmarks import survival
from benchmarks.faults import interfering
from trainer.checkpoint import store
from trainer.checkpoint import writer as writer_module
from trainer.checkpoint.finding import newest_valid, store_of
from trainer.checkpoint.manifest import verify
from trainer.checkpoint.writer import read_state

# --- what is in a checkpoint --------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [True, False])
def test_files_and_manifest(tmp_path: Path, asynchronous: bool) -> None:
    writer = open_writer(tmp_path / "checkpoints", asynchronous=asynchronous)
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
    writer = open_writer(tmp_path)
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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority")
def test_the_training_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    seen: list[int] = []
    monkeypatch.setattr(writer_module, "write_weights", lambda *_: seen.append(priority()))
    before = priority()
    write(tmp_path, snapshot(1))
    assert seen == [before + 5]
    assert priority() == before


def test_one_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()
    write_weights = writer_module.write_weights

    def slow(*args: Any) -> None:
        assert may_write.wait(timeout=20)
        write_weights(*args)

    monkeypatch.setattr(writer_module, "write_weights", slow)
    writer = open_writer(tmp_path, keep=None)
    writer.save(snapshot(1))
    second = threading.Thread(target=writer.save, args=[snapshot(2)])
    second.start()
    second.join(timeout=0.2)
    assert second.is_alive()  # the copy of the first state is still needed
    may_write.set()
    second.join()
    writer.close()
    assert [p.name[-1] for p in writer.finished()] == list("12")


MODULES_OF_THE_THREAD = """
import sys
import threading
from pathlib import Path
from checkpoints import open_writer, snapshot
found = []
def note(event, args):
    if event == "import" and threading.current_thread() is not threading.main_thread():
        found.append(args[0])
writer = open_writer(Path(sys.argv[1]))
sys.addaudithook(note)
writer.save(snapshot(1))
writer.close()
print(found)
"""


def test_the_thread_imports_nothing(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    told = subprocess.run(
        [sys.executable, "-c", MODULES_OF_THE_THREAD, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (told.stdout, told.stderr) == ("[]\n", "")


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
    writer = open_writer(tmp_path)
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
    writer = open_writer(tmp_path, step=3, keep=2)
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
    writer = open_writer(tmp_path, step=1)
    assert "moved 2 checkpoints beyond step 1" in capsys.readouterr().err
    assert writer.best == writer.last == tmp_path / "step-00000001"
    assert step_at(tmp_path, "best") == step_at(tmp_path, "last") == 1
    writer.save(snapshot(2, 5.0))
    writer.close()
    assert steps(tmp_path) == [1, 2]
    assert step_at(tmp_path, "best") == 1
    assert newest_valid(store_of(tmp_path.parent)) is None  # only looks into checkpoints/
    assert steps(tmp_path / "aside") == [2, 3]
    verify(tmp_path / "aside" / "step-00000003")
    open_writer(tmp_path, step=0)  # a new run in the same folder
    assert [p.name for p in tmp_path.iterdir()] == ["aside"]
    there = {path.name for path in (tmp_path / "aside").iterdir()}
    assert there == {"step-00000001", "step-00000002", "step-00000002-1", "step-00000003"}


def test_same_step_again_replaces(tmp_path: Path) -> None:
    first, second = snapshot(1, 0.5), snapshot(1, 0.25, state={"epoch": 1})
    writer = write(tmp_path, first, second, keep=1)
    assert steps(tmp_path) == [1]
    assert read_state(tmp_path / "step-00000001") == {"epoch": 1}
    assert writer.best == writer.last == tmp_path / "step-00000001"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "last", "step-00000001"]


# --- what survives ------------------------------------------------------------------------------


def test_killed_at_any_call() -> None:
    """Forks, so it has an interpreter without threads to itself."""
    script = "from benchmarks.survival import kills; print(*kills(every=2))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"True"}
    assert len(done.stdout.split()) > 30


@pytest.mark.parametrize("luck", [0.0, 0.5])
def test_a_power_failure_at_any_call(luck: float) -> None:
    held = list(survival.power_failures((luck,)))
    assert all(held)
    assert len(held) > 60


@pytest.mark.parametrize(("error", "lasting"), [(errno.ENOSPC, True), (errno.EIO, False)])
def test_an_error_at_any_call(error: int, lasting: bool) -> None:
    held = list(survival.failures(error, lasting, every=3))
    assert all(held)
    assert len(held) > 20


def full_disk(folder: Path, is_full: threading.Event) -> Any:
    def before(name: str, args: tuple[Any, ...]) -> None:
        if name == "write" and is_full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return interfering(folder, before)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_stops_the_run_and_is_named(tmp_path: Path, asynchronous: bool) -> None:
    is_full = threading.Event()
    writer = open_writer(tmp_path, asynchronous=asynchronous)
    with full_disk(tmp_path, is_full):
        writer.save(snapshot(1))
        writer.close()
        writer = open_writer(tmp_path, asynchronous=asynchronous)
        is_full.set()
        words = (
            r"checkpoint of step 2 to .* failed: No space left on device \(.*model.safetensors\)"
        )
        with pytest.raises(OSError, match=words):  # noqa: PT012
            writer.save(snapshot(2))
            writer.close()
        assert writer.last == tmp_path / "step-00000001"
        verify(tmp_path / "step-00000001")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "last", "step-00000001"]
        is_full.clear()
        writer = open_writer(tmp_path, asynchronous=asynchronous)
        writer.save(snapshot(2))  # and when there is room again, it goes on
        writer.close()
        assert writer.last == tmp_path / "step-00000002"


def test_with_warn_the_training_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    is_full = threading.Event()
    writer = open_writer(tmp_path, on_error="warn")
    with full_disk(tmp_path, is_full):
        for step, metric in enumerate([3.0, 0.1, 0.2, 2.0], start=1):
            (is_full.set if step in (2, 3) else is_full.clear)()
            writer.save(snapshot(step, metric))
            assert writer._pending is not None
            writer._pending.result(timeout=10)
            assert writer.failed == (step in (2, 3))
            assert writer.has(step)
            completed = [path.name for path in writer.finished()]
            assert completed == ([] if step in (2, 3) else [f"step-{step:08d}"])
            assert not writer.failed
    writer.close()
    first, second = capsys.readouterr().err.splitlines()
    assert "WARNING: saving the checkpoint of step 2" in first
    assert "No space left on device" in second
    assert second.endswith("the ones before it are untouched; training goes on")
    assert steps(tmp_path) == [1, 4]
    assert (step_at(tmp_path, "best"), step_at(tmp_path, "last")) == (4, 4)
    assert not writer.has(3)


def test_an_error_of_the_thread_comes_up_once(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "checkpoints")
    shutil.rmtree(tmp_path / "checkpoints")  # a mount that vanished
    writer.save(snapshot(1))
    assert writer._pending is not None
    writer._pending.exception(timeout=10)
    assert writer.failed
    with pytest.raises(OSError, match=r"checkpoint of step 1 to .* failed: No such file"):
        writer.finished()
    assert not writer.failed
    assert writer.finished() == []
    writer.close()


def test_any_other_exception_of_the_thread_comes_up_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError

    writer = open_writer(tmp_path, on_error="warn")
    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "write_weights", broken)
        writer.save(snapshot(1))
        assert writer._pending is not None
        writer._pending.exception(timeout=10)
    assert writer.failed
    with pytest.raises(ZeroDivisionError):
        writer.finished()
    writer.close()


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file, not a folder")
    with pytest.raises(ValueError, match=r"Not a directory.*set run_dir to a folder that can be"):
        open_writer(tmp_path / "run" / "checkpoints")


def test_the_older_ones_stay_until_the_new_one_has_been_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that damages what it takes."""
    write(tmp_path, snapshot(1, state={"n": 1}), keep=1)
    fsync_folder = store.fsync_folder

    def damaging(folder: Path) -> None:
        fsync_folder(folder)
        if folder.name.startswith(".tmp-step"):
            damage(folder / "state.pt", "flip", random.Random(0))

    with monkeypatch.context() as patch:
        patch.setattr(store, "fsync_folder", damaging)
        for step in (2, 1):  # the same step again: the first one comes back
            with pytest.raises(OSError, match=r"failed: read back, .*state\.pt is damaged"):
                write(tmp_path, snapshot(step, state={"n": 2}), keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "last", "step-00000001"]
    assert read_state(tmp_path / "step-00000001") == {"n": 1}


def test_checkpoints_that_somebody_has_removed_do_not_count(tmp_path: Path) -> None:
    writer = open_writer(tmp_path, keep=2)
    for step, metric in enumerate([0.1, 0.5, 0.4], start=1):
        writer.save(snapshot(step, metric))
        writer.finished()
    writer._collect(wait=True)
    shutil.rmtree(tmp_path / "step-00000001")  # the best one
    writer.save(snapshot(4, 0.6))
    writer.close()
    assert steps(tmp_path) == [3, 4]
    assert step_at(tmp_path, "best") == 3
