"""What `verify` found, for a person, as JSON and as a picture."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.messages import counted

JSON_FILE, PICTURE_FILE = "verify.json", "verify.png"
_WIDTH = 100
_ROWS = 8  # of the table of losses


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        place: 1 to 7: trouble is looked for in this order.
        name: What was looked at.
        passed: Whether it is as it should be; None if the run did not come so far.
        found: What was found, or the reason.
        advice: What to do about it.
    """

    place: int
    name: str
    passed: bool | None
    found: str
    advice: str = ""


@dataclass(frozen=True)
class VerifyReport:
    """The same few steps on one process and on several, compared.

    Attributes:
        title: What was compared.
        world_size: The larger number of processes.
        checks: In the order in which trouble is looked for.
        losses: The loss of each step, by number of processes.
        tracebacks: Of the runs that failed.
        run_dir: Has ``verify.json`` and ``verify.png``.
    """

    title: str
    world_size: int
    checks: list[Check] = field(repr=False)
    losses: dict[int, list[float | None]] = field(repr=False)
    tracebacks: list[str] = field(repr=False)
    run_dir: Path

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    @property
    def failed(self) -> list[Check]:
        """The checks that failed; the first one is the one to look at first."""
        return [check for check in self.checks if check.passed is False]

    def __str__(self) -> str:
        blocks = [self.title, *self._lines(), *self.tracebacks, self._verdict()]
        return "\n".join(blocks)

    def write(self) -> None:
        """Write the report and the picture into ``run_dir``."""
        found = {
            "passed": self.passed,
            "title": self.title,
            "world_size": self.world_size,
            "checks": [asdict(check) for check in self.checks],
            "losses": self.losses,
            "tracebacks": self.tracebacks,
        }
        text = json.dumps(found, indent=2)
        (self.run_dir / JSON_FILE).write_text(f"{text}\n", encoding="utf-8")
        draw(self, self.run_dir / PICTURE_FILE)

    def _lines(self) -> list[str]:
        width = max(len(check.name) for check in self.checks)
        lines = []
        for check in self.checks:
            mark = {True: "pass", False: "FAIL", None: "  - "}[check.passed]
            head = f"  {mark}  {check.place} {check.name:<{width}}  "
            indent = " " * len(head)
            lines += textwrap.wrap(
                check.found, _WIDTH, initial_indent=head, subsequent_indent=indent
            )
            if check.advice:
                lines += textwrap.wrap(
                    check.advice,
                    _WIDTH,
                    initial_indent=f"{indent}-> ",
                    subsequent_indent=f"{indent}   ",
                )
            if check.name == "loss curves":
                lines += [indent + row for row in self._table()]
        return lines

    def _table(self) -> list[str]:
        """Return the two curves at a few steps, side by side."""
        pairs = list(zip(*self.losses.values(), strict=False))
        if not pairs:
            return []
        names = [counted(count, "process") for count in self.losses]
        last = len(pairs) - 1
        chosen = sorted({round(last * i / (_ROWS - 1)) for i in range(_ROWS)})
        rows = ["step  " + "  ".join(f"{name:>12}" for name in names)]
        for index in chosen:
            values = ["none" if loss is None else f"{loss:.6g}" for loss in pairs[index]]
            rows.append(f"{index + 1:>4}  " + "  ".join(f"{value:>12}" for value in values))
        return rows

    def _verdict(self) -> str:
        where = f"{self.run_dir / JSON_FILE}, {PICTURE_FILE}"
        if not self.failed:
            passed = sum(check.passed is True for check in self.checks)
            rest = len(self.checks) - passed
            return f"verified: {passed} checks passed{f', {rest} not made' * (rest > 0)} ({where})"
        first = self.failed[0]
        count = f"{len(self.failed)} of {len(self.checks)} checks failed"
        return f"FAILED: {count}; look first at {first.place} {first.name} ({where})"


def draw(report: VerifyReport, path: Path) -> None:
    """Draw the two loss curves, and below them how far they are apart."""
    # The object interface: pyplot would choose a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    styles: tuple[dict[str, Any], ...] = (
        {"linewidth": 4, "alpha": 0.4},
        {"linewidth": 1.5, "marker": "."},
    )
    for (count, losses), style in zip(report.losses.items(), styles, strict=True):
        values = [float("nan") if loss is None else loss for loss in losses]
        upper.plot(range(1, len(values) + 1), values, label=counted(count, "process"), **style)
    upper.set_ylabel("loss")
    upper.set_title("passed" if report.passed else f"FAILED: {report.failed[0].name}")
    if any(report.losses.values()):
        upper.legend()
    pairs = zip(*report.losses.values(), strict=False)
    apart = [float("nan") if None in pair else abs(pair[1] - pair[0]) for pair in pairs]
    lower.plot(range(1, len(apart) + 1), apart, marker=".")
    lower.set_ylabel("difference")
    lower.set_xlabel("step")
    lower.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path)
