"""What one rank writes down of its run. The checks compare the records of two runs."""

from __future__ import annotations

import hashlib
import math
import pickle
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from trainer.data.fetching import Request


class Forward(NamedTuple):
    """One micro-batch that went through the task.

    Attributes:
        step: The optimizer step it belongs to; the first is 1.
        number: Its number within the global batch, over all ranks.
        position: Position in the epoch of its first sample.
        num_samples: Samples in it.
        global_size: Samples in the whole global batch.
        content: Digests of what was loaded: one for each sample of a stream, else one for all.
        before: Digests of the random generators' states when its forward began, by generator.
        after: The same when its loss was there.
    """

    step: int
    number: int
    position: int
    num_samples: int
    global_size: int
    content: tuple[str, ...]
    before: dict[str, str]
    after: dict[str, str]

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Which samples of the run these are."""
        return self.step, self.number, self.position, self.num_samples


class LayersUsed(NamedTuple):
    """What one forward, loss and backward outside of the strategy's wrapper used.

    Attributes:
        called: Submodules that were called.
        trained: Parameters that got a gradient.
        untrained: Parameters that require a gradient and got none.
    """

    called: list[str]
    trained: list[str]
    untrained: list[str]


class BatchDependence(NamedTuple):
    """The loss of a micro-batch, and the weighted mean of the losses of its two halves."""

    whole: float
    halves: float

    @property
    def difference(self) -> float:
        """Relative to the whole."""
        return relative(self.halves, self.whole)


class Collective(NamedTuple):
    """One call of a collective: its name, the bytes of its tensors, and whether in forward."""

    name: str
    num_bytes: int
    in_forward: bool


@dataclass
class Record:
    """One rank's run, as far as it came.

    Attributes:
        rank: Whose.
        phase: What it was at when the record was written: ``data``, ``start``, ``steps``, ``end``.
        facts: Plain values about the run by name (see ``rehearsal.py``).
        epochs: By epoch, what the rank would load; empty for streams.
        initial: Digests of parameters and buffers before the ranks were made equal, by name.
        layers: Of the first micro-batch; None on a rank that had none.
        batch_dependence: Of the first micro-batch; None where it cannot be told.
        forwards: In the order of the run.
        hyperparameters: By step, those of each parameter group.
        losses: By step; None in a step without weight.
        collectives: By step.
        final: Digests of the parameters after the last step, by name.
        peak_bytes: The most memory this rank has had.
    """

    rank: int
    phase: str = "data"
    facts: dict[str, Any] = field(default_factory=dict)
    epochs: list[list[Request]] = field(default_factory=list)
    initial: dict[str, str] = field(default_factory=dict)
    layers: LayersUsed | None = None
    batch_dependence: BatchDependence | None = None
    forwards: list[Forward] = field(default_factory=list)
    hyperparameters: list[list[dict[str, Any]]] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    collectives: list[list[Collective]] = field(default_factory=list)
    final: dict[str, str] = field(default_factory=dict)
    peak_bytes: int = 0

    def save(self, folder: Path) -> None:
        """Write the record, in place of what it said before."""
        path = _path(folder, self.rank)
        unfinished = path.with_suffix(".new")
        unfinished.write_bytes(pickle.dumps(self))
        unfinished.rename(path)


def load_records(folder: Path, world_size: int) -> list[Record]:
    """Return the records of the ranks that wrote one, in rank order."""
    paths = [_path(folder, rank) for rank in range(world_size)]
    return [pickle.loads(path.read_bytes()) for path in paths if path.exists()]


def digest(tree: Any) -> str:
    """Return a short hash of nested tensors, arrays and plain values."""
    state = hashlib.blake2b(digest_size=8)
    _feed(state, tree)
    return state.hexdigest()


def digests(named: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the digest of each tensor."""
    return {name: digest(tensor) for name, tensor in named.items()}


def tensors_of(task: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name."""
    return {**dict(task.named_parameters()), **dict(task.named_buffers())}


def generator_states(device: torch.device) -> dict[str, str]:
    """Return digests of the states of the global random generators."""
    states: dict[str, Any] = {
        "Python": random.getstate(),
        "NumPy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["CUDA"] = torch.cuda.get_rng_state(device)
    return {name: digest(state) for name, state in states.items()}


def relative(found: float, expected: float) -> float:
    """Return how far ``found`` is from ``expected``, relative to that; infinity for NaN."""
    difference = abs(found - expected)
    if expected:
        difference /= abs(expected)
    return math.inf if math.isnan(difference) else difference


def _feed(state: Any, tree: Any) -> None:
    if isinstance(tree, torch.Tensor):
        dense = tree.detach() if tree.layout == torch.strided else tree.detach().to_dense()
        flat = dense.cpu().contiguous().reshape(-1)
        state.update(f"{tree.dtype}{tuple(tree.shape)}".encode())
        state.update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(tree, np.ndarray) and tree.dtype != object:
        state.update(f"{tree.dtype}{tree.shape}".encode())
        state.update(tree.tobytes())
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            state.update(repr(key).encode())
            _feed(state, value)
    elif isinstance(tree, list | tuple):
        state.update(f"[{len(tree)}]".encode())
        for part in tree:
            _feed(state, part)
    elif isinstance(tree, str | bytes | int | float | complex | np.generic | None):
        state.update(repr(tree).encode())
    else:
        state.update(type(tree).__qualname__.encode())
        _feed(state, getattr(tree, "__dict__", None))


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"
