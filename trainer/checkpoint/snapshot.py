"""What a checkpoint holds, copied to the CPU so that the training can go on."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from trainer.checkpoint.weights import memory

# What torch.load(weights_only=True) takes back as it was.
_PLAIN = (str, int, float, bool, bytes, complex, type(None), torch.Size, torch.dtype, torch.device)


@dataclass(frozen=True)
class Snapshot:
    """Everything a checkpoint holds, as it is at one step.

    Attributes:
        step: Optimizer updates done.
        weights: The task's ``state_dict()``, with its plain names.
        state: Everything else (optimizer, scheduler, callbacks, ...): nested dicts and lists of
            tensors and plain values.
        config: The resolved config of the run, as plain values.
        world_size: Number of ranks that trained it.
        metric: The monitored metric, measured at exactly this step; None if it was not.
    """

    step: int
    weights: Mapping[str, Any]
    state: Mapping[str, Any]
    config: Mapping[str, Any]
    world_size: int
    metric: float | None = None


class Staging:
    """Copies snapshots to the CPU, each into the memory of the one before.

    New memory would cost several times the copy itself: the system clears it page by page, and for
    a GPU it has to be pinned. So a snapshot is good until the next one is copied.

    Args:
        training_waits: Whether the state does not change until the snapshot is done with. Then what
            is on the CPU already is taken as it is.
    """

    def __init__(self, training_waits: bool = False) -> None:
        self._training_waits = training_waits
        self._buffers: dict[Any, list[torch.Tensor]] = {}

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """Return a snapshot on the CPU, which does not change when the run goes on.

        Raises:
            ValueError: If the state holds something that is neither a tensor nor a plain value.
        """
        copying = _Copying(self._buffers, self._training_waits)
        weights = {
            name: copying.copy(value, name, torch.contiguous_format)
            for name, value in snapshot.weights.items()
        }
        state = copying.copy(snapshot.state, "state", torch.preserve_format)
        for device in copying.devices:
            torch.cuda.current_stream(device).synchronize()
        self._buffers = copying.used
        return replace(snapshot, weights=weights, state=state)


class _Copying:
    """One copy of nested state."""

    def __init__(self, buffers: dict[Any, list[torch.Tensor]], training_waits: bool) -> None:
        self.used: dict[Any, list[torch.Tensor]] = defaultdict(list)
        self.devices: set[torch.device] = set()
        self._buffers = buffers
        self._training_waits = training_waits
        self._copies: dict[Any, torch.Tensor] = {}

    def copy(self, value: Any, where: str, layout: torch.memory_format) -> Any:
        """Copy a part of the state; a tensor that appears twice (tied weights) stays one."""
        if isinstance(value, torch.Tensor):
            key = memory(value)
            if key not in self._copies:
                self._copies[key] = self._copy_tensor(value.detach(), layout)
            return self._copies[key]
        if isinstance(value, np.generic):
            return self.copy(value.item(), where, layout)
        if type(value) in (dict, OrderedDict, Counter):
            items = ((k, self.copy(v, f"{where}[{k!r}]", layout)) for k, v in value.items())
            return type(value)(dict(items))
        if type(value) in (list, tuple):
            parts = (self.copy(v, f"{where}[{i}]", layout) for i, v in enumerate(value))
            return type(value)(parts)
        if type(value) in _PLAIN:
            return value
        raise ValueError(
            f"{where} is of type {type(value).__module__}.{type(value).__qualname__}, which a "
            "checkpoint cannot hold: state_dict() may return tensors, numbers, strings, None, and "
            "dicts, lists and tuples of these"
        )

    def _copy_tensor(self, tensor: torch.Tensor, layout: torch.memory_format) -> torch.Tensor:
        on_gpu = tensor.is_cuda
        if self._training_waits and not on_gpu and _is_whole(tensor, layout):
            return tensor
        key = (tensor.dtype, tensor.shape, tensor.stride(), layout, on_gpu)
        fitting = self._buffers.get(key)
        buffer = (
            fitting.pop()
            if fitting
            else torch.empty_like(tensor, device="cpu", memory_format=layout, pin_memory=on_gpu)
        )
        if on_gpu:
            self.devices.add(tensor.device)
        self.used[key].append(buffer)
        return buffer.copy_(tensor, non_blocking=on_gpu)


def _is_whole(tensor: torch.Tensor, layout: torch.memory_format) -> bool:
    """Whether the tensor is all that its memory holds, and lies in it as it should."""
    fits = layout is torch.preserve_format or tensor.is_contiguous()
    return fits and tensor.nbytes == tensor.untyped_storage().nbytes()
