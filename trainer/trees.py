"""Nested batches: tensors in dicts, lists and (named) tuples, moved, and cut and joined by sample.

What belongs to samples follows from the number of samples alone: tensors and arrays with a row for
each, and lists and tuples with an entry for each (`is_by_sample`). All the rest belongs to the
whole batch.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

PLAIN = (type(None), int, float, str, bytes, np.generic)  # neither rows nor parts


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return ``tree`` with ``function`` applied to everything that is no dict, list or tuple."""
    if isinstance(tree, MutableMapping | list | tuple):
        return map_parts(lambda part: map_leaves(function, part), tree)
    return function(tree)


def to_device(tree: Any, device: torch.device) -> Any:
    """Move everything that has a ``to`` to ``device``, asynchronously from page-locked memory."""
    if isinstance(tree, torch.Tensor):
        return tree.to(device, non_blocking=device.type != "cpu")
    if type(tree) is list:  # the usual batch
        return [to_device(part, device) for part in tree]
    # Also a tuple: not every part of a PackedSequence is to be moved.
    if callable(getattr(tree, "to", None)):
        return tree.to(device)
    return map_parts(lambda part: to_device(part, device), tree)


def detached(tree: Any) -> Any:
    """Return ``tree`` with every tensor detached from its graph."""
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, tree)


def rows(tree: Any, size: int, start: int, stop: int) -> Any:
    """Cut samples ``start`` to ``stop`` out of a ready-made batch of ``size`` samples.

    What belongs to the whole batch (a number, a mask of another shape) stays as it is.

    Raises:
        ValueError: If there is something in the batch that cannot be cut.
    """
    if (start, stop) == (0, size):
        return tree
    if isinstance(tree, Mapping):
        return {key: rows(value, size, start, stop) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        if is_by_sample([tree], [size]):
            return tree[start:stop]
        return map_parts(lambda part: rows(part, size, start, stop), tree)
    if isinstance(tree, torch.Tensor | np.ndarray):
        return tree[start:stop] if has_rows(tree, size) else tree
    if isinstance(tree, PLAIN):
        return tree
    raise ValueError(
        f"a batch of {size} samples holds a {type(tree).__name__}, which cannot be cut for the "
        "ranks; yield tensors, lists with one entry per sample, or tuples or dicts of these"
    )


def joined(
    parts: Sequence[Any],
    sizes: Sequence[int],
    join_leaves: Callable[[Sequence[Any], Sequence[int], str], Any],
    path: str = "",
    *,
    fields_in_lists: bool = True,
) -> Any:
    """Put the batches or outputs of several micro-batches together, by sample: `rows` backwards.

    Args:
        parts: At least one, in the order of the samples.
        sizes: Samples in each.
        join_leaves: Of parts, sizes and path, for all but dicts, lists, tuples and arrays of rows.
        path: What the parts are called in errors.
        fields_in_lists: Whether a list may have one entry per field. If not, it is no less one of
            samples if these have as many entries themselves.

    Raises:
        ValueError: If dicts, lists or tuples have different entries in different parts.
    """
    first = parts[0]
    if len({type(part) for part in parts}) > 1:
        return join_leaves(parts, sizes, path)
    if isinstance(first, np.ndarray) and all(map(has_rows, parts, sizes)):
        return np.concatenate(parts)
    is_samples = isinstance(first, list) and not fields_in_lists
    if isinstance(first, list | tuple) and (
        _has_entries(parts, sizes) if is_samples else is_by_sample(parts, sizes)
    ):
        return type(first)(itertools.chain.from_iterable(parts))
    if is_samples or not isinstance(first, Mapping | list | tuple):
        return join_leaves(parts, sizes, path)
    keys = _keys(first)
    if any(set(_keys(part)) != set(keys) for part in parts):
        raise refusal(
            path,
            f"has {' and '.join(sorted({_contents(part) for part in parts}))}",
            "it must have the same entries in all of them, or be a list with one per sample",
        )
    entries = iter(
        joined(
            [part[key] for part in parts],
            sizes,
            join_leaves,
            f"{path}[{key!r}]" if path else str(key),
            fields_in_lists=fields_in_lists,
        )
        for key in keys
    )
    return map_parts(lambda _: next(entries), first)


def refusal(path: str, what: str, remedy: str) -> ValueError:
    """Return the error that says why the parts of several micro-batches cannot be joined."""
    return ValueError(
        "the samples of several micro-batches are put together (for a global loss, or as "
        f"predictions), and {path} {what} in different micro-batches; {remedy}"
    )


def is_by_sample(parts: Sequence[list[Any] | tuple[Any, ...]], sizes: Sequence[int]) -> bool:
    """Whether lists or tuples have one entry per sample, rather than one per field.

    Then there are as many as samples, all of one kind. But these are fields, as many by chance, if
    some have a row per sample, and so have the others, or the same shape in each of several parts.
    """
    kinds = {_kind(entry) for part in parts for entry in part}
    if hasattr(parts[0], "_fields") or not _has_entries(parts, sizes) or len(kinds) > 1:
        return False
    if len(set(sizes)) > 1:
        return True  # the number of fields does not follow that of samples
    fields = list(zip(*parts, strict=True))
    with_rows = [all(has_rows(entry, sizes[0]) for entry in field) for field in fields]
    return not (any(with_rows) and all(map(operator.or_, with_rows, map(_has_one_shape, fields))))


def has_rows(part: Any, size: int) -> bool:
    """Whether there is a row or entry for each of ``size`` samples, somewhere in ``part``."""
    if isinstance(part, Mapping):
        return any(has_rows(value, size) for value in part.values())
    if isinstance(part, list | tuple):
        return len(part) == size or any(has_rows(entry, size) for entry in part)
    return _shape(part)[:1] == (size,)


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


def _has_entries(parts: Sequence[Any], sizes: Sequence[int]) -> bool:
    return [len(part) for part in parts] == list(sizes)


def _kind(entry: Any) -> Any:
    """What the entries of samples have in common; a scalar does not stand for a row."""
    return None if isinstance(entry, PLAIN) else (type(entry), len(_shape(entry)) > 0)


def _has_one_shape(field: Sequence[Any]) -> bool:
    """Whether tensors that may be one field of several parts all have the same shape."""
    shapes = {_shape(entry) for entry in field}
    return len(field) > 1 and len(shapes) == 1 and shapes != {()}


def _shape(part: Any) -> tuple[int, ...]:
    return getattr(part, "shape", ())


def _keys(tree: Any) -> list[Any]:
    return list(tree) if isinstance(tree, Mapping) else list(range(len(tree)))


def _contents(part: Any) -> str:
    if isinstance(part, Mapping):
        return f"the entries {', '.join(map(str, part)):.60}"
    return f"{len(part)} entries"
