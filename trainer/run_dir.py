"""Where a run writes: the folder is chosen on rank 0 and shared by all ranks."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from trainer import distributed
from trainer.config import TrainerConfig


def choose_run_dir(config: TrainerConfig) -> Path:
    """Return the run's folder, made and writable; must be called on every rank.

    It is ``config.run_dir``; under SLURM ``runs/<job name>-<job id>``, which a requeued job finds
    again; else ``runs/<time>``.

    Raises:
        ValueError: If it cannot be written, or if ``resume=auto`` is asked of a new folder.
    """
    chosen = _choose(config) if distributed.rank() == 0 else None
    shared = distributed.broadcast_object(chosen)
    assert shared is not None
    return shared


def slurm_run_dir() -> str | None:
    """Return the folder of the SLURM job that this process is part of, if there is one."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"runs/{os.environ.get('SLURM_JOB_NAME', 'job')}-{job}" if job else None


def _choose(config: TrainerConfig) -> Path:
    of_job = slurm_run_dir()
    if config.run_dir is not None:
        folder = Path(config.run_dir)
    elif of_job is not None:
        folder = Path(of_job)
    elif config.resume == "auto":
        raise ValueError(
            "resume=auto looks for checkpoints in run_dir, but run_dir is not set, so every run "
            "gets a new folder; set run_dir=<folder of the run to go on with>"
        )
    else:
        return _new_folder()
    return _writable(folder.absolute())


def _new_folder() -> Path:
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    parent = _writable(Path("runs").absolute())
    for number in range(1000):  # several runs may start within one second
        folder = parent / (stamp if number == 0 else f"{stamp}_{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise ValueError(f"{parent} already has 1000 runs of {stamp}; set run_dir=<another folder>")


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ValueError(
            f"run_dir {folder} cannot be written: {error.strerror}; set run_dir=<a folder that can>"
        ) from error
