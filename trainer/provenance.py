"""What a run is made of: its code, and where it runs."""

from __future__ import annotations

import inspect
import os
import platform
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from trainer.run import Run

_TIMEOUT_S = 10


def code_version(task: nn.Module) -> dict[str, Any]:
    """Return the git ``commit`` of the task's code, and whether it is ``dirty``: differs from that.

    The code is that around the file of the task's class, else that of the working directory. Where
    there is no git, or no commit, the result is empty.
    """
    places = [Path.cwd()]
    with suppress(OSError, TypeError):  # a class that was typed into a notebook
        own = task.module if getattr(task, "_speaks_for_another", False) else task
        places.insert(0, Path(inspect.getfile(type(own))).resolve().parent)
    for place in places:
        if commit := _git(place, "rev-parse", "HEAD"):
            changes = _git(place, "status", "--porcelain")
            return {"commit": commit, "dirty": changes != ""}
    return {}


def environment(run: Run) -> dict[str, Any]:
    """Return where a run takes place: versions, world size, hosts and device."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "world_size": run.world_size,
        "hosts": ", ".join(run.hosts),
        "device": run.device,
    }


def _git(place: Path, *command: str) -> str | None:
    """Return what git says, or None where it has nothing to say."""
    try:
        done = subprocess.run(
            ["git", "-C", str(place), *command],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # it only looks
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
