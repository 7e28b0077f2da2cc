"""Programs that compute what a task computes, in files."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from recipes.language_model import ByteTransformer, PythonTopics
from recipes.mnist import MnistTask
from trainer import DataModule, TaskModule, Trainer
from trainer.export import example_batches, export, main


class Batch(NamedTuple):
    text: Tensor
    mask: Tensor
    scale: float = 1.0


class Nested(TaskModule):
    """Takes a dict of all kinds of things, and returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout())

    def forward(self, batch: Any) -> Any:
        x, (first, _) = batch["x"], batch["pair"]
        hidden = self.net(x) + first.unsqueeze(1)
        return {"x": hidden, "more": [hidden.argmax(1), hidden.sum(1) > 0]}


def nested(size: int) -> Any:
    pair = (torch.arange(size) / 8, torch.zeros(size))
    return {"x": torch.randn(size, 3), "pair": pair, "class": "a"}


def run(path: Path, *tensors: Tensor) -> Any:
    return torch.export.load(path).module()(*tensors)


def test_a_program_takes_what_it_needs_and_computes_the_same_for_any_size(tmp_path: Path) -> None:
    task = Nested().train()
    report = export(task, tmp_path / "a.pt2", nested(5), nested(2))
    assert report.inputs == {"x": "float32 (batch, 3)", "pair_0": "float32 (batch)"}
    assert report.outputs == {
        "output_x": "float32 (batch, 2)",
        "more_0": "int64 (batch)",
        "more_1": "bool (batch)",
    }
    assert (report.unused, report.fixed) == (["pair_1"], {"class_": "a"})
    assert report.differences == {5: 0.0, 2: 0.0}
    assert task.training  # as it was
    batch = nested(7)
    task.eval()
    for found, own in zip(
        run(tmp_path / "a.pt2", batch["x"], batch["pair"][0]).values(),
        task(batch).values(),
        strict=True,
    ):
        torch.testing.assert_close(found, own)


def test_a_tensor_twice_texts_and_a_key_that_python_knows(tmp_path: Path) -> None:
    class Twice(TaskModule):
        def predict(self, batch: Any) -> Any:
            return batch["self"] + batch["other"] * len(batch["names"][0])

    x = torch.randn(4, 3)
    batch = {"self": x, "other": x, "names": ["ab", "cd", "ef", "gh"]}
    report = export(Twice(), tmp_path / "m.pt2", batch)
    program = torch.export.load(report.path).module()
    found = program(torch.ones(2, 3), torch.full((2, 3), 5.0))
    torch.testing.assert_close(found, torch.full((2, 3), 11.0))
    assert list(report.fixed) == ["names"]
    with pytest.raises(ValueError, match=r"export needs a batch"):
        export(Twice(), tmp_path / "none.pt2")


def test_of_a_single_batch_parts_are_compared_too(tmp_path: Path) -> None:
    report = export(Nested(), tmp_path / "a.pt2", nested(5), method="forward")
    assert list(report.differences) == [5, 3, 1]
    assert report.what == "Nested.forward"


class Ragged(TaskModule):
    def forward(self, batch: Batch) -> Tensor:
        return (batch.text * batch.mask).cumsum(1)[:, 1:] * batch.scale


def ragged(size: int, length: int, scale: float = 1.0) -> Batch:
    return Batch(torch.ones(size, length), torch.ones(size, length), scale)


def test_other_dimensions_are_free_where_batches_differ_or_the_user_says_so(tmp_path: Path) -> None:
    kinds = {"text": "float32 (batch, text_1)", "mask": "float32 (batch, mask_1)"}
    report = export(Ragged(), tmp_path / "a.pt2", ragged(4, 6), ragged(2, 5))
    assert report.inputs == kinds
    dynamic = {"text": [1], "mask": [1]}
    report = export(Ragged(), tmp_path / "b.pt2", ragged(4, 6), dynamic=dynamic)
    assert report.inputs == kinds
    assert report.outputs == {"output": "float32 (batch, text_1 - 1)"}
    assert run(tmp_path / "b.pt2", torch.ones(3, 9), torch.ones(3, 9)).shape == (3, 8)


def test_the_recipes_as_onnx(tmp_path: Path) -> None:
    import onnxruntime

    torch.manual_seed(0)
    images = torch.randint(0, 256, (4, 28, 28), dtype=torch.uint8)
    task = MnistTask()
    report = export(task, tmp_path / "mnist.onnx", (images, torch.zeros(4)), method="forward")
    assert report.checked_by.startswith("onnxruntime ")
    session = onnxruntime.InferenceSession(tmp_path / "mnist.onnx")
    assert [(each.name, each.shape) for each in session.get_inputs()] == [
        ("input_0", ["batch", 28, 28])
    ]
    (found,) = session.run(["output"], {"input_0": images[:2].numpy()})
    with torch.no_grad():
        own = task.eval()((images[:2], None))
    torch.testing.assert_close(torch.from_numpy(found), own, rtol=1e-4, atol=1e-5)
    assert not list(tmp_path.glob("*.data"))  # one file has it all

    model = ByteTransformer(context=16, width=8, num_layers=1, num_heads=2)
    batches = example_batches(model, PythonTopics(context=16))
    assert [model.batch_size(batch) for batch in batches] == [4, 3, 1]
    report = export(model, tmp_path / "text.onnx", *batches, dynamic={"text": [1]})
    assert report.outputs == {"output": "float32 (batch, text_1 - 1, 256)"}
    assert max(report.differences.values()) < 1e-5
    session = onnxruntime.InferenceSession(tmp_path / "text.onnx")
    (found,) = session.run(None, {"text": batches[0].text[:2, :8].numpy()})
    assert found.shape == (2, 7, 256)


class Refused(TaskModule):
    """Does what cannot be exported, one of many things."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, batch: Any) -> Any:
        x = batch[0]
        match self.kind:
            case "branch":
                return x if x.sum() > 0 else -x
            case "size":
                return x * 2 if len(x) > 3 else x
            case "torch":
                return x + torch.rand_like(x)
            case "python":
                return x + random.random()
            case "kind":
                return {"a": x, "b": "text"}
            case "constant":
                return torch.ones(3)
            case "number":
                return x * batch[1]
            case "numpy":
                return torch.from_numpy(x.numpy())
        raise AssertionError


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("branch", r"a branch, .* depends on values in the batch .*x.sum\(\) > 0"),
        ("size", r"specialized it to be a constant \(4\)"),
        ("torch", "draws random numbers"),
        ("python", "draws random numbers"),
        ("kind", r"returns a str \(b\); a program returns tensors"),
        ("constant", "returns the same for every batch"),
        ("number", r"returns another output than Refused.predict for 2 samples: off by 1e\+00"),
        ("numpy", "numpy"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_the_reason(
    kind: str, match: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.pt2"
    with pytest.raises(ValueError, match=match) as caught:
        export(Refused(kind), path, (torch.ones(4, 3), 4), (torch.ones(2, 3), 2))
    assert len(str(caught.value).splitlines()) == 1
    assert not path.exists()


class HasNoOnnx(TaskModule):
    def forward(self, batch: Tensor) -> Tensor:
        return torch.linalg.svdvals(batch)


class Bfloat16(TaskModule):
    def forward(self, batch: Tensor) -> Tensor:
        return batch.bfloat16()


@pytest.mark.parametrize(
    ("task", "match"),
    [
        (HasNoOnnx(), r"cannot translate .*: No ONNX function found .* \(at torch.ops.aten._linal"),
        (Bfloat16(), r"output is bfloat16, which NumPy .* do not know; let the task .* \(.float"),
    ],
)
def test_what_onnx_cannot_do_is_told_with_its_reason(
    task: TaskModule, match: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=match):
        export(task, tmp_path / "a.onnx", torch.ones(4, 3))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "batch", "options", "match"),
    [
        ("a.txt", nested(4), {}, "must end in .onnx or .pt2"),
        ("there.pt2", nested(4), {}, "is there already"),
        ("none/a.pt2", nested(4), {}, "there is no folder"),
        ("a.pt2", nested(1), {}, "at least two samples"),
        ("a.pt2", nested(4), {"method": "loss"}, "method=loss is not allowed"),
        (
            "a.pt2",
            nested(4),
            {"dynamic": {"y": [1]}},
            "there is no tensor y in the batch; .* x, pa",
        ),
        ("a.pt2", nested(4), {"dynamic": {"x": [2]}}, "x has 2 dimensions"),
        ("a.pt2", {**nested(4), "what": object()}, {}, r"holds a object \(what\)"),
    ],
)
def test_mistakes(name: str, batch: Any, options: Any, match: str, tmp_path: Path) -> None:
    (tmp_path / "there.pt2").touch()
    with pytest.raises(ValueError, match=match):
        export(Nested(), tmp_path / name, batch, **options)


def test_only_a_task_on_the_cpu_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Linear is no trainer.TaskModule"):
        export(nn.Linear(3, 2), tmp_path / "a.pt2", torch.ones(4, 3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the task is on meta; export works on the CPU"):
        export(Nested().to("meta"), tmp_path / "a.pt2", nested(4))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from torch.arange(20.0)


class Data(DataModule):
    def __init__(self, **given: Any) -> None:
        self.given = given

    def train_dataset(self) -> Any:
        return self.given.get("train")

    def val_dataset(self) -> Any:
        return self.given.get("val")

    def predict_dataset(self) -> Any:
        return self.given.get("predict")


@pytest.mark.parametrize(
    "given",
    [
        {"predict": TensorDataset(torch.arange(20.0)), "train": Stream()},
        {"val": {"a": DataLoader(TensorDataset(torch.arange(20.0)), batch_size=7)}},
        {"train": Stream()},
    ],
)
def test_examples_come_from_the_data(given: Any) -> None:
    batches = example_batches(Nested(), Data(**given))
    found = [(batch[0] if isinstance(batch, list) else batch).tolist() for batch in batches]
    assert found == [[0, 1, 2, 3], [0, 1, 2], [0]]


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    quiet: Any = {"callbacks": False, "logger": False, "accelerator": "cpu", "max_steps": 1}
    trainer = Trainer(run_dir=str(tmp_path / "run"), **quiet)
    data = {"_target_": "recipes.language_model.PythonTopics", "context": 8}
    sizes = {"context": 8, "width": 4, "num_layers": 1, "num_heads": 1}
    node = {"_target_": "recipes.language_model.ByteTransformer", **sizes}
    trainer.run_config = {**trainer.run_config, "task": node, "data": data}
    task = ByteTransformer(**sizes)
    checkpoint = trainer.fit(task, PythonTopics(8)).last_checkpoint
    main([str(checkpoint), str(tmp_path / "a.pt2"), "--dynamic", "text:1"])
    out = capsys.readouterr().out
    assert "input    text: int64 (batch, text_1)" in out
    assert "batches of 4, 3, 1 samples: equal" in out
    batch = tmp_path / "batch.pt"
    torch.save({"text": torch.zeros(2, 9, dtype=torch.int64)}, batch)
    for arguments, match in (
        ([str(checkpoint), str(tmp_path / "a.pt2")], "error: .* is there already"),
        ([str(tmp_path), str(tmp_path / "b.pt2")], "error: .* is no checkpoint"),
        ([str(checkpoint), str(tmp_path / "b.pt2"), "--dynamic", "text"], "error: --dynamic text"),
        (
            [str(checkpoint), str(tmp_path / "b.pt2"), "--batch", str(batch)],
            "error: .* fails on the batch: Attr",
        ),
    ):
        with pytest.raises(SystemExit, match=match):
            main(arguments)
