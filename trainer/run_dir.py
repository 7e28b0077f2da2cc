"""Where a run writes: the folder is chosen on rank 0 and shared by all ranks."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from trainer import distributed
from trainer.checkpoint.files import free_name
from trainer.config import TrainerConfig
from trainer.launching import attempt
from trainer.launching.attempt import slurm_job
from trainer.urls import check_protocol, is_url, local_folder


def choose_run_dir(config: TrainerConfig) -> Path:
    """Return the run's folder on this machine, made and writable; must be called on every rank.

    It is ``config.run_dir``, or ``runs/s3/bucket/run`` for ``s3://bucket/run``, which is printed;
    under SLURM ``runs/<job name>-<job id>``, which a requeued job finds again; else
    ``runs/<time>``.

    Raises:
        ValueError: If it cannot be written, or if ``resume=auto`` is asked of a new folder.
    """
    chosen = _choose(config) if distributed.rank() == 0 else None
    shared = distributed.broadcast_object(chosen)
    assert shared is not None
    return shared


def slurm_run_dir() -> str | None:
    """Return the folder of the SLURM job that this process is part of, if there is one."""
    job = slurm_job()
    name = os.environ.get("SLURM_JOB_NAME", "job").replace("/", "_")
    return f"runs/{name}-{job}" if job else None


def folder_of(run_dir: str) -> Path:
    """Return where the files of a run lie on this machine."""
    return local_folder(run_dir) if is_url(run_dir) else Path(run_dir)


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


def check_writable(run_dir: str) -> None:
    """Refuse a folder or url that cannot be written, without making it.

    Raises:
        ValueError: Saying what stands in the way.
    """
    if is_url(run_dir):
        check_protocol(run_dir)
    folder = folder_of(run_dir)
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        _try_writing(there)
    except NotADirectoryError:
        raise _cannot_write(folder, f"{there} is not a folder") from None
    except OSError as error:
        raise _cannot_write(folder, str(error.strerror)) from None


def set_aside(path: Path) -> None:
    """Move what an earlier run left at ``path`` into ``aside/`` beside it, and say so."""
    if not path.exists():
        return
    aside = path.parent / "aside"
    aside.mkdir(exist_ok=True)
    target = aside / free_name(path.name, lambda name: (aside / name).exists())
    path.rename(target)
    whose = "start of this run" if attempt.current().is_restart else "run"
    print(f"moved {path.name} of an earlier {whose} to {target}", file=sys.stderr)


def _choose(config: TrainerConfig) -> Path:
    check_resume(config)
    of_job = slurm_run_dir()
    if config.run_dir is not None:
        folder = folder_of(config.run_dir)
        if is_url(config.run_dir):
            check_protocol(config.run_dir)
            print(f"checkpoints: {config.run_dir}; all other files: {folder}", flush=True)
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
        _try_writing(folder)
    except OSError as error:
        raise _cannot_write(folder, str(error.strerror)) from error
    return folder


def _try_writing(folder: Path) -> None:
    """Write a byte: permissions do not tell of /proc, nor an empty file of a full disk."""
    with tempfile.TemporaryFile(buffering=0, dir=folder) as file:
        file.write(b"\0")


def _cannot_write(folder: Path, why: str) -> ValueError:
    return ValueError(f"run_dir {folder} cannot be written: {why}; set run_dir=<a folder that can>")
