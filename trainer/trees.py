"""Nested batches: tensors in dicts, lists and (named) tuples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return ``tree`` with ``function`` applied to everything that is no dict, list or tuple."""
    if isinstance(tree, dict):
        return {key: map_leaves(function, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        parts = [map_leaves(function, part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return function(tree)


def to_device(tree: Any, device: torch.device) -> Any:
    """Move everything that has a ``to`` to ``device``, asynchronously from page-locked memory."""
    if isinstance(tree, torch.Tensor):  # the usual case, and the loop's
        return tree.to(device, non_blocking=device.type != "cpu")
    return map_leaves(
        lambda leaf: (
            to_device(leaf, device)
            if isinstance(leaf, torch.Tensor)
            else leaf.to(device)
            if hasattr(leaf, "to")
            else leaf
        ),
        tree,
    )


def detached(tree: Any) -> Any:
    """Return ``tree`` with every tensor detached from its graph."""
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, tree)


def rows(tree: Any, size: int, start: int, stop: int) -> Any:
    """Cut samples ``start`` to ``stop`` out of a ready-made batch of ``size`` samples.

    Tensors are cut along their first dimension and lists of anything else by entry, where they
    have ``size`` of them.
    """
    if isinstance(tree, list) and len(tree) == size and not isinstance(tree[0], torch.Tensor):
        return tree[start:stop]
    if isinstance(tree, dict):
        return {key: rows(value, size, start, stop) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        parts = [rows(part, size, start, stop) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if isinstance(tree, torch.Tensor) and tree.dim() and tree.shape[0] == size:
        return tree[start:stop]
    return tree
