"""What `find_micro_batch_size` found, for a person and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from trainer import distributed
from trainer.data.plan import GlobalBatchPlan, ceil_div
from trainer.messages import counted

JSON_FILE = "find_micro_batch_size.json"
_WIDTH = 100


class Trial(NamedTuple):
    """One size that was tried.

    Attributes:
        size: Samples.
        out: The ranks that it was too much for.
        peaks_mb: The most memory of each rank, in MiB.
    """

    size: int
    out: list[int]
    peaks_mb: list[float]


@dataclass(frozen=True)
class MicroBatchReport:
    """How many samples a rank can take at once, and what to make of it.

    Attributes:
        title: What was tried.
        largest: The largest micro-batch that fits on every rank; 0 if not even one sample does.
        micro_batch_size: What to write: the smallest size that needs no more micro-batches per step
            than ``largest``, so that all are about equal. None where nothing fits.
        accumulation_steps: The micro-batches of a rank in a step, then.
        global_batch_size: Samples per step.
        world_size: The ranks that tried.
        limit_mb: What each of them was allowed, in MiB.
        trials: What was tried, in order.
        notes: What to know about it.
        run_dir: Where the file is.
    """

    title: str
    largest: int
    micro_batch_size: int | None
    accumulation_steps: int | None
    global_batch_size: int
    world_size: int
    limit_mb: float = field(repr=False)
    trials: list[Trial] = field(repr=False)
    notes: list[str] = field(repr=False)
    run_dir: Path = field(repr=False)

    @classmethod
    def of(
        cls,
        title: str,
        global_batch_size: int,
        largest: int,
        trials: Sequence[Trial],
        limit_mb: float,
        reproducible: bool,
        run_dir: Path,
    ) -> MicroBatchReport:
        """Look at what was tried; on every rank."""
        world_size, notes = distributed.world_size(), []
        share = ceil_div(global_batch_size, world_size)
        size = steps = None
        if largest:
            size = ceil_div(share, ceil_div(share, largest))
            plan = GlobalBatchPlan(global_batch_size, size)
            steps = plan.accumulation_steps(global_batch_size, world_size)
        if largest == share:
            notes.append(
                "All samples of a rank fit at once, which is what micro_batch_size=null does; for "
                "larger micro-batches raise global_batch_size."
            )
        if not largest:
            notes.append(
                "Not even one sample fits: try precision=bf16, a smaller model, or an optimizer "
                "with less state."
            )
        if reproducible:
            notes.append(
                "reproducible=true puts gradients of micro-batches aside, which is not in these "
                "numbers: leave room for a few times the size of the weights."
            )
        return cls(
            title,
            largest,
            size,
            steps,
            global_batch_size,
            world_size,
            limit_mb,
            list(trials),
            notes,
            run_dir,
        )

    def __str__(self) -> str:
        lines = [
            f"{self.title}: {self.limit_mb:,.0f} MiB for each of "
            f"{counted(self.world_size, 'rank')}",
            "",
            "samples  most MiB",
        ]
        for size, out, peaks in self.trials:
            ranks = ", ".join(map(str, out))
            mark = f"  too much for rank {ranks}" if out else ""
            lines.append(f"{size:7,}  {max(peaks):8,.0f}{mark}")
        lines.append("")
        if self.micro_batch_size is not None:
            micros = counted(self.accumulation_steps or 1, "micro-batch")
            lines += [
                f"largest  {self.largest}",
                f"write    trainer.micro_batch_size={self.micro_batch_size}",
                f"then     a global batch of {self.global_batch_size} is {micros} on each rank, of "
                "about the same size",
            ]
        for note in self.notes:
            lines += textwrap.wrap(note, _WIDTH, break_on_hyphens=False)
        return "\n".join([*lines, f"({self.run_dir / JSON_FILE})"])

    def write(self) -> None:
        """Write it into the run's folder."""
        found = asdict(self) | {"trials": [t._asdict() for t in self.trials]}
        del found["run_dir"]
        path = self.run_dir / JSON_FILE
        path.write_text(f"{json.dumps(found, indent=2)}\n", encoding="utf-8")
