"""What the benchmarks share: how a table is printed, and a place for what a run writes."""

from __future__ import annotations

import argparse
import math
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import torch


def at_least(least: int) -> Callable[[str], int]:
    """Return a type for argparse: whole numbers from ``least`` on."""

    def whole_number(text: str) -> int:
        with suppress(ValueError):
            if (number := int(text)) >= least:
                return number
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {least}")

    return whole_number


def above_zero(text: str) -> float:
    """Be a type for argparse: finite numbers above 0."""
    with suppress(ValueError):
        if 0 < (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"{text} is not a number above 0")


def part_of(program: str, what: str | None) -> NoReturn:
    """End a file that is no program by itself, with ``--help`` or a usage message.

    Args:
        program: The module that uses it, with arguments.
        what: Its docstring.
    """
    epilog = f"A part of `python -m {program}`, and no program by itself."
    parser = argparse.ArgumentParser(
        description=what, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    parser.error(f"it is no program by itself; run: python -m {program}")


@contextmanager
def scratch() -> Iterator[Path]:
    """Give a folder that is gone afterwards."""
    with TemporaryDirectory() as folder:
        yield Path(folder)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool) -> str:
    """Return a table with its columns lined up: of Markdown, or plain."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    padded = [
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines
    ]
    if not markdown:
        return "\n".join("  ".join(line).rstrip() for line in padded)
    rule = ["-" * width for width in widths]
    return "\n".join(f"| {' | '.join(line)} |" for line in [padded[0], rule, *padded[1:]])


def environment(*packages: str) -> str:
    """Return what a measurement depends on: versions, cores, and how busy the machine is.

    Args:
        packages: Are named with their versions, where they are installed.
    """
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    for package in packages:
        with suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    cores = len(os.sched_getaffinity(0))
    return f"{', '.join(versions)}, {cores} cores, load {os.getloadavg()[0]:.1f}"
