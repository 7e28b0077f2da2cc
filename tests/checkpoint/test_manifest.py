"""Which checkpoint is meant, and whether it is whole."""

import json
import random
from pathlib import Path

import pytest
from checkpoints import damage, snapshot, write

from trainer.checkpoint.manifest import find, manifest_text, newest_valid, verify
from trainer.checkpoint.writer import read_state


def test_every_damage_is_detected(tmp_path: Path) -> None:
    write(tmp_path, snapshot(1, 0.5))
    path = tmp_path / "step-00000001"
    originals = {p: p.read_bytes() for p in path.iterdir()}
    rng = random.Random(0)
    for file, original in originals.items():
        for how in ("flip", "cut", "zero"):
            for _ in range(25):
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
    assert newest_valid(tmp_path) is None
    folder = tmp_path / "checkpoints"
    write(folder, snapshot(9), snapshot(10), snapshot(100))
    assert newest_valid(tmp_path) == folder / "step-00000100"
    assert capsys.readouterr().err == ""
    damage(folder / "step-00000100" / "state.pt", "flip", random.Random(0))
    (folder / "step-00000010" / "manifest.json").unlink()
    assert newest_valid(tmp_path) == folder / "step-00000009"
    first, second = capsys.readouterr().err.splitlines()
    assert "NOT using" in first
    assert "step-00000100/state.pt is damaged" in first
    assert "step-00000010" in second
    assert "manifest.json" in second
    with pytest.raises(ValueError, match=r"state\.pt is damaged"):
        read_state(folder / "step-00000100")


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
