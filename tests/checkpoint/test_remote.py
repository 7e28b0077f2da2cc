"""Checkpoints in a store: whole or absent after a kill at any operation, and found again."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from checkpoints import damage, snapshot
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations
from support import Regression, assert_equal_bits, fit_on, samples

from trainer import FitResult, Trainer, load_task, load_weights
from trainer.checkpoint.finding import find, newest_valid
from trainer.checkpoint.manifest import read_manifest, verify
from trainer.checkpoint.remote import RemoteStore
from trainer.checkpoint.writer import CheckpointWriter, read_state
from trainer.config import CheckpointConfig
from trainer.urls import is_url, local_folder

WRITES = ("pipe_file", "put_file", "cp_file")
OPERATIONS = (*WRITES, "ls", "info", "cat_file", "get_file", "rm_file", "rm", "makedirs")


class Killed(BaseException):
    """Not an Exception: like a kill, nothing handles it."""


class Faulty(LocalFileSystem):
    """A store in local folders whose ``fail_at``-th operation fails, a write half-way through."""

    protocol = "faulty"
    cachable = False
    fail_at: int | None = None
    error: type[BaseException] = Killed
    count = 0
    is_inside = False

    @classmethod
    def fail(cls, at: int | None) -> None:
        cls.fail_at, cls.count = at, 0


def _faulty(name: str) -> Callable[..., Any]:
    healthy = getattr(LocalFileSystem, name)

    def operation(self: Faulty, *args: Any, **kwargs: Any) -> Any:
        if Faulty.is_inside:
            return healthy(self, *args, **kwargs)
        Faulty.count += 1
        Faulty.is_inside = True
        try:
            return failing(self, *args, **kwargs)
        finally:
            Faulty.is_inside = False

    def failing(self: Faulty, *args: Any, **kwargs: Any) -> Any:
        if Faulty.count != Faulty.fail_at:
            return healthy(self, *args, **kwargs)
        if name in WRITES:
            target = Path(self._strip_protocol(args[0 if name == "pipe_file" else 1]))
            target.parent.mkdir(parents=True, exist_ok=True)
            healthy(self, *args, **kwargs)
            target.write_bytes(target.read_bytes()[: target.stat().st_size // 2])
        raise Faulty.error(f"{name} fails")

    return operation


for _name in OPERATIONS:
    setattr(Faulty, _name, _faulty(_name))
fsspec.register_implementation("faulty", Faulty)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Faulty, "fail_at", None)
    monkeypatch.setattr(Faulty, "error", Killed)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # what takes longest
    yield tmp_path
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


def faulty_url(folder: Path) -> str:
    return f"faulty://{folder}/run"


def open_writer(url: str, step: int | None = None, **options: Any) -> CheckpointWriter:
    options = {"asynchronous": False, "keep": 1, **options}
    return CheckpointWriter(RemoteStore(f"{url}/checkpoints"), CheckpointConfig(**options), step)


def forget_copies() -> None:
    """Be another machine, which has nothing yet."""
    shutil.rmtree("runs", ignore_errors=True)


def newest(url: str) -> float | None:
    """Return what marks the newest whole checkpoint."""
    path = newest_valid(RemoteStore(f"{url}/checkpoints"))
    if path is None:
        return None
    verify(path)
    return float(read_state(path)["mark"])


def marked(step: int, mark: int, metric: float | None = None) -> Any:
    return snapshot(step, metric, state={"mark": mark})


def train(run_dir: str, max_steps: int, world_size: int = 1, **options: Any) -> FitResult:
    given = {"checkpoint": {"every_n_steps": 1, "keep": 2}, **options}
    task = options.pop("task", None) or Regression()
    given.pop("task", None)
    return fit_on(
        world_size,
        task,
        run_dir,  # type: ignore[arg-type]
        train=samples(16),
        val=samples(8),
        global_batch_size=4,
        max_steps=max_steps,
        **given,
    )


# --- a run ---------------------------------------------------------------------------------------


def test_a_run_in_a_store(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, whole = "memory://bucket/run", Regression()
    result = train(url, 3)
    folder = elsewhere / "runs/memory/bucket/run"
    assert capsys.readouterr().out.count(f"checkpoints: {url}; all other files: {folder}\n") == 1
    assert result.run_dir == folder
    system = fsspec.filesystem("memory")
    names = {Path(path).name for path in system.ls("/bucket/run/checkpoints", detail=False)}
    assert {"best", "last", "step-00000003"} <= names
    assert len(names) <= 2 + 3  # keep=2, and the best
    assert system.cat("/bucket/run/checkpoints/last") == b"step-00000003"

    forget_copies()
    resumed = Regression()
    train(url, 6, resume="auto", task=resumed)
    assert "resuming from" in capsys.readouterr().out
    train("whole", 6, task=whole)
    assert_equal_bits(resumed, whole)

    forget_copies()
    for place in (url, f"{url}/checkpoints/last", f"{url}/checkpoints/step-00000006"):
        found = Regression()
        load_weights(found, find("nowhere", place, of_run="last"))
        assert_equal_bits(found, whole)
    found = Regression()
    load_weights(found, f"{url}/checkpoints/last")
    assert_equal_bits(found, whole)
    trainer = Trainer(run_dir=url, accelerator="cpu")
    for ckpt_path in (
        "last",
        "step-00000006",
        f"{url}/checkpoints/step-00000006/model.safetensors",
    ):
        evaluated = Regression()
        trainer.validate(evaluated, val=samples(8), ckpt_path=ckpt_path)
        assert_equal_bits(evaluated, whole)
    with pytest.raises(ValueError, match=r"no checkpoint 'step-9'.* there are step-00000.*memory:"):
        trainer.validate(Regression(), val=samples(8), ckpt_path="step-9")
    with pytest.raises(ValueError, match=r"has no task\._target_"):
        load_task(f"{url}/checkpoints/last")

    train(url, 1, init_from=f"{url}/checkpoints/last", resume=None)  # a new run in the same place
    aside = system.ls("/bucket/run/checkpoints/aside", detail=False)
    assert "/bucket/run/checkpoints/aside/step-00000006" in aside
    assert system.cat("/bucket/run/checkpoints/last") == b"step-00000001"
    assert "beyond step 0, which this run starts from, to memory://" in capsys.readouterr().err


@pytest.mark.timeout(60)
def test_ranks_and_another_machine(elsewhere: Path) -> None:
    with pytest.raises(ValueError, match="would lie in the memory of rank 0, and be lost with it"):
        train("memory://ranks", 2, world_size=2)
    url, best = f"file://{elsewhere}/store/run", Regression()
    train(url, 2, world_size=2, task=best)
    forget_copies()
    result = train(url, 3, world_size=2, resume="auto", checkpoint={"monitor": "val/loss"})
    assert (elsewhere / "store/run/checkpoints/last").read_text() == "step-00000003"
    for path in (result.best_checkpoint, result.last_checkpoint):
        assert path is not None
        verify(path)  # on this machine too


# --- faults --------------------------------------------------------------------------------------


def check_manifests(folder: Path) -> None:
    """Check that a whole manifest is only where everything else is."""
    for path in folder.glob("**/step-*"):
        try:
            read_manifest(path)
        except ValueError:
            continue
        verify(path)


def after_one(url: str) -> CheckpointWriter:
    writer = open_writer(url)
    writer.save(marked(1, 10))
    return writer


def save_next(url: str, writer: CheckpointWriter) -> None:
    writer.save(marked(2, 20))


def save_again(url: str, writer: CheckpointWriter) -> None:
    writer.save(marked(1, 11))


def start_here(url: str, writer: CheckpointWriter) -> None:
    forget_copies()
    open_writer(url)


ACTIONS = {
    "the next step": (save_next, {10, 20}),
    "the same step again": (save_again, {10, 11}),
    "a new start": (start_here, {10}),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_a_kill_at_any_operation(elsewhere: Path, action: str) -> None:
    act, allowed = ACTIONS[action]
    after_one(faulty_url(elsewhere / "before"))
    for number in range(1, 200):
        forget_copies()
        shutil.copytree("before", str(number))
        folder, url = elsewhere / f"{number}/run/checkpoints", faulty_url(elsewhere / str(number))
        writer = open_writer(url)
        Faulty.fail(at=number)
        try:
            act(url, writer)
            killed = False
        except Killed:
            killed = True
        Faulty.fail(at=None)
        check_manifests(folder)
        forget_copies()
        assert newest(url) in allowed, number
        writer = open_writer(url)
        assert newest(url) in allowed, number
        left = {path.name for path in folder.iterdir()} - {"best", "last"}
        assert left <= {"step-00000001", "step-00000002"}, number
        assert all((folder / name / "manifest.json").exists() for name in left), number
        if number % 5 == 0 or not killed:
            writer.save(marked(3, 30))
            forget_copies()
            assert newest(url) == 30, number
        if not killed:
            break
    assert number > 8


def test_setting_aside_loses_nothing(elsewhere: Path) -> None:
    after_one(faulty_url(elsewhere / "before"))
    for number in range(1, 100):
        forget_copies()
        shutil.copytree("before", str(number))
        url = faulty_url(elsewhere / str(number))
        Faulty.fail(at=number)
        try:
            open_writer(url, step=0)
            break
        except Killed:
            Faulty.fail(at=None)
        check_manifests(elsewhere / str(number))
        assert 10 in (newest(url), newest_aside(url)), number
    assert number > 8
    Faulty.fail(at=None)
    assert (newest(url), newest_aside(url)) == (None, 10)


def test_what_lies_aside_stays(elsewhere: Path) -> None:
    url = f"file://{elsewhere}/run"
    for _ in range(2):
        after_one(url).close()
        open_writer(url, step=0).close()
    aside = elsewhere / "run/checkpoints/aside"
    assert {path.name for path in aside.iterdir()} == {"step-00000001", "step-00000001-1"}
    check_manifests(aside.parent)


def newest_aside(url: str) -> float | None:
    path = newest_valid(RemoteStore(f"{url}/checkpoints/aside"))
    return None if path is None else float(read_state(path)["mark"])


def test_an_error_of_the_store_is_told_and_the_next_save_is_whole(elsewhere: Path) -> None:
    Faulty.error = ConnectionError
    after_one(faulty_url(elsewhere / "before"))
    for number in range(1, 100):
        forget_copies()
        shutil.copytree("before", str(number))
        url = faulty_url(elsewhere / str(number))
        writer = open_writer(url)
        Faulty.fail(at=number)
        try:
            writer.save(marked(2, 20))
            break
        except OSError as error:
            told = str(error)
        assert "step 2" in told, number
        assert f"{url}/checkpoints (ConnectionError: " in told, number
        Faulty.fail(at=None)
        writer.save(marked(3, 30))
        forget_copies()
        assert newest(url) == 30, number
    assert number > 8


@pytest.mark.parametrize("name", ["put_file", "pipe_file"])
def test_a_store_that_loses_bytes_is_told(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    url = faulty_url(elsewhere)
    writer = after_one(url)
    write = getattr(Faulty, name)

    def lose(self: Faulty, source: str, target: str | bytes) -> None:
        write(self, source, target)
        path = self._strip_protocol(source if name == "pipe_file" else target)
        os.truncate(path, Path(path).stat().st_size - 1)

    monkeypatch.setattr(Faulty, name, lose)
    with pytest.raises(OSError, match=r"step 2 .* failed: .* there (instead of|as it was)"):
        writer.save(marked(2, 20))
    assert newest(url) == 10


def test_the_best_is_on_this_machine_too(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{elsewhere}/run"
    writer = open_writer(url)
    for step, metric in ((1, 0.1), (2, 0.5)):
        writer.save(marked(step, 10 * step, metric))
    forget_copies()
    writer = open_writer(url)
    assert writer.best is not None
    assert writer.best.name == "step-00000001"
    verify(writer.best)
    assert (local_folder(url) / "checkpoints/best").resolve() == writer.best

    damage(elsewhere / "run/checkpoints/step-00000001/state.pt", "flip", random.Random(0))
    forget_copies()
    writer = open_writer(url)  # the run goes on
    assert "best has no copy here: file://" in capsys.readouterr().err
    writer.save(marked(3, 30, 0.01))
    assert (local_folder(url) / "checkpoints/best").resolve().name == "step-00000003"


def test_a_damaged_one_is_passed_over(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"file://{elsewhere}/run"
    writer = open_writer(url, keep=None)
    for step in (1, 2, 3):
        writer.save(marked(step, 10 * step))
    assert newest(url) == 30  # its copy is here
    file = elsewhere / "run/checkpoints/step-00000003/state.pt"
    rng = random.Random(0)
    for how in ("flip", "cut", "zero"):
        whole = file.read_bytes()
        damage(file, how, rng)
        forget_copies()
        assert newest(url) == 20
        told = capsys.readouterr().err
        assert f"NOT using a damaged checkpoint: {url}/checkpoints/step-00000003/state.pt" in told
        with pytest.raises(ValueError, match=r"step-00000003/state\.pt is damaged"):
            find(url, "last")
        file.write_bytes(whole)
    file.unlink()
    forget_copies()
    assert newest(url) == 20
    assert f"{url}/checkpoints/step-00000003/state.pt is missing" in capsys.readouterr().err
    assert not list(Path("runs").rglob(".tmp-*"))


def test_a_damaged_copy_is_fetched_again(elsewhere: Path) -> None:
    url = f"file://{elsewhere}/run"
    open_writer(url).save(marked(1, 10))
    copy = local_folder(url) / "checkpoints/step-00000001"
    damage(copy / "state.pt", "flip", random.Random(0))
    assert newest(url) == 10
    (copy / "manifest.json").write_text("{}")
    assert newest(url) == 10


def test_the_store_counts_not_the_copies(elsewhere: Path) -> None:
    url = f"file://{elsewhere}/run"
    open_writer(url).save(marked(7, 70))
    shutil.rmtree(elsewhere / "run")  # somebody starts anew under the same name
    assert newest(url) is None
    open_writer(url)
    assert not list(Path("runs").rglob("step-*"))
    assert not list(Path("runs").rglob("last"))


def test_a_store_that_does_not_answer_is_not_an_empty_one(elsewhere: Path) -> None:
    url = faulty_url(elsewhere)
    after_one(url)
    Faulty.error = ConnectionError
    for number in (1, 2):
        Faulty.fail(at=number)
        with pytest.raises(OSError, match=r"cannot \w+ .*\(ConnectionError: \w+ fails\)"):
            train(url, 2, resume="auto")
    Faulty.fail(at=1)
    with pytest.raises(ValueError, match=r"faulty://.* cannot be written \(ConnectionError: "):
        open_writer(url)


# --- urls ----------------------------------------------------------------------------------------


def test_what_is_a_url(elsewhere: Path) -> None:
    assert all(map(is_url, ("s3://bucket/run", "file:///tmp", "abfs://c@a/run")))
    assert not any(map(is_url, ("runs/1", "/a:/b", "C:\\run", Path("s3://b"), None)))
    runs = elsewhere / "runs"
    assert local_folder("s3://bucket/run/") == runs / "s3/bucket/run"
    assert local_folder("file:///tmp/../run") == runs / "file/tmp/run"
    assert local_folder("sftp://me:secret@host/run") == runs / "sftp/host/run"


def test_a_protocol_without_its_package_is_refused(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = {"class": "absent_package.System", "err": "Install absent_package to access it"}
    monkeypatch.setitem(known_implementations, "absent", absent)
    with pytest.raises(ValueError, match=r"absent://b/run needs .* Install absent_package"):
        train("absent://b/run", 1)
    with pytest.raises(ValueError, match=r"strange://b.*: fsspec knows no strange://; give a path"):
        load_weights(Regression(), "strange://b/run")
    assert list(elsewhere.iterdir()) == []
