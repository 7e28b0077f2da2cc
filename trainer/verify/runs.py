"""The two runs that are compared: a few steps on one process, and on several."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from trainer import distributed
from trainer.config import CheckpointConfig, TrainerConfig
from trainer.data.module import DataModule
from trainer.diagnosis.failures import RemoteTraceback
from trainer.launching import ranks
from trainer.launching.launcher import find_launcher, local_ranks
from trainer.launching.rank import Group, Work, in_child
from trainer.launching.starting import threads_per_rank
from trainer.messages import counted
from trainer.task import TaskModule
from trainer.verify.record import Record, load_records
from trainer.verify.rehearsal import RankJob
from trainer.verify.report import Check

PACKAGE = Path(__file__).parents[1]
FIRST = "look at the first FAIL above; this may follow from it"
LONGEST_WAIT_S = 60.0  # for a rank that hangs; a few steps do not take longer


@dataclass
class RunOnce:
    """What came of one of the runs.

    Attributes:
        world_size: The number of processes.
        records: Of the ranks, in order, as far as they came; one that has written none is left out.
        weights: Parameters of rank 0 by name, ``initial`` and ``final``.
        error: Why it failed; None if it did not.
    """

    world_size: int
    records: list[Record]
    weights: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    error: Exception | None = None

    @property
    def name(self) -> str:
        """How many processes, in words."""
        return counted(self.world_size, "process")

    @property
    def first(self) -> Record:
        """Rank 0's record; another one's if rank 0 has left none."""
        return self.records[0]

    @property
    def phase(self) -> str:
        """How far the rank came that came least far: what failed, where the run did."""
        if len(self.records) < self.world_size:
            return "data"
        order = ("data", "start", "steps", "end")
        return min((record.phase for record in self.records), key=order.index)

    @property
    def reason(self) -> str:
        """The error, without the traceback that torch puts into that of a loader worker."""
        error = self.error
        if error is None:
            return ""
        _, from_worker, text = str(error).partition("Original Traceback (most recent call last):")
        if from_worker:
            return text.strip().splitlines()[-1].removeprefix(f"{type(error).__module__}.")
        return f"{type(error).__name__}: {error}".strip()

    @property
    def says_what_to_do(self) -> bool:
        """Whether the error is a message of the Trainer's own, and not of the task or torch."""
        raised_in = re.findall(r'^ *File "(.+?)", line', self.traceback or "", re.MULTILINE)
        own = bool(raised_in) and PACKAGE in Path(raised_in[-1]).parents
        return own and isinstance(self.error, ValueError)

    @property
    def traceback(self) -> str | None:
        """Of the rank that failed."""
        cause = self.error.__cause__ if self.error is not None else None
        return cause.args[0] if isinstance(cause, RemoteTraceback) else None


@dataclass
class Runs:
    """Both runs, and the options they share."""

    config: TrainerConfig
    one: RunOnce
    many: RunOnce

    @property
    def both(self) -> tuple[RunOnce, RunOnce]:
        """The single process first."""
        return self.one, self.many

    @property
    def failed(self) -> list[RunOnce]:
        """Those that failed, the one on several processes first."""
        return [run for run in (self.many, self.one) if run.error is not None]

    @property
    def same_cut(self) -> bool:
        """Whether both runs cut their global batches into the same micro-batches."""
        one, many = (
            {f.place for record in run.records for f in record.forwards} for run in self.both
        )
        return one == many or bool(self.failed)

    def failure(self, place: int, name: str, failed_before: bool = False) -> Check:
        """Return the check that says why a run failed."""
        run = self.failed[0]
        found = f"the run on {run.name} failed: {run.reason}"
        if failed_before:
            advice = FIRST
        elif run.says_what_to_do:
            found, advice = f"the run on {run.name} failed", run.reason
        elif len(self.failed) == 1:
            alone = "one process" if run is self.many else self.many.name
            advice = f"the same works on {alone}: look for what depends on rank or world size"
        else:
            advice = "one process fails too, so it is no matter of ranks: make a fit there work"
        shown = "; the traceback is below" if run.traceback else ""
        return Check(place, name, False, found, f"{advice}{shown}")

    @property
    def facts(self) -> dict[str, Any]:
        """What the ranks knew of the run on several processes."""
        return self.many.first.facts if self.many.records else {}


def run_both(
    config: TrainerConfig,
    on_rank: Callable[..., Any],
    task: TaskModule,
    data: DataModule,
    steps: int,
    folder: Path,
) -> Runs:
    """Run a few steps on several processes, then on one.

    Both are processes of their own, so that nothing of the caller's changes.

    Args:
        config: The user's options.
        on_rank: Runs a job on a rank, as for a fit.
        task: What to train; it stays as it is.
        data: Where the samples come from.
        steps: How many, unless the run is shorter.
        folder: For what the ranks leave.

    Raises:
        ValueError: If ranks cannot be started from here.
    """
    check_can_start(config)
    kind, world_size = choose_ranks(config)
    quiet = replace(
        config,
        accelerator=kind,
        timeout_s=min(config.timeout_s, LONGEST_WAIT_S),
        resume=None,
        accept_changes=[],
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        profile=None,
        # What is found would change no more than the order of sums; finding it sends a little.
        bucket_cap_mb=None if config.bucket_cap_mb == "auto" else config.bucket_cap_mb,
        checkpoint=CheckpointConfig(),  # a monitor would miss its metric
        run_dir=str(folder),
    )
    threads = threads_per_rank(config, world_size)

    def run_once(world_size: int, options: TrainerConfig) -> RunOnce:
        place = folder / str(world_size)
        place.mkdir()
        job = RankJob(options, place, steps)
        work = Work(on_rank, (job, False, task, data), job.where)
        group = Group(world_size, kind, threads, options.timeouts_s)
        error = None
        on = counted(world_size, "process")
        print(f"verify: {counted(steps, 'step')} on {on} ...", flush=True)
        try:
            ranks.run(group, work)
        except Exception as failure:  # is what the report is about
            error = failure
        weights = {
            name: torch.load(place / name, map_location="cpu", weights_only=True)
            for name in ("initial", "final")
            if (place / name).exists()
        }
        return RunOnce(world_size, load_records(place, world_size), weights, error)

    many = run_once(world_size, quiet)
    # The single process cuts as the ranks did, so that dropout draws the same.
    facts = many.first.facts if many.records else {}
    cut = "global_batch_size" if task.global_loss else "micro_batch_size"  # it takes all at once
    one = run_once(1, replace(quiet, micro_batch_size=facts.get(cut) or config.micro_batch_size))
    return Runs(replace(config, accelerator=kind), one, many)


def choose_ranks(config: TrainerConfig) -> tuple[str, int]:
    """Return ``cpu`` or ``cuda``, and how many processes to compare with one."""
    kind = distributed.accelerator(config.accelerator)
    if kind == "cuda" and config.accelerator == "auto" and torch.cuda.device_count() < 2:
        kind = "cpu"  # two ranks cannot share a device
    given = local_ranks(config.devices, kind)
    return kind, local_ranks(max(given, 2), kind)


def check_can_start(config: TrainerConfig) -> None:
    """Refuse where another program has started the ranks.

    Raises:
        ValueError: Saying how to start it.
    """
    launcher, reason = find_launcher(config.launcher, os.environ)
    if launcher != "self" or in_child():
        found = "this is a rank already" if in_child() else f"{launcher}: {reason}"
        raise ValueError(
            f"verify compares runs on one and on several processes, which it starts itself, but "
            f"{found}; start the program without a launcher, on one machine"
        )
    if config.num_nodes > 1:
        raise ValueError(
            f"num_nodes={config.num_nodes}: verify starts processes on its own machine only; set "
            "num_nodes=1, and devices to the number of processes to compare with one"
        )
