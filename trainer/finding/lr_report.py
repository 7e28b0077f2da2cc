"""What `find_lr` found, for a person, as JSON and as a picture."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.finding.curve import is_falling, smoothed, steepest

JSON_FILE, PICTURE_FILE = "find_lr.json", "find_lr.png"
_WIDTH = 100
_SHOWN = 15  # rows of the table that a person gets


@dataclass(frozen=True)
class LRReport:
    """A loss over rising learning rates, and the rate to begin with.

    The suggestion is the rate at which the smoothed loss falls fastest, over the logarithm of the
    rate (Gugger 2018, "How do you find a good learning rate").

    Attributes:
        title: What was trained.
        rates: The learning rate of each step: that of the group that has the highest.
        losses: The loss of each step, over the whole global batch.
        smoothed: Its moving average.
        suggestion: The rate to begin with; None if the loss never falls.
        notes: What to know about it.
        groups: By the name of a parameter group, its share of the rate.
        run_dir: Where the files are.
    """

    title: str
    rates: list[float] = field(repr=False)
    losses: list[float] = field(repr=False)
    smoothed: list[float] = field(repr=False)
    suggestion: float | None
    notes: list[str] = field(repr=False)
    groups: dict[str, float] = field(repr=False)
    run_dir: Path

    @classmethod
    def of(
        cls,
        title: str,
        rates: Sequence[float],
        losses: Sequence[float],
        groups: Mapping[str, float],
        has_diverged: bool,
        run_dir: Path,
    ) -> LRReport:
        """Look at a sweep."""
        curve = smoothed(losses)
        found = steepest(rates, curve)
        notes = []
        if not losses:
            notes.append(
                "The loss of the first step was not finite, or there was none: look at the task, "
                "with detect_anomaly=true in a fit."
            )
        elif found is None:
            notes.append(
                "The smoothed loss does not fall before it rises: look at lower rates "
                "(find_lr.min_lr), in more steps or larger global batches (less noise), or for a "
                "mistake in the task."
            )
        elif len(groups) > 1:
            shares = ", ".join(f"{name} {rates[found] * s:.3g}" for name, s in groups.items())
            notes.append(f"The parameter groups are scaled together: {shares}.")
        if found is not None and not has_diverged and is_falling(curve):
            notes.append("The loss still falls at the highest rate: look further (find_lr.max_lr).")
        suggestion = None if found is None else rates[found]
        return cls(
            title, list(rates), list(losses), curve, suggestion, notes, dict(groups), run_dir
        )

    def __str__(self) -> str:
        lines = [self.title, "", "      lr      loss  smoothed"]
        shown = set(range(0, len(self.rates), max(1, len(self.rates) // _SHOWN)))
        if self.suggestion is not None:
            shown.add(self.rates.index(self.suggestion))
        for number in sorted(shown):
            rate = self.rates[number]
            mark = "  <- falls fastest" if rate == self.suggestion else ""
            values = f"{rate:8.2e}  {self.losses[number]:8.4g}  {self.smoothed[number]:8.4g}"
            lines.append(f"{values}{mark}")
        found = "none" if self.suggestion is None else f"{self.suggestion:.3g}"
        lines += ["", f"suggestion  {found}"]
        lines += [
            line
            for note in self.notes
            for line in textwrap.wrap(note, _WIDTH, break_on_hyphens=False)
        ]
        picture = f", {PICTURE_FILE}" if self.losses else ""
        return "\n".join([*lines, f"({self.run_dir / JSON_FILE}{picture})"])

    def write(self) -> None:
        """Write the table and the picture into the run's folder."""
        names = ("title", "suggestion", "notes", "groups", "rates", "losses", "smoothed")
        found: dict[str, Any] = {name: getattr(self, name) for name in names}
        path = self.run_dir / JSON_FILE
        path.write_text(f"{json.dumps(found, indent=2)}\n", encoding="utf-8")
        if self.losses:
            self._draw(self.run_dir / PICTURE_FILE)

    def _draw(self, path: Path) -> None:
        # The object interface: pyplot would choose a backend for the whole process.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        axes.plot(self.rates, self.losses, color="0.75", label="loss")
        axes.plot(self.rates, self.smoothed, "C0", label="smoothed")
        if self.suggestion is not None:
            label = f"falls fastest: {self.suggestion:.3g}"
            axes.axvline(self.suggestion, color="C1", linestyle="--", label=label)
        low, high = min(self.losses), max(self.smoothed)  # a few losses may be far beyond
        axes.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low))
        axes.set_xscale("log")
        axes.set_xlabel("learning rate")
        axes.set_title(self.title)
        axes.legend()
        figure.savefig(path)
