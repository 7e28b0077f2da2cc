"""Sweeps: what is refused before one starts, and how a job of one fails."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from hydra.errors import CompactHydraException

from trainer.diagnosis.failures import shown
from trainer.run_dir import check_writable

_MEASURED = ("fit", "validate", "test")  # the modes that return metrics


class JobFailed(CompactHydraException):
    """A job that failed and has said why; Hydra prints such an error in one line."""


def check_sweep(cfg: Mapping[str, Any], hydra: Any) -> None:
    """Refuse a sweep whose jobs would get in each other's way, or bring its sweeper nothing.

    Args:
        cfg: The config of a job.
        hydra: Hydra's own.

    Raises:
        ValueError: Saying what to change.
    """
    sweep_dir = str(hydra._get_node("sweep")._get_node("dir")._value())
    check_writable(sweep_dir.partition("${")[0] or ".")
    chosen = hydra.runtime.choices
    sweeper, launcher = chosen["hydra/sweeper"], chosen["hydra/launcher"]
    wanted = cfg.get("optimized_metric")
    if sweeper != "basic" and wanted is None and cfg.get("mode", "fit") in _MEASURED:
        raise ValueError(
            f"hydra/sweeper={sweeper} goes by a number that each job returns; name the metric: "
            "optimized_metric=val/loss"
        )
    tasks = hydra.launcher.get("tasks_per_node", 1)
    if launcher == "submitit_local" and tasks != 1:
        raise ValueError(
            f"hydra.launcher.tasks_per_node={tasks} with submitit_local: that would be {tasks} "
            "runs in one folder, because nobody joins these processes; leave it out and set "
            f"trainer.devices={tasks}"
        )


def check_run_dir(run_dir: str | None) -> None:
    """Refuse one folder for all jobs of a sweep.

    Raises:
        ValueError: Saying what to set instead.
    """
    if run_dir is not None:
        raise ValueError(
            f"trainer.run_dir={run_dir} with --multirun: every job would write there; set "
            "hydra.sweep.dir to a folder, below which each job gets one of its own"
        )


def fail_job(error: Exception) -> JobFailed:
    """Show at once why this job failed; return what ends it."""
    from hydra.core.hydra_config import HydraConfig

    if isinstance(error, JobFailed):
        return error
    job = HydraConfig.get().job
    name = f"job {job.num}" + (f" ({job.override_dirname})" if job.override_dirname else "")
    print(f"{name} failed:\n{shown(error)}", end="", file=sys.stderr, flush=True)
    return JobFailed(f"job {job.num} failed: {type(error).__name__}: {error}")
