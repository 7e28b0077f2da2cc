"""`Trainer.verify`: run a few steps twice, compare, and report."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.config import TrainerConfig
from trainer.data.module import DataModule
from trainer.messages import counted
from trainer.run_dir import choose_run_dir
from trainer.task import TaskModule
from trainer.verify.outcome import check_losses, check_weights
from trainer.verify.report import Check, VerifyReport
from trainer.verify.resources import check_collectives, check_memory
from trainer.verify.runs import Runs, check_can_start, run_both
from trainer.verify.samples import check_batch, check_samples
from trainer.verify.start import check_start


def verify(
    config: TrainerConfig,
    on_rank: Callable[..., Any],
    task: TaskModule,
    data: DataModule,
    steps: int,
) -> VerifyReport:
    """Compare one process with several, and write the report into the run's folder.

    Args:
        config: The options of the fit to verify.
        on_rank: Runs a job on a rank, as for a fit.
        task: What would be trained; it stays as it is.
        data: Where the samples come from.
        steps: How many steps to run, at most ``max_steps``.

    Raises:
        ValueError: If ranks cannot be started from here.
    """
    check_can_start(config)
    steps = min(steps, config.max_steps or steps)
    run_dir = choose_run_dir(config)
    with tempfile.TemporaryDirectory(prefix="trainer-verify-") as folder:
        runs = run_both(config, on_rank, task, data, steps, Path(folder))
    report = VerifyReport(
        title=_title(type(task).__name__, runs),
        world_size=runs.many.world_size,
        checks=_checks(runs),
        losses={run.world_size: run.first.losses if run.records else [] for run in runs.both},
        tracebacks=[run.traceback for run in runs.failed[:1] if run.traceback],
        run_dir=run_dir,
    )
    report.write()
    return report


def _checks(runs: Runs) -> list[Check]:
    """Return the checks in order; those that may follow from earlier ones know if one failed."""
    checks = [*check_samples(runs), *check_start(runs), *check_batch(runs)]
    checks += check_losses(runs, failed_before=_failed(checks))
    checks += check_weights(runs, failed_before=_failed(checks))
    return [*checks, *check_memory(runs), *check_collectives(runs)]


def _failed(checks: list[Check]) -> bool:
    return any(check.passed is False for check in checks)


def _title(task: str, runs: Runs) -> str:
    config, facts = runs.config, runs.facts
    mode = ", reproducible" if config.reproducible else ""
    size = facts.get("global_batch_size")
    steps = max((len(run.first.losses) for run in runs.both if run.records), default=0)
    return (
        f"{task} on {runs.one.name} and on {runs.many.name} "
        f"({config.accelerator}, {config.precision}{mode}): {counted(steps, 'step')}"
        + (f" of {size} samples" if size else "")
    )
