"""A module's weights in a file: plain names, readable by any tool, nothing executed on loading."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import torch
from torch import nn

from trainer.checkpoint import foreign
from trainer.checkpoint.finding import local
from trainer.checkpoint.manifest import CONFIG, WEIGHTS, verified
from trainer.instantiate import build_node
from trainer.messages import listed

if TYPE_CHECKING:
    from trainer.task import TaskModule

# Names of the types that every reader of safetensors knows.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


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
        path: A checkpoint folder, a ``.safetensors`` file of any origin, or a ``.ckpt`` of
            Lightning.
        strict: Whether names and shapes must agree. If not, what fits is loaded and the rest of
            the module stays as it is.

    Returns:
        What differed; empty if ``strict``.

    Raises:
        ValueError: If the file is missing or damaged; if ``strict`` and anything differs; if
            nothing fits.
    """
    weights = read_weights(local(path))
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

    This imports and calls what the config names, so do it with checkpoints whose origin you trust.
    `load_weights` executes nothing.

    Args:
        path: A checkpoint folder.
        overrides: Arguments of the task's constructor that replace those in the config.

    Raises:
        ValueError: If the checkpoint is missing or damaged, or was not made from a config.
    """
    from omegaconf import OmegaConf

    path = local(path)
    node = OmegaConf.select(OmegaConf.load(verified(path, CONFIG)), "task")
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


def write_weights(file: BinaryIO, weights: Mapping[str, Any]) -> None:
    """Write a ``state_dict`` as safetensors; an object that appears twice is stored once.

    The file is the length of the header in 8 bytes (little-endian), the header, which is JSON, and
    the tensors without a gap (https://github.com/huggingface/safetensors, "Format"). The library
    would write the header in a random order, and the whole file in one go, so that it could not be
    hashed on the way.
    """
    tensors: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}
    tied: dict[str, str] = {}
    plain: list[str] = []
    for name, value in weights.items():
        if id(value) in names and isinstance(value, torch.Tensor):
            tied[name] = names[id(value)]
        elif isinstance(value, torch.Tensor) and value.dtype in _DTYPES:
            names[id(value)] = name
            tensors[name] = value
        else:  # a module's extra state, or a tensor that the format does not know
            buffer = io.BytesIO()
            torch.save(value, buffer)
            tensors[name] = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
            plain.append(name)
    # Large elements first, so that all are aligned.
    tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])))
    metadata = {"format": "pt", "tied": json.dumps(tied), "extra_state": json.dumps(plain)}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        shape, dtype = list(tensor.shape), _DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def read_weights(path: Path) -> dict[str, Any]:
    """Return the weights in a checkpoint, a ``.safetensors`` file or one of Lightning's, by name.

    Raises:
        ValueError: If it is missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    if path.suffix == foreign.SUFFIX:
        return dict(foreign.read_lightning(path)["state_dict"])
    if path.suffix == ".safetensors":
        if not path.is_file():
            raise ValueError(f"there is no file {path}")
        file = path
    else:
        file = verified(path, WEIGHTS)
    try:
        with safe_open(file, framework="pt") as opened:
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            metadata = opened.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged, or no safetensors file: {error}") from error
    return _decoded(weights, metadata, file)


def _decoded(weights: dict[str, Any], metadata: Mapping[str, str], file: Path) -> dict[str, Any]:
    """Bring back tied weights and extra state, as `write_weights` noted them in the metadata."""
    try:
        plain = json.loads(metadata.get("extra_state", "[]"))
        tied = json.loads(metadata.get("tied", "{}"))
        sources = {name: io.BytesIO(weights[name].numpy().tobytes()) for name in plain}
        decoded = {
            name: read_torch(source, f"{name} in {file}") for name, source in sources.items()
        }
        weights = {**weights, **decoded}
        return weights | {name: weights[same] for name, same in tied.items()}
    except (json.JSONDecodeError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} has metadata that it cannot have: {error!r}") from error


def _tie(weights: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Give names that share memory in the module, and of which the file has one, that value."""
    places = {name: memory(t) for name, t in own.items() if isinstance(t, torch.Tensor)}
    known = {place: name for name, place in places.items() if name in weights}
    for name, place in places.items():
        if name not in weights and place in known:
            weights[name] = weights[known[place]]


def read_torch(source: Path | BinaryIO, name: str | None = None) -> Any:
    """Read what ``torch.save`` wrote, on the CPU; tensors and plain values only.

    Args:
        source: The file.
        name: What to call it in the message; None for its path.

    Raises:
        ValueError: If it is damaged or holds anything else; nothing of it was executed.
    """
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # what a hostile pickle makes of the reader is up to the pickle
        raise ValueError(
            f"{name or source} cannot be read as tensors and plain values: {error}"
        ) from error


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__
