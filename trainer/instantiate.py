"""From what a user gives (objects or config nodes) to a list of callbacks or loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")

_LIGHTNING = ("of type lightning.pytorch.", "of type pytorch_lightning.")
# What does the work of Lightning's callbacks here.
_ANY_CALLBACK = (
    "callbacks act on its own loop; see trainer.callbacks and docs/callbacks.md for ours"
)
_IN_PLACE_OF = {
    "EarlyStopping": "EarlyStopping is trainer.callbacks.EarlyStopping here",
    "ModelCheckpoint": "ModelCheckpoint is the options checkpoint.* here (monitor, keep, ...)",
    "LearningRateMonitor": "LearningRateMonitor is not needed: rates are logged by default",
    "StochasticWeightAveraging": "StochasticWeightAveraging is weight_average=swa here",
    "EMAWeightAveraging": "EMAWeightAveraging is weight_average=ema here",
    "RichProgressBar": "RichProgressBar is trainer.callbacks.ProgressBar here, a default",
    "TQDMProgressBar": "TQDMProgressBar is trainer.callbacks.ProgressBar here, a default",
}


def instantiate_all(
    spec: Any,
    kind: type[T],
    what: str,
    defaults: Callable[[], Sequence[T]],
    adopt: Callable[[Any], Any] = lambda built: built,
) -> list[T]:
    """Build the objects that ``spec`` stands for.

    Args:
        spec: None for the defaults, False for none at all; a ``kind`` or a node with a
            ``_target_``, or a sequence of these, to be added to the defaults, where one of the
            same class takes the place of a default; or a mapping by name, which is the whole set.
            Entries that are None or False are left out, so that a config can switch one off.
        kind: What each must be.
        what: The option's name, for messages (``callbacks``).
        defaults: Makes the default objects.
        adopt: Makes a ``kind`` of an object of another kind, and leaves others as they are.

    Raises:
        ValueError: If an entry is neither; says which one and what it is.
    """
    if spec is None:
        return list(defaults())
    if spec is False:
        return []
    if isinstance(spec, Mapping) and not _is_node(spec):
        named = {f"{what}.{name}": entry for name, entry in spec.items()}
        return _build_all(named, kind, adopt)
    if _is_node(spec) or not isinstance(spec, Sequence) or isinstance(spec, str):
        named = {what: spec}
    else:
        named = {f"{what}[{index}]": entry for index, entry in enumerate(spec)}
    there = defaults()
    classes = {type(default) for default in there}
    instead: dict[type[T], T] = {}
    beside: list[T] = []
    for own in _build_all(named, kind, adopt):
        if type(own) in classes and type(own) not in instead:
            instead[type(own)] = own
        else:
            beside.append(own)
    return [instead.get(type(default), default) for default in there] + beside


def _build_all(named: Mapping[str, Any], kind: type[T], adopt: Callable[[Any], Any]) -> list[T]:
    return [
        _build(entry, kind, name, adopt)
        for name, entry in named.items()
        if entry is not None and entry is not False
    ]


def _is_node(entry: Any) -> bool:
    return isinstance(entry, Mapping) and "_target_" in entry


def _build(entry: Any, kind: type[T], name: str, adopt: Callable[[Any], Any]) -> T:
    built = adopt(build_node(entry, name)) if _is_node(entry) else entry
    if isinstance(built, kind):
        return built
    needed = f"a trainer.{kind.__name__}"
    if isinstance(built, type):
        found, advice = f"the class {built.__name__}", f"construct it: {built.__name__}(...)"
    elif isinstance(built, str):
        found = f"the string {built!r}"
        advice = f"give the object, or a node {{_target_: {built}}} with its full import path"
    elif built is True:
        found, advice = "True", "leave it out for the default ones"
    elif isinstance(built, Mapping):
        found, advice = "a mapping without _target_", "add _target_: <import path of the class>"
    else:
        found = f"of type {type(built).__module__}.{type(built).__qualname__}"
        advice = f"derive the class from trainer.{kind.__name__}"
        if found.startswith(_LIGHTNING) and kind.__name__ == "Callback":
            advice = "Lightning's " + _IN_PLACE_OF.get(type(built).__name__, _ANY_CALLBACK)
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

    check_targets(node, name)
    try:
        return instantiate(node, _convert_="all", **overrides)
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, Exception) and not isinstance(cause, ImportError | TypeError):
            raise cause from None
        raise ValueError(f"{name} cannot be built: {error}") from error


def check_targets(node: Any, name: str) -> None:
    """Refuse a ``_target_`` in or below ``node`` that leads nowhere; import what it leads to.

    Args:
        node: A part of a config. A target that is an interpolation is not looked at.
        name: Where it stands in the config, for the message.

    Raises:
        ValueError: Naming the part of the path that is not there.
    """
    for place, target in _targets(node, name):
        if "${" not in target:
            _check_target(target, place)


def _targets(node: Any, name: str) -> Iterator[tuple[str, str]]:
    if _is_node(node):
        target = node["_target_"]
        if isinstance(target, str):
            yield name, target
        elif not callable(target):
            raise ValueError(f"{name}._target_ is {target!r}; give the import path of a class")
    if isinstance(node, Mapping):
        parts: Any = node.items()
    elif isinstance(node, Sequence) and not isinstance(node, str):
        parts = enumerate(node)
    else:
        return
    for key, part in parts:
        yield from _targets(part, f"{name}.{key}")


def _check_target(target: str, name: str) -> None:
    path, found = "", None
    for part in target.split("."):
        longer = f"{path}.{part}" if path else part
        if not hasattr(found, part):
            try:
                found = import_module(longer)
            except ModuleNotFoundError as error:
                if error.name is None or not longer.startswith(error.name):
                    raise  # the module is there, and imports one that is not
                near = get_close_matches(part, dir(found) if path else [], n=1)
                advice = f"; did you mean {path}.{near[0]}?" if near else ""
                missing = f"{path} has no {part!r}" if path else f"there is no module {part!r}"
                raise ValueError(
                    f"{name} cannot be built from {target}: {missing}{advice}"
                ) from None
        else:
            found = getattr(found, part)
        path = longer
    if not callable(found):
        kind = "a module" if isinstance(found, ModuleType) else f"of type {type(found).__name__}"
        raise ValueError(
            f"{name} cannot be built from {target}, which is {kind}; give the path of a class or "
            "a function"
        )
