"""What the benchmarks share: how a table is printed, and a place for what a run writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


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
