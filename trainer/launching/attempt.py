"""Which attempt of a launch this process takes part in: what was launched may be started again.

By the supervisor of the ranks, by torchrun, or by SLURM, for which a requeued job is the same job.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from trainer.launching import slurm


class Attempt(NamedTuple):
    """One start of the ranks.

    Attributes:
        launch: Names what was launched; the same at every attempt. None where nobody would start
            the ranks again.
        number: How often the ranks were started again, in a SLURM job since its last requeue.
        requeues: How often SLURM has requeued the job.
    """

    launch: str | None = None
    number: int = 0
    requeues: int = 0

    @property
    def is_restart(self) -> bool:
        """Whether other attempts came before this one."""
        return self.number + self.requeues > 0


_entered = Attempt()


def current() -> Attempt:
    """Return the attempt that this process takes part in."""
    job = slurm_job()
    if job is None:
        return _entered
    requeues = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    return Attempt(f"SLURM job {job}", _entered.number, requeues)


def enter(attempt: Attempt) -> None:
    """Take part in ``attempt`` from now on."""
    global _entered
    _entered = attempt


def slurm_job() -> str | None:
    """Return the id of the SLURM job that this process is part of, the same after a requeue.

    A task of an array is named by its place there, as SLURM itself does: ``17_3``. In a shell that
    SLURM has given there is no such job.
    """
    env = os.environ
    if slurm.is_shell(env):
        return None
    if "SLURM_ARRAY_JOB_ID" in env and "SLURM_ARRAY_TASK_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID")
