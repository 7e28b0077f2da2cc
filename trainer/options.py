"""How an option is declared, checked and shown: what it says of itself, whatever it is for."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import Field, field, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

C = TypeVar("C")

_ALIKE = 0.8  # spellings of one value: fp64 is not one of fp16's, which is 0.75


def option(
    default: Any,
    doc: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    choices: Sequence[str] = (),
    form: tuple[str, str] | None = None,
    section: str | None = None,
) -> Any:
    """Declare an option: a dataclass field that carries its documentation and limits.

    Args:
        default: The value that is used when nothing is given.
        doc: One or two sentences for the reference page.
        at_least: The smallest number allowed.
        above: A number must be greater than this.
        at_most: The largest number allowed.
        choices: The strings allowed; empty means any.
        form: Strings of another form that are allowed beside these: in words, and as a pattern.
        section: The title above this option and those after it, in ``--help``.
    """
    limits = {"at_least": at_least, "above": above, "at_most": at_most}
    metadata = {"doc": doc, **limits, "choices": tuple(choices), "form": form, "section": section}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def option_fields(config: type | object) -> dict[str, Field[Any]]:
    """Return the fields of one of the config classes (or of an instance) by name."""
    return {f.name: f for f in fields(config)}  # type: ignore[arg-type]


def check_fields(config: Any, prefix: str = "") -> None:
    """Check the type and limits of every option; a whole number for a float becomes one.

    Args:
        config: One of the config classes.
        prefix: Goes before the names in messages.

    Raises:
        ValueError: For the first value that is not allowed; says what is.
    """
    hints = get_type_hints(type(config))
    for name, spec in option_fields(config).items():
        value, hint = getattr(config, name), hints[name]
        if hint is Any:
            continue
        if not _fits(value, hint):
            raise ValueError(
                f"{prefix}{name}={show(value)} is {_kind(value)}; "
                + _must_be(f"{prefix}{name}", value, spec, hint)
            )
        if isinstance(value, int) and not isinstance(value, bool) and float in _members(hint):
            setattr(config, name, float(value))
        if not _within(value, spec):
            raise ValueError(
                f"{prefix}{name}={show(value)} is not allowed; "
                + _must_be(f"{prefix}{name}", value, spec, hint)
            )


def from_options(cls: type[C], options: Mapping[str, Any]) -> C:
    """Build a config class of a mode from plain names and values.

    Raises:
        ValueError: For an unknown option, and for everything the constructor refuses.
    """
    known = option_fields(cls)
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            advice = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
            raise ValueError(f"there is no option {name!r}; {advice}")
    return cls(**options)


def _must_be(name: str, value: Any, spec: Field[Any], hint: Any) -> str:
    from trainer.migration import hint as foreign_hint

    text = f"it must be {allowed(spec, hint)}"
    if advice := foreign_hint(name, value):
        return f"{text}: set {advice}"
    entries = [value] if get_origin(hint) is list and isinstance(value, str) else value
    meant = _meant(entries, spec.metadata.get("choices", ()))
    return f"{text}; did you mean {name}={meant}?" if meant else text


def _meant(value: Any, choices: Sequence[str]) -> str | None:
    """Return what was meant, if that is one of the choices in another spelling."""
    from trainer.migration import nearest

    if isinstance(value, list):
        meant = [found for each in value if (found := _meant(each, choices))]
        return show(meant) if value and len(meant) == len(value) else None
    return nearest(value, choices, cutoff=_ALIKE) if isinstance(value, str) else None


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    members = _members(hint)
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_fits(v, get_args(hint)[0]) for v in value)
    if isinstance(value, bool):  # a bool is an int to Python, and a mistake to us
        return bool in members
    if isinstance(value, int) and float in members:
        return True
    return isinstance(value, tuple(members))


def _within(value: Any, spec: Field[Any]) -> bool:
    limits = spec.metadata
    if isinstance(value, list):
        return all(_within(entry, spec) for entry in value)
    if isinstance(value, str):
        has_form = limits["form"] is not None and re.fullmatch(limits["form"][1], value) is not None
        return not limits["choices"] or value in limits["choices"] or has_form
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    if not math.isfinite(value):
        return False
    at_least, above, at_most = limits["at_least"], limits["above"], limits["at_most"]
    return (
        (at_least is None or value >= at_least)
        and (above is None or value > above)
        and (at_most is None or value <= at_most)
    )


def allowed(spec: Field[Any], hint: Any) -> str:
    """Say in words what values an option takes."""
    if is_dataclass(hint):
        return f"a mapping of {', '.join(option_fields(hint))}"
    limits = spec.metadata
    if get_origin(hint) is list:
        return f"a list of {allowed(spec, get_args(hint)[0])}"
    words = []
    for member in _members(hint):
        if member is bool:
            words += ["true", "false"]
        elif member is str:
            words += list(limits["choices"]) or ["a string"]
            words += [limits["form"][0]] if limits["form"] is not None else []
        elif member in (int, float):
            number = "a whole number" if member is int else "a number"
            if limits["at_least"] is not None:
                number += f" of at least {limits['at_least']}"
            if limits["above"] is not None:
                number += f" above {limits['above']}"
            if limits["at_most"] is not None:
                number += f" and at most {limits['at_most']}"
            words.append(number)
        elif member is type(None):
            words.append("null")
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def show(value: Any) -> str:
    """Write a value as YAML and the command line would."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value) if isinstance(value, int | float) else repr(value)


def _kind(value: Any) -> str:
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a floating-point number",
        str: "a string",
        type(None): "null (None)",
    }
    return names.get(type(value), f"of type {type(value).__name__}")
