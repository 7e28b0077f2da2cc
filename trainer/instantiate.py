"""From what a user gives (objects or config nodes) to a list of callbacks or loggers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def instantiate_all(
    spec: Any, kind: type[T], what: str, defaults: Callable[[], Sequence[T]]
) -> list[T]:
    """Build the objects that ``spec`` stands for.

    Args:
        spec: None for the defaults, False for none at all, or one or several (in a sequence, or a
            mapping by name) of: a ``kind``, a node with a ``_target_``. Entries that are None or
            False are left out, so that a config can switch one off.
        kind: What each must be.
        what: The option's name, for messages (``callbacks``).
        defaults: Makes the default objects.

    Raises:
        ValueError: If an entry is neither; says which one and what it is.
    """
    if spec is None:
        return list(defaults())
    if spec is False:
        return []
    if _is_node(spec) or not isinstance(spec, Mapping | Sequence) or isinstance(spec, str):
        return [_build(spec, kind, what)]
    if isinstance(spec, Mapping):
        named = [(f"{what}.{name}", entry) for name, entry in spec.items()]
    else:
        named = [(f"{what}[{index}]", entry) for index, entry in enumerate(spec)]
    return [
        _build(entry, kind, name)
        for name, entry in named
        if entry is not None and entry is not False
    ]


def _is_node(entry: Any) -> bool:
    return isinstance(entry, Mapping) and "_target_" in entry


def _build(entry: Any, kind: type[T], name: str) -> T:
    built = build_node(entry, name) if _is_node(entry) else entry
    if isinstance(built, kind):
        return built
    needed = f"a trainer.{kind.__name__}"
    if isinstance(built, type):
        found, advice = f"the class {built.__name__}", f"construct it: {built.__name__}(...)"
    elif isinstance(built, str):
        found = f"the string {built!r}"
        advice = f"give the object, or a node {{_target_: {built}}} with its full import path"
    elif isinstance(built, Mapping):
        found, advice = "a mapping without _target_", "add _target_: <import path of the class>"
    else:
        found = f"of type {type(built).__module__}.{type(built).__qualname__}"
        advice = f"derive the class from trainer.{kind.__name__}"
    raise ValueError(f"{name} is {found}; it must be {needed}: {advice}")


def build_node(node: Any, name: str, **overrides: Any) -> Any:
    """Build the object that a config node with a ``_target_`` stands for.

    Args:
        node: The node.
        name: Where it stands in the config, for the message.
        overrides: Arguments that replace those of the node.

    Raises:
        ValueError: If the target cannot be found or does not take the arguments. Other errors in it
            are raised as they are.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return instantiate(node, _convert_="all", **overrides)
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, Exception) and not isinstance(cause, ImportError | TypeError):
            raise cause from None
        raise ValueError(f"{name} cannot be built: {error}") from error
