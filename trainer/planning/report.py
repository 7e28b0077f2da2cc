"""What `plan` found, for a person, as JSON and as a picture."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.planning.measuring import Measured
    from trainer.planning.scaling import Row

JSON_FILE, PICTURE_FILE = "plan.json", "plan.png"
_WIDTH = 100

_SPEED: dict[str, Callable[[Row], str]] = {
    "ring ms": lambda row: _ms(row.ring_s),
    "tree ms": lambda row: _ms(row.tree_s),
    "exposed": lambda row: _ms(row.exposed_s),
    "efficiency": lambda row: f"{row.efficiency:.1%}",
    "bucket": lambda row: "null" if row.bucket_cap_mb is None else f"{row.bucket_cap_mb:g}",
}
_RANKS = {"ranks": lambda row: f"{row.ranks:,}{'*' if row.is_extrapolated else ' '}"}
_STRONG: dict[str, Callable[[Row], str]] = {
    **_RANKS,
    "samples": lambda row: f"{row.samples:,}",
    **_SPEED,
    "memory MiB": lambda row: f"{row.memory / 2**20:,.1f}",
}
_WEAK: dict[str, Callable[[Row], str]] = {
    **_RANKS,
    "batch": lambda row: f"{row.global_batch_size:,}",
    "lr": lambda row: "-" if row.learning_rate is None else f"{row.learning_rate:.3g}",
    **_SPEED,
    "failures/day": lambda row: f"{row.failures_per_day:.2g}",
    "save every": lambda row: duration(row.save_every_s),
    "lost": lambda row: f"{row.lost:.2%}",
}


@dataclass(frozen=True)
class PlanReport:
    """A task on 1 to thousands of ranks.

    Attributes:
        title: What was simulated.
        facts: What was measured and assumed, by name, in words.
        strong: The global batch is kept: a rank gets fewer samples the more there are.
        weak: Every rank keeps its samples: the global batch grows, and the learning rate with it.
        notes: What to know about the tables.
        measured: What was measured.
    """

    title: str
    facts: dict[str, str]
    strong: list[Row] = field(repr=False)
    weak: list[Row] = field(repr=False)
    notes: list[str] = field(repr=False)
    measured: Measured = field(repr=False)

    def __str__(self) -> str:
        lines = [self.title]
        for name, text in self.facts.items():
            head = f"  {name:<14}"
            lines += textwrap.wrap(
                text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head)
            )
        lines += ["", "the global batch is kept:", *_table(self.strong, _STRONG)]
        lines += ["", "every rank keeps its samples:", *_table(self.weak, _WEAK), ""]
        lines += [line for note in self.notes for line in textwrap.wrap(note, _WIDTH)]
        return "\n".join([*lines, f"({self.measured.run_dir / JSON_FILE}, {PICTURE_FILE})"])

    def write(self) -> None:
        """Write the tables and the picture into the run's folder."""
        rows = {name: [asdict(row) for row in getattr(self, name)] for name in ("strong", "weak")}
        found = {"title": self.title, "facts": self.facts, **rows, "notes": self.notes}
        run_dir = self.measured.run_dir
        (run_dir / JSON_FILE).write_text(f"{json.dumps(found, indent=2)}\n", encoding="utf-8")
        draw(self, run_dir / PICTURE_FILE)


def duration(seconds: float) -> str:
    """Return seconds in a unit that suits them."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e3:.3g} ms"


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.3g}"


def _table(rows: Sequence[Row], columns: Mapping[str, Callable[[Row], str]]) -> list[str]:
    lines = [list(columns), *([show(row) for show in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.rjust, line, widths)) for line in lines]


def draw(report: PlanReport, path: Path) -> None:
    """Draw the time of a step and the efficiency by the number of ranks."""
    # The object interface: pyplot would choose a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharex=True)
    kept = {"batch kept": report.strong, "samples kept": report.weak}
    most = max(row.ranks for rows in kept.values() for row in rows)
    for color, (name, rows) in zip(("C0", "C1"), kept.items(), strict=True):
        ranks = [row.ranks for row in rows]
        left.plot(ranks, [row.ring_s * 1e3 for row in rows], color, label=f"{name}, ring")
        left.plot(ranks, [row.tree_s * 1e3 for row in rows], f"{color}--", label=f"{name}, tree")
        right.plot(ranks, [row.efficiency for row in rows], color, marker=".", label=name)
    for axes, title in ((left, "step, ms"), (right, "efficiency")):
        axes.axvspan(report.measured.world_size, most, color="0.93", label="extrapolated")
        axes.set_xscale("log")
        axes.set_xlabel("ranks")
        axes.set_title(title)
        axes.legend(fontsize="small")
    left.set_yscale("log")
    right.set_ylim(0, 1.05)
    figure.savefig(path)
