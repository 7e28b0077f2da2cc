"""Where a run writes: the folder is chosen on rank 0 and shared by all ranks."""

from __future__ import annotations

import os
import sys
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


def check_resume(config: TrainerConfig) -> None:
    """Refuse ``resume=auto`` where every run gets a new folder.

    Raises:
        ValueError: Saying what to give.
    """
    if config.resume == "auto" and config.run_dir is None and slurm_run_dir() is None:
        raise ValueError(
            "resume=auto looks for checkpoints in run_dir, and every run without one gets a new, "
            "time-stamped folder; set run_dir=<folder of the run to go on with> as well"
        )


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be made or written, without making it.

    Raises:
        ValueError: Saying what stands in the way.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise _cannot_write(folder, f"{there} is not a folder that allows it")


def set_aside(path: Path) -> None:
    """Move what an earlier run left at ``path`` into ``aside/`` beside it, and say so."""
    if not path.exists():
        return
    aside = path.parent / "aside"
    aside.mkdir(exist_ok=True)
    target, number = aside / path.name, 0
    while target.exists():
        number += 1
        target = aside / f"{path.stem}-{number}{path.suffix}"
    path.rename(target)
    print(f"moved {path.name} of an earlier run to {target}", file=sys.stderr)


def _choose(config: TrainerConfig) -> Path:
    check_resume(config)
    of_job = slurm_run_dir()
    if config.run_dir is not None:
        folder = Path(config.run_dir)
    elif of_job is not None:
        folder = Path(of_job)
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
        raise _cannot_write(folder, str(error.strerror)) from error


def _cannot_write(folder: Path, why: str) -> ValueError:
    return ValueError(f"run_dir {folder} cannot be written: {why}; set run_dir=<a folder that can>")
