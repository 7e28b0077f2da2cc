"""A module's weights in a file: plain names, readable by any tool, nothing executed on loading."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from trainer.checkpoint.manifest import CONFIG, WEIGHTS, verified
from trainer.instantiate import build_node
from trainer.messages import listed

if TYPE_CHECKING:
    from trainer.task import TaskModule


class Differences(NamedTuple):
    """Names in which a module and a file of weights differ.

    Attributes:
        missing: In the module but not in the file.
        unexpected: In the file but not in the module.
        reshaped: In both, with different shapes.
    """

    missing: list[str]
    unexpected: list[str]
    reshaped: list[str]


def load_weights(
    module: nn.Module, path: str | os.PathLike[str], strict: bool = True
) -> Differences:
    """Load weights into ``module``.

    Args:
        module: Any module; a `TaskModule` or a part of another model.
        path: A checkpoint folder, or a ``.safetensors`` file of any origin.
        strict: Whether names and shapes must agree. If not, what fits is loaded and the rest of
            the module stays as it is.

    Returns:
        What differed; empty if ``strict``.

    Raises:
        ValueError: If the file is missing or damaged; if ``strict`` and anything differs; if
            nothing fits.
    """
    weights = _read_weights(Path(path))
    own = module.state_dict(keep_vars=True)
    _tie(weights, own)
    reshaped = [
        name
        for name in weights.keys() & own.keys()
        if getattr(weights[name], "shape", None) != getattr(own[name], "shape", None)
    ]
    fitting = {name: value for name, value in weights.items() if name not in reshaped}
    if not fitting.keys() & own.keys() and own:
        raise ValueError(
            f"{path} has no weight that fits {type(module).__name__}: it holds "
            f"{listed(weights)}, the module {listed(own)}"
        )
    missing, unexpected = module.load_state_dict(fitting, strict=False)
    differences = Differences(
        sorted(set(missing) - set(reshaped)), sorted(unexpected), sorted(reshaped)
    )
    if strict and any(differences):
        shapes = {
            name: f"{name} {_shape(weights[name])} instead of {_shape(own[name])}"
            for name in reshaped
        }
        parts = [
            ("missing in the file", differences.missing),
            ("unknown to the module", differences.unexpected),
            ("of another shape", [shapes[name] for name in differences.reshaped]),
        ]
        raise ValueError(
            f"the weights in {path} do not fit {type(module).__name__}: "
            + "; ".join(f"{what}: {listed(names)}" for what, names in parts if names)
            + ". Build the module as it was trained, or load what fits beforehand by "
            "load_weights(task, path, strict=False)"
        )
    return differences


def load_task(path: str | os.PathLike[str], **overrides: Any) -> TaskModule:
    """Build the task of a checkpoint from its config, with its weights.

    Args:
        path: A checkpoint folder.
        overrides: Arguments of the task's constructor that replace those in the config.

    Raises:
        ValueError: If the checkpoint is missing or damaged, or was not made from a config.
    """
    from omegaconf import OmegaConf

    node = OmegaConf.select(OmegaConf.load(verified(Path(path), CONFIG)), "task")
    if node is None or "_target_" not in node:
        raise ValueError(
            f"{path} cannot build its task: its {CONFIG} has no task._target_ (the run was started "
            "from Python, not from a config); construct the task and call load_weights(task, path)"
        )
    task: TaskModule = build_node(node, "task", **overrides)
    load_weights(task, path)
    return task


def memory(tensor: torch.Tensor) -> Any:
    """Identify the memory that ``tensor`` shows: equal for tied weights and only for them."""
    if not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def write_weights(path: Path, weights: Mapping[str, Any]) -> None:
    """Write a ``state_dict`` as safetensors; an object that appears twice is stored once."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}
    tied: dict[str, str] = {}
    plain: list[str] = []
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor):  # a module's extra state
            buffer = io.BytesIO()
            torch.save(value, buffer)
            tensors[name] = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8).clone()
            plain.append(name)
        elif id(value) in names:
            tied[name] = names[id(value)]
        else:
            names[id(value)] = name
            tensors[name] = value
    metadata = {"format": "pt", "tied": json.dumps(tied), "extra_state": json.dumps(plain)}
    save_file(tensors, path, metadata)
    _sort_header(path)


def _sort_header(path: Path) -> None:
    """Put the header of a safetensors file in order: it is written in a random one.

    The file starts with the length of the header in 8 bytes, little-endian; the header is JSON, and
    may end with spaces (https://github.com/huggingface/safetensors, "Format").
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        text = json.dumps(header, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
        sorted_header = text.encode().ljust(length)
        assert len(sorted_header) == length
        file.seek(8)
        file.write(sorted_header)


def _read_weights(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    if path.suffix == ".safetensors":
        if not path.is_file():
            raise ValueError(f"there is no file {path}")
        file = path
    else:
        file = verified(path, WEIGHTS)
    try:
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()
            weights: dict[str, Any] = {name: opened.get_tensor(name) for name in names}
            metadata = opened.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged, or no safetensors file: {error}") from error
    for name in json.loads(metadata.get("extra_state", "[]")):
        weights[name] = read_torch(io.BytesIO(weights[name].numpy().tobytes()))
    for name, same in json.loads(metadata.get("tied", "{}")).items():
        weights[name] = weights[same]
    return weights


def _tie(weights: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Give names that share memory in the module, and of which the file has one, that value."""
    places = {name: memory(t) for name, t in own.items() if isinstance(t, torch.Tensor)}
    known = {place: name for name, place in places.items() if name in weights}
    for name, place in places.items():
        if name not in weights and place in known:
            weights[name] = weights[known[place]]


def read_torch(source: Path | io.BytesIO) -> Any:
    """Read what ``torch.save`` wrote, on the CPU; tensors and plain values only.

    Raises:
        ValueError: If it is damaged or holds anything else.
    """
    from pickle import UnpicklingError

    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{source} cannot be read as tensors and plain values: {error}") from error


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__
