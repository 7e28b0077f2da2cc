"""Which part of the work for the ranks cannot be pickled: pickle's own errors do not say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

_MOST = 1000  # parts of a list or dict that are looked at one by one


def culprit(work: Any) -> str | None:
    """Return the smallest part that cannot be pickled, as a user names it: ``task.net.lock``.

    Args:
        work: What `trainer.launching.sending.send` could not send, with ``job`` and ``args``.

    Returns:
        Its name; None if only all of it together cannot be pickled.
    """
    name, value, seen = None, work, set()
    parts = _parts_of_work(work)
    while True:
        seen.add(id(value))
        found = next(((n, v) for n, v in parts if id(v) not in seen and not _can_travel(v)), None)
        if found is None:
            return name
        name, value = found
        parts = _parts(name, value)


def _parts_of_work(work: Any) -> Iterator[tuple[str, Any]]:
    from trainer.api import Trainer
    from trainer.data.module import DataModule, GivenData
    from trainer.task import TaskModule

    trainer = getattr(getattr(work, "job", None), "__self__", None)
    for number, value in enumerate(getattr(work, "args", ())):
        if isinstance(value, TaskModule):
            yield "task", value
        elif isinstance(value, GivenData):
            yield from value._given.items()
        elif isinstance(value, DataModule):
            yield "data", value
        elif not isinstance(getattr(value, "__self__", None), Trainer):
            yield f"args[{number}]", value
    if isinstance(trainer, Trainer):
        yield from (("callbacks", trainer._callbacks), ("logger", trainer._logger))


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, MethodType):
        yield name, value.__self__
    elif isinstance(value, Mapping | list | tuple):
        if len(value) <= _MOST:
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            yield from ((f"{name}[{key!r}]", part) for key, part in items)
    else:
        inside = dict(value._modules) if isinstance(value, nn.Module) else {}
        inside |= getattr(value, "__dict__", {})
        yield from ((f"{name}.{key}", part) for key, part in inside.items())


def _can_travel(value: Any) -> bool:
    """Whether a value can be pickled; tensors and arrays, which may be large, are left out."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, part: Any) -> str | None:
            return "numbers" if isinstance(part, torch.Tensor | np.ndarray) else None

    class Nowhere:
        def write(self, data: bytes) -> int:
            return len(data)

    try:
        Pickler(Nowhere()).dump(value)
    except Exception:
        return False
    return True
