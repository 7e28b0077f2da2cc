"""Warnings, and wording that messages share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

hearers: list[Callable[[str], None]] = []
"""Who is told of every warning, beside whoever reads stderr."""


def warn(text: str) -> None:
    """Warn, on stderr, of something without which training goes on."""
    print(f"WARNING: {text}", file=sys.stderr, flush=True)
    for hear in list(hearers):
        hear(text)


def listed(names: Iterable[str], most: int = 8) -> str:
    """Return the first ``most`` names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def counted(count: int, noun: str) -> str:
    """Return "1 step", "20 steps" or "4 processes"."""
    plural = f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def reason(error: OSError) -> str:
    """Return what an error of the system says, with the file that it is about."""
    if error.strerror is None:
        return str(error)
    return error.strerror + (f" ({error.filename})" if error.filename else "")


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its name if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
