"""Weights in a file, and back in a module."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import reseal, snapshot, write
from safetensors.torch import load_file, save_file
from torch import nn

from trainer.checkpoint import manifest
from trainer.checkpoint.manifest import read_manifest, verify
from trainer.checkpoint.store import LocalStore
from trainer.checkpoint.weights import load_task, load_weights, read_weights, write_weights
from trainer.checkpoint.writer import read_state


class Odd(nn.Module):
    """Every kind of tensor that safetensors or a plain copy would trip over."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(3, 2).t())
        self.bf16 = nn.Parameter(torch.randn(2).bfloat16())
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("nothing_either", torch.zeros(0))
        self.register_buffer("part", torch.arange(1000.0)[3:5])
        self.register_buffer("overlapping_part", self.part[:1])
        self.note: dict[str, Any] = {}

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def test_odd_weights_round_trip(tmp_path: Path) -> None:
    source, target = Odd(), Odd()
    source.note = {"scale": 0.5, "amax": torch.ones(2)}
    write(tmp_path, snapshot(1, weights=source.state_dict()))
    path = tmp_path / "step-00000001"
    stored = load_file(path / "model.safetensors")
    assert "embedding.weight" in stored
    assert "head.weight" not in stored
    assert (path / "model.safetensors").stat().st_size < 8000  # no view drags its storage along
    assert not any(load_weights(target, path))
    for name, value in source.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, target.state_dict()[name]), name
            assert value.dtype == target.state_dict()[name].dtype
    assert target.note["scale"] == 0.5
    assert target.note["amax"].tolist() == [1.0, 1.0]
    assert target.head.weight is target.embedding.weight
    assert target.conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_the_same_weights_are_the_same_bytes(tmp_path: Path) -> None:
    tied = torch.ones(2)
    weights = {"é": torch.zeros(3), "tied": tied, "again": tied, "plain": {"n": 1}}
    for number in range(8):
        with (tmp_path / str(number)).open("wb") as file:
            write_weights(file, weights)
    assert len({(tmp_path / str(number)).read_bytes() for number in range(8)}) == 1
    assert load_file(tmp_path / "0")["é"].tolist() == [0, 0, 0]


def test_every_type_of_tensor(tmp_path: Path) -> None:
    types = {v for v in vars(torch).values() if isinstance(v, torch.dtype)} - {torch.complex32}
    weights = {}
    for dtype in types:
        try:
            weights[str(dtype)] = torch.arange(3).to(dtype)
        except (RuntimeError, NotImplementedError):  # quantized, or packed below a byte
            continue
    assert {"torch.bool", "torch.uint64", "torch.complex128"} < weights.keys()
    write(tmp_path, snapshot(1, weights=weights))
    stored = read_weights(tmp_path / "step-00000001")
    for name, value in weights.items():
        assert stored[name].dtype == value.dtype
        assert stored[name].view(torch.uint8).tolist() == value.view(torch.uint8).tolist(), name


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def test_a_hostile_pickle_is_refused(tmp_path: Path) -> None:
    owned, path = tmp_path / "owned", tmp_path / "step-00000001"
    write(tmp_path, snapshot(1))
    torch.save({"optimizer": Hostile(owned)}, path / "state.pt")
    reseal(path)
    verify(path)
    words = r"state\.pt cannot be read as tensors and plain values"
    with pytest.raises(ValueError, match=words):
        read_state(path)
    for content in (pickle.dumps(Hostile(owned)), b"", b"\x80\x04N", b"cos\nmkdir\n.", b"(" * 99):
        (path / "state.pt").write_bytes(content)
        reseal(path)
        with pytest.raises(ValueError, match=words):
            read_state(path)
    assert not owned.exists()


def test_a_hostile_extra_state_is_refused(tmp_path: Path) -> None:
    owned, path = tmp_path / "owned", tmp_path / "step-00000001"
    write(tmp_path, snapshot(1, weights=Odd().state_dict()))
    buffer = io.BytesIO()
    torch.save(Hostile(owned), buffer)
    payload = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    weights = {"_extra_state": payload}
    save_file(weights, path / "model.safetensors", {"extra_state": '["_extra_state"]'})
    reseal(path)
    with pytest.raises(ValueError, match=r"_extra_state in .*model\.safetensors cannot be read as"):
        load_weights(Odd(), path)
    assert not owned.exists()


@pytest.mark.parametrize(
    "metadata",
    [
        {"extra_state": '["none"]'},
        {"extra_state": "nonsense"},
        {"extra_state": "1"},
        {"extra_state": '["half"]'},
        {"tied": '{"x": "none"}'},
        {"tied": '["x"]'},
        {"tied": "[" * 100_000},
    ],
)
def test_metadata_that_somebody_made(tmp_path: Path, metadata: dict[str, str]) -> None:
    weights = {"weight": torch.ones(1, 1), "half": torch.ones(1).bfloat16()}
    save_file(weights, tmp_path / "any.safetensors", metadata)
    with pytest.raises(ValueError, match=r"any\.safetensors has metadata that it cannot have"):
        load_weights(nn.Linear(1, 1), tmp_path / "any.safetensors")


def test_overlapping_weights_are_stored_as_their_values(tmp_path: Path) -> None:
    weights = {"expanded": torch.ones(1).expand(4), "sum": torch.ones(2, 1).expand(2, 3)}
    write(tmp_path, snapshot(1, weights=weights))
    stored = load_file(tmp_path / "step-00000001" / "model.safetensors")
    assert all(torch.equal(stored[name], weights[name]) for name in weights)


def test_tied_weights_load_into_an_untied_module_and_back(tmp_path: Path) -> None:
    write(tmp_path, snapshot(1, weights=Odd().state_dict()))
    untied = Odd()
    untied.head.weight = nn.Parameter(torch.zeros(5, 4))
    load_weights(untied, tmp_path / "step-00000001")
    assert torch.equal(untied.head.weight, untied.embedding.weight)

    # Another tool's file, which keeps the other of the two names.
    tied = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    tied["b"].weight = tied["a"].weight
    save_file({"b.weight": torch.full((2, 2), 3.0)}, tmp_path / "other.safetensors")
    assert not any(load_weights(tied, tmp_path / "other.safetensors"))
    assert tied["a"].weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_load_weights_names_what_differs(tmp_path: Path) -> None:
    source = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    target = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5, bias=False), nn.Linear(1, 1))
    write(tmp_path, snapshot(1, weights=source.state_dict()))
    path = tmp_path / "step-00000001"
    with pytest.raises(ValueError, match="do not fit Sequential") as caught:
        load_weights(target, path)
    text = str(caught.value)
    assert "missing in the file: 2.bias, 2.weight" in text
    assert "unknown to the module: 1.bias" in text
    assert "1.weight (2, 4) instead of (5, 4)" in text
    differences = load_weights(target, path, strict=False)
    assert differences == (["2.bias", "2.weight"], ["1.bias"], ["1.weight"])
    assert torch.equal(target[0].weight, source[0].weight)
    with pytest.raises(ValueError, match="has no weight that fits Conv2d"):
        load_weights(nn.Conv2d(1, 1, 1), path, strict=False)


def test_load_weights_from_files(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(1, 1), "bias": torch.ones(1)}, tmp_path / "any.safetensors")
    module = nn.Linear(1, 1)
    load_weights(module, str(tmp_path / "any.safetensors"))
    assert module(torch.ones(1, 1)).item() == 2.0
    (tmp_path / "any.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="damaged, or no safetensors file"):
        load_weights(module, tmp_path / "any.safetensors")
    with pytest.raises(ValueError, match="there is no file"):
        load_weights(module, tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="there is no such folder"):
        load_weights(module, tmp_path / "none")
    with pytest.raises(ValueError, match=r"it has no manifest\.json"):
        load_weights(module, tmp_path)


def test_a_link_that_a_run_sets_anew_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = snapshot(1)
    write(tmp_path, first, snapshot(2))
    store = LocalStore(tmp_path)
    store.link("last", "step-00000001")

    def read(path: Path) -> dict[str, Any]:
        facts = read_manifest(path)
        store.link("last", "step-00000002")
        return facts

    monkeypatch.setattr(manifest, "read_manifest", read)
    module = nn.Linear(3, 2)
    load_weights(module, tmp_path / "last")
    assert torch.equal(module.weight, first.weights["weight"])


def test_load_task(tmp_path: Path) -> None:
    source = nn.Linear(3, 2)
    config = {"task": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 2}}
    write(tmp_path, snapshot(1, weights=source.state_dict(), config=config))
    task: Any = load_task(tmp_path / "step-00000001")
    assert torch.equal(task.weight, source.weight)
    with pytest.raises(ValueError, match=r"weight \(2, 3\) instead of \(2, 5\)"):
        load_task(tmp_path / "step-00000001", in_features=5)
    write(tmp_path, snapshot(2))
    with pytest.raises(ValueError, match=r"has no task\._target_"):
        load_task(tmp_path / "step-00000002")
