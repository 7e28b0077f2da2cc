"""Nested batches: tensors in dicts, lists and (named) tuples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return ``tree`` with ``function`` applied to everything that is no dict, list or tuple."""
    if isinstance(tree, MutableMapping | list | tuple):
        return map_parts(lambda part: map_leaves(function, part), tree)
    return function(tree)


def to_device(tree: Any, device: torch.device) -> Any:
    """Move everything that has a ``to`` to ``device``, asynchronously from page-locked memory."""
    if isinstance(tree, torch.Tensor):  # the usual case, and the loop's
        return tree.to(device, non_blocking=device.type != "cpu")
    if callable(
        getattr(tree, "to", None)
    ):  # also a tuple: not every part of a PackedSequence is to be moved
        return tree.to(device)
    return map_parts(lambda part: to_device(part, device), tree)


def detached(tree: Any) -> Any:
    """Return ``tree`` with every tensor detached from its graph."""
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, tree)


def rows(tree: Any, size: int, start: int, stop: int) -> Any:
    """Cut samples ``start`` to ``stop`` out of a ready-made batch of ``size`` samples.

    Tensors and arrays with ``size`` rows are cut along their first dimension. A list or tuple of
    ``size`` entries of one type is cut by entry, unless each of them has ``size`` rows itself.
    What belongs to the whole batch (a number, a mask of another shape) stays as it is.

    Raises:
        ValueError: If there is something in the batch that cannot be cut.
    """
    if (start, stop) == (0, size):
        return tree
    if isinstance(tree, Mapping):
        return {key: rows(value, size, start, stop) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        if _has_entries(tree, size):
            return tree[start:stop]
        return map_parts(lambda part: rows(part, size, start, stop), tree)
    if isinstance(tree, torch.Tensor | np.ndarray):
        return tree[start:stop] if _has_rows(tree, size) else tree
    if tree is None or isinstance(tree, int | float | str | bytes | np.generic):
        return tree
    raise ValueError(
        f"a batch of {size} samples holds a {type(tree).__name__}, which cannot be cut for the "
        "ranks; yield tensors, lists with one entry per sample, or tuples or dicts of these"
    )


def map_parts(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a dict, list or tuple with ``function`` applied to its parts; else ``tree`` itself."""
    if type(tree) is dict:
        return {key: function(value) for key, value in tree.items()}
    if isinstance(tree, MutableMapping):  # another class stays what it is, with its attributes
        changed = copy.copy(tree)
        for key, value in tree.items():
            changed[key] = function(value)
        return changed
    if isinstance(tree, list | tuple):
        parts = [function(part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


def _has_entries(tree: list[Any] | tuple[Any, ...], size: int) -> bool:
    """Whether there is one entry per sample, rather than one per field."""
    alike = len(tree) == size and len({type(part) for part in tree}) == 1
    return (
        alike and not hasattr(tree, "_fields") and not all(_has_rows(part, size) for part in tree)
    )


def _has_rows(tree: Any, size: int) -> bool:
    if isinstance(tree, torch.Tensor | np.ndarray):
        return tree.ndim > 0 and tree.shape[0] == size
    if isinstance(tree, Mapping):
        return any(_has_rows(value, size) for value in tree.values())
    return isinstance(tree, list | tuple) and (
        len(tree) == size or any(_has_rows(part, size) for part in tree)
    )
