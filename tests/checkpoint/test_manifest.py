"""Which checkpoint is meant, and whether it is whole."""

import errno
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import damage, snapshot, write

from trainer.checkpoint import manifest
from trainer.checkpoint.finding import newest_valid, store_of
from trainer.checkpoint.manifest import (
    find,
    manifest_text,
    read_manifest,
    refuse_damaged,
    step_folders,
    verify,
)
from trainer.checkpoint.writer import read_state


def test_every_damage_is_detected(tmp_path: Path) -> None:
    write(tmp_path, snapshot(1, 0.5))
    path = tmp_path / "step-00000001"
    originals = {p: p.read_bytes() for p in path.iterdir()}
    rng = random.Random(0)
    for file, original in originals.items():
        for how in ("flip", "cut", "zero", "add"):
            for _ in range(12):
                damage(file, how, rng)
                with pytest.raises(ValueError, match=r"damaged|no checkpoint|missing"):
                    verify(path)
                file.write_bytes(original)
        file.unlink()
        with pytest.raises(ValueError, match=r"missing|no checkpoint"):
            verify(path)
        file.write_bytes(original)
    # Bits all over the manifest, which nothing else vouches for.
    file = path / "manifest.json"
    for index in range(0, len(originals[file]) * 8, 11):
        content = bytearray(originals[file])
        content[index // 8] ^= 1 << index % 8
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"damaged|version"):
            verify(path)
    file.write_bytes(originals[file])
    verify(path)


def test_newest_valid_falls_back_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert newest_valid(store_of(tmp_path)) is None
    folder = tmp_path / "checkpoints"
    write(folder, snapshot(9), snapshot(10), snapshot(100))
    assert newest_valid(store_of(tmp_path)) == folder / "step-00000100"
    assert capsys.readouterr().err == ""
    damage(folder / "step-00000100" / "state.pt", "flip", random.Random(0))
    (folder / "step-00000010" / "manifest.json").unlink()
    assert newest_valid(store_of(tmp_path)) == folder / "step-00000009"
    first, second = capsys.readouterr().err.splitlines()
    assert "NOT using" in first
    assert "step-00000100/state.pt is damaged" in first
    assert "step-00000010" in second
    assert "manifest.json" in second
    with pytest.raises(ValueError, match=r"state\.pt is damaged"):
        read_state(folder / "step-00000100")


def test_a_damaged_one_that_is_asked_for_is_refused_and_the_next_best_is_named(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoints"
    write(folder, snapshot(1), snapshot(2), snapshot(3))
    refuse_damaged(folder / "step-00000003")
    for step in (3, 2):
        damage(folder / f"step-0000000{step}" / "model.safetensors", "flip", random.Random(0))
    words = r"step-00000003/model.safetensors is damaged.*is .*step-00000001: give that, or resume="
    with pytest.raises(ValueError, match=words):
        refuse_damaged(folder / "step-00000003")
    (folder / "step-00000001" / "config.yaml").unlink()
    with pytest.raises(ValueError, match="there is no valid one beside it"):
        refuse_damaged(folder / "step-00000002")


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_what_cannot_be_read_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    folder = tmp_path / "checkpoints"
    write(folder, snapshot(1), snapshot(2))
    error = OSError(number, os.strerror(number))

    def failing(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapped(path: Path, *args: Any, **kwargs: Any) -> Any:
            if path.name == name and path.parent.name == "step-00000002":
                raise error
            return function(path, *args, **kwargs)

        return wrapped

    for owner, function, name in [
        (manifest, "sha256", "state.pt"),
        (Path, "stat", "config.yaml"),
        (Path, "is_file", "manifest.json"),
        (Path, "read_bytes", "manifest.json"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(owner, function, failing(getattr(owner, function), name))
            with pytest.raises(ValueError, match=f"{name} cannot be read: {error.strerror}"):
                verify(folder / "step-00000002")
            assert newest_valid(store_of(tmp_path)) == folder / "step-00000001"
            assert find(tmp_path, "last") == folder / "step-00000002"  # whoever reads it says more


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    assert step_folders(tmp_path / "none") == []
    monkeypatch.setattr(os, "listdir", refused)
    with pytest.raises(PermissionError):
        newest_valid(store_of(tmp_path))


@pytest.mark.parametrize(
    "facts",
    [
        {"files": {"../x": {"size": 0, "sha256": ""}}},
        {"files": {"model.safetensors": {"size": 0, "sha256": ""}}},
        {"files": ["state.pt"]},
        {"files": None},
        {"step": "1"},
        {"metric": float("nan")},
        {"metric": "0.5"},
        {"world_size": None},
        {"monitor": ["val/loss"]},
    ],
)
def test_a_manifest_that_somebody_made(tmp_path: Path, facts: dict[str, Any]) -> None:
    write(tmp_path, snapshot(1, 0.5))
    path = tmp_path / "step-00000001"
    (path / "manifest.json").write_text(manifest_text({**read_manifest(path), **facts}))
    with pytest.raises(ValueError, match=r"manifest\.json does not describe a checkpoint"):
        verify(path)


@pytest.mark.parametrize("text", ["", "[]", "1", '"x"', "null", "{}", "[" * 100_000, "\xff"])
def test_a_manifest_of_nonsense(tmp_path: Path, text: str) -> None:
    write(tmp_path, snapshot(1))
    path = tmp_path / "step-00000001"
    (path / "manifest.json").write_bytes(text.encode("latin1"))
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        verify(path)


def test_another_format_version(tmp_path: Path) -> None:
    write(tmp_path, snapshot(1))
    file = tmp_path / "step-00000001" / "manifest.json"
    facts = json.loads(file.read_text())
    del facts["sha256"]
    facts["format_version"] = 99
    file.write_text(manifest_text(facts))
    with pytest.raises(ValueError, match="format version 99, this trainer reads 3"):
        verify(file.parent)


def test_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoints"
    with pytest.raises(ValueError, match="holds none"):
        find(tmp_path, "last")
    write(folder, snapshot(1, 0.1), snapshot(2, 0.5))
    first, second = folder / "step-00000001", folder / "step-00000002"
    assert find(tmp_path, "best") == first
    assert find(tmp_path, "last") == second
    assert find(tmp_path, "step-00000001") == first
    assert find(tmp_path, "checkpoints/best") == first
    assert find(tmp_path / "elsewhere", first) == first
    assert find(tmp_path, second / "model.safetensors") == second / "model.safetensors"
    for run in (tmp_path, folder):  # the folder of a run stands for its best
        assert find(tmp_path / "elsewhere", run) == first
        assert find(tmp_path / "elsewhere", str(run), of_run="last") == second
    monkeypatch.chdir(folder)
    assert find(tmp_path / "elsewhere", "step-00000002") == second
    with pytest.raises(ValueError, match=r"step-3 is no checkpoint.*step-00000001, step-00000002"):
        find(tmp_path, "step-3")
    with pytest.raises(ValueError, match=r"no checkpoint 'best' in .*elsewhere"):
        find(tmp_path / "elsewhere", "best")
