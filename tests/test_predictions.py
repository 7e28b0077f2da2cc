"""Predictions, joined in memory and from files."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import TensorDataset

from trainer import TaskModule, Trainer, load_predictions
from trainer.launching import attempt
from trainer.predictions import INDEX, join


class Pair(NamedTuple):
    left: object
    right: object


@pytest.mark.parametrize(
    ("parts", "sizes", "expected"),
    [
        ([], [], []),
        ([None, None], [2, 1], None),
        ([["a", "b"], ["c"]], [2, 1], ["a", "b", "c"]),
        ([(["a"], None), (["b"], None)], [1, 1], (["a", "b"], None)),
        (
            [Pair(["a"], {"x": [1]}), Pair(["b"], {"x": [2]})],
            [1, 1],
            Pair(["a", "b"], {"x": [1, 2]}),
        ),
    ],
)
def test_outputs_are_joined_by_their_kind(parts, sizes, expected):
    found = join(parts, sizes)
    assert found == expected
    assert type(found) is type(expected)


def test_a_list_has_one_entry_per_sample_even_if_these_have_as_many():
    assert join([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], [2, 2]) == [[1, 2], [3, 4], [5, 6], [7, 8]]
    with pytest.raises(ValueError, match="predict returned a list for a batch of 3 samples"):
        join([[torch.ones(3), torch.ones(3)]] * 2, [3, 3])


def test_tensors_are_joined_by_sample():
    assert join([torch.ones(2, 3), torch.zeros(1, 3)], [2, 1]).shape == (3, 3)


@pytest.mark.parametrize(
    "parts", [[torch.ones(2), torch.ones(2)], [["a", "b"], ["c", "d"]], [1, 2]]
)
def test_outputs_of_another_length_are_refused(parts):
    with pytest.raises(ValueError, match="for a batch of 2 samples; it must return tensors whose"):
        join(parts, [2, 1])


class Named(TaskModule):
    def predict(self, batch: Any) -> Any:
        return {"value": batch[0] * 2, "name": [f"n{int(value)}" for value in batch[0]]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Predictions for eleven samples, in files of four."""
    trainer = Trainer(accelerator="cpu", eval_batch_size=4)
    found = trainer.predict(
        Named(), predict=TensorDataset(torch.arange(11)), output_dir=tmp_path / "new"
    )
    assert found == tmp_path / "new"
    return tmp_path / "new"


def test_files_are_read_back_as_if_they_had_been_returned(folder: Path) -> None:
    assert len(list(folder.glob("predictions-*.pt"))) == 3
    found = load_predictions(folder)
    assert found["value"].tolist() == list(range(0, 22, 2))
    assert found["name"] == [f"n{i}" for i in range(11)]


def test_no_prediction_is_one_too(tmp_path: Path) -> None:
    empty = TensorDataset(torch.arange(0))
    Trainer(accelerator="cpu").predict(Named(), predict=empty, output_dir=tmp_path)
    assert load_predictions(tmp_path) == []
    with pytest.raises(ValueError, match="holds predictions already"):
        Trainer(accelerator="cpu").predict(Named(), predict=empty, output_dir=tmp_path)


def test_what_is_not_whole_is_refused(folder: Path) -> None:
    part = folder / "predictions-000000000004.pt"
    content = part.read_bytes()
    part.write_bytes(content[:100])
    with pytest.raises(ValueError, match=f"{part.name} cannot be read"):
        load_predictions(folder)
    part.unlink()
    with pytest.raises(ValueError, match=f"lacks 1 of 3 files, first {part.name}"):
        load_predictions(folder)
    for text in ("[]", '{"parts": 3}', '{"parts": [1]}', '{"parts": [["a", 1]]}'):
        (folder / INDEX).write_text(text)
        with pytest.raises(ValueError, match=f"{INDEX} is damaged"):
            load_predictions(folder)
    with pytest.raises(ValueError, match=f"has no {INDEX}"):
        load_predictions(folder / INDEX)
    (folder / INDEX).unlink()
    with pytest.raises(ValueError, match=f"has no {INDEX}, which is written once all"):
        load_predictions(folder)


def test_what_could_not_be_joined_is_not_written(tmp_path: Path) -> None:
    class Whole(TaskModule):
        def predict(self, batch: Any) -> Any:
            return batch[0].sum()

    with pytest.raises(ValueError, match="for a batch of 3 samples; it must return tensors whose"):
        Trainer(accelerator="cpu").predict(
            Whole(), predict=TensorDataset(torch.arange(3)), output_dir=tmp_path
        )


def predict(task: TaskModule, folder: Path, batch_size: int = 2) -> None:
    trainer = Trainer(accelerator="cpu", eval_batch_size=batch_size)
    trainer.predict(task, predict=TensorDataset(torch.arange(4)), output_dir=folder)


def test_what_could_not_be_read_again_is_refused_at_once(tmp_path: Path) -> None:
    class Arrays(TaskModule):
        def predict(self, batch: Any) -> Any:
            return list(batch[0].numpy())

    with pytest.raises(ValueError, match=r"not read from a file again \(numpy.*from_numpy"):
        predict(Arrays(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_samples_of_several_shapes_are_told_of(tmp_path: Path) -> None:
    class Growing(TaskModule):
        def predict(self, batch: Any) -> Any:
            return torch.zeros(2, int(batch[0][0]) + 1)

    predict(Growing(), tmp_path)
    with pytest.raises(ValueError, match=r"shapes \(1,\) and \(3,\).*one entry per sample"):
        load_predictions(tmp_path)


def test_only_what_was_predicted_is_written(tmp_path: Path) -> None:
    class Last(TaskModule):
        def predict(self, batch: Any) -> Any:
            return torch.zeros(len(batch[0]), 100_000)[:, -1]

    predict(Last(), tmp_path)
    assert max(file.stat().st_size for file in tmp_path.iterdir()) < 10_000
    assert load_predictions(tmp_path).shape == (4,)


def test_a_full_disk_is_told_of_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left .*predictions-000000000000\.pt"):
        predict(Named(), tmp_path)


def test_a_restart_writes_its_files_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predict(Named(), tmp_path)
    (tmp_path / "predictions-000000000002.pt").write_bytes(b"of a rank that was killed")
    with pytest.raises(ValueError, match="holds predictions already"):
        predict(Named(), tmp_path)
    monkeypatch.setattr(attempt, "_entered", attempt.Attempt("launch", number=1))
    predict(Named(), tmp_path)
    assert load_predictions(tmp_path)["value"].tolist() == [0, 2, 4, 6]
