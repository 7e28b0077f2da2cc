"""Files that are hashed while they are written, and errors by their true name."""

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.checkpoint import files
from trainer.checkpoint.files import fsync_folder, make_folder, replace_file, sha256, write_file


@pytest.mark.parametrize("most", [None, 7])
def test_hash_and_size_are_those_of_the_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int | None
) -> None:
    content = os.urandom(3_000_001)
    if most is not None:  # a system that takes a little at a time
        content, write = content[:1000], os.write
        monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:most]))

    def write_parts(file: Any) -> None:
        for start, end in [(0, 10), (10, 2_000_000), (2_000_000, 3_000_001)]:
            file.write(content[start:end])

    found = write_file(tmp_path / "a", write_parts)
    assert (tmp_path / "a").read_bytes() == content
    assert found == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert sha256(tmp_path / "a") == found["sha256"]
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "a", write_parts)


@pytest.mark.parametrize("after", [0, 1])
def test_torch_save_on_a_full_disk_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    write, calls = os.write, 0

    def full(descriptor: int, data: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    state = {"a": torch.zeros(500_000), "b": torch.zeros(900_000)}
    with pytest.raises(OSError, match=r"No space left on device: .*state\.pt") as caught:
        write_file(tmp_path / "state.pt", lambda file: torch.save(state, file))
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.__cause__ is None


def test_an_error_of_the_caller_is_its_own(tmp_path: Path) -> None:
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(AttributeError, match="lambda"):  # it cannot be pickled
        write_file(tmp_path / "a", lambda file: torch.save(lambda: 0, file))
    assert len(os.listdir("/proc/self/fd")) == opened


def test_folders_above_are_brought_to_the_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    monkeypatch.setattr(files, "fsync_folder", synced.append)
    make_folder(tmp_path / "a" / "b")
    assert set(synced) == {tmp_path, tmp_path / "a"}
    synced.clear()
    make_folder(tmp_path / "a" / "b")
    assert synced == []


def test_a_file_system_without_fsync_of_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(number: int) -> Any:
        def fsync(descriptor: int) -> None:
            raise OSError(number, os.strerror(number))

        return fsync

    monkeypatch.setattr(os, "fsync", refusing(errno.EINVAL))
    fsync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", refusing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        fsync_folder(tmp_path)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    replace_file(path, lambda file: file.write(b"old"))
    (tmp_path / ".report.html.part").write_bytes(b"of a write that was killed")

    def full(file: Any) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device: '.*/report\.html'"):
        replace_file(path, full)
    assert path.read_bytes() == b"old"
    replace_file(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match=f"Is a directory: '{tmp_path}'"):
        replace_file(tmp_path, lambda file: file.write(b"new"))
