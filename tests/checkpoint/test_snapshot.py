"""The copy of the state that is written while the training goes on."""

from pathlib import Path

import pytest
import torch
from checkpoints import open_writer, snapshot
from support import assert_equal_bits

from trainer.checkpoint.snapshot import Staging


def test_a_copy_goes_into_the_memory_of_the_one_before() -> None:
    staging, source = Staging(), torch.arange(6.0)
    first = staging.copy(snapshot(1, weights={"w": source}, state={"m": source * 2}))
    places = {first.weights["w"].data_ptr(), first.state["m"].data_ptr()}
    source += 1
    second = staging.copy(snapshot(2, weights={"w": source}, state={"m": source * 2}))
    assert {second.weights["w"].data_ptr(), second.state["m"].data_ptr()} == places
    assert second.weights["w"].tolist() == source.tolist()
    assert second.state["m"].tolist() == (source * 2).tolist()
    third = staging.copy(snapshot(3, weights={"w": source.double()}, state={"m": source[:2]}))
    assert third.weights["w"].dtype == torch.float64
    assert third.state["m"].tolist() == source[:2].tolist()
    assert not {third.weights["w"].data_ptr(), third.state["m"].data_ptr()} & places


def test_no_two_tensors_share_memory_unless_they_did() -> None:
    one, other = torch.ones(3), torch.ones(3)
    staging = Staging()
    for _ in range(2):
        copy = staging.copy(snapshot(1, weights={"a": one, "tied": one, "b": other}, state={}))
        assert copy.weights["a"] is copy.weights["tied"]
        assert copy.weights["a"].data_ptr() != copy.weights["b"].data_ptr()


def test_layouts_are_kept_in_the_state_and_plain_in_the_weights() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for value in (image, image.transpose(0, 3), torch.randn(3, 1).expand(3, 4), torch.tensor(7)):
        staging = Staging()
        for _ in range(2):
            copy = staging.copy(snapshot(1, weights={"w": value}, state={"m": value.clone()}))
            assert copy.weights["w"].is_contiguous()
            assert copy.state["m"].stride() == value.clone().stride()
            assert_equal_bits([copy.weights["w"], copy.state["m"]], [value, value])


def test_equal_states_are_equal_bytes(tmp_path: Path) -> None:
    """In memory that is new, and in memory that was used."""
    content = []
    for run, steps in (("a", [2]), ("b", [1, 2])):
        writer = open_writer(tmp_path / run)
        for step in steps:
            values = torch.full((1000,), float(step))
            state = {"tied": [values, values], "part": values[:3], "n": step}
            writer.save(snapshot(step, weights={"w": values}, state=state))
        writer.close()
        path = tmp_path / run / "step-00000002"
        content.append([(path / name).read_bytes() for name in ("state.pt", "model.safetensors")])
    assert content[0] == content[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_copy_from_a_gpu_is_in_pinned_memory_and_complete() -> None:
    staging, source = Staging(), torch.arange(1e6, device="cuda")
    for number in range(3):
        copy = staging.copy(snapshot(1, weights={"w": source}, state={"m": source * 2}))
        assert copy.weights["w"].is_pinned()
        assert copy.state["m"].is_pinned()
        assert_equal_bits([copy.weights["w"], copy.state["m"]], [source.cpu(), source.cpu() * 2])
        source += number


def test_what_does_not_change_meanwhile_is_not_copied() -> None:
    whole, image = torch.arange(6.0), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    other = image.clone()
    staging = Staging(training_waits=True)
    weights = {"w": whole, "part": whole[:2], "image": image}
    copy = staging.copy(snapshot(1, weights=weights, state={"m": other, "part": whole[2:]}))
    assert copy.weights["w"].data_ptr() == whole.data_ptr()
    assert copy.state["m"].data_ptr() == other.data_ptr()
    assert copy.weights["image"].is_contiguous()
    assert copy.state["part"].untyped_storage().nbytes() == copy.state["part"].nbytes
    assert_equal_bits(list(copy.weights.values()), list(weights.values()))
