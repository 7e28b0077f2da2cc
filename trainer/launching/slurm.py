"""What SLURM tells the programs that srun starts, in the words of torchrun."""

from __future__ import annotations

from collections.abc import Mapping

VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_JOB_ID")
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # SLURM's numbers for the batch script, an interactive shell, ...
_INTERACTIVE_STEP = 0xFFFFFFFA


def is_srun_task(env: Mapping[str, str]) -> bool:
    """Whether srun started this very program as one of several tasks.

    A batch script and a shell got by salloc or ``srun --pty`` have SLURM's variables too, but
    nobody else runs the program there.
    """
    step = env.get("SLURM_STEP_ID", "")
    return (
        all(name in env for name in VARIABLES)
        and step.isdigit()
        and int(step) < _FIRST_SPECIAL_STEP
        and "SLURM_PTY_PORT" not in env
        and int(env.get("SLURM_STEP_NUM_TASKS", env["SLURM_NTASKS"])) > 1
    )


def is_shell(env: Mapping[str, str]) -> bool:
    """Whether this is a shell in an allocation (salloc, ``srun --pty``), or started from one.

    Nobody queues it again, and one run after another is started there.
    """
    step = env.get("SLURM_STEP_ID", "")
    return (
        "SLURM_PROCID" not in env
        or "SLURM_PTY_PORT" in env
        or (step.isdigit() and int(step) == _INTERACTIVE_STEP)
    )


def num_tasks(env: Mapping[str, str]) -> int:
    """Return how many tasks the allocation has of which this program is no task; 0 if it is one."""
    return 0 if is_srun_task(env) else int(env.get("SLURM_NTASKS", "0"))


def torchrun_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun would have set, from what SLURM did."""
    job, step, node = env["SLURM_JOB_ID"], env.get("SLURM_STEP_ID", "0"), int(env["SLURM_NODEID"])
    tasks = env.get("SLURM_STEP_NUM_TASKS", env["SLURM_NTASKS"])
    per_node = _tasks_per_node(
        env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", tasks))
    )
    found = {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(per_node[node]),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(len(per_node)),
    }
    # Every task must come to the same free port without talking to the others; job and step
    # numbers keep the runs of one machine apart, below the range from which the system gives.
    found["MASTER_PORT"] = env.get("MASTER_PORT") or str(
        15000 + (int(job) + 101 * int(step)) % 10000
    )
    found["MASTER_ADDR"] = env.get("MASTER_ADDR") or _first_host(env)
    return found


def _tasks_per_node(text: str) -> list[int]:
    """Return SLURM's ``"2(x3),1"`` as ``[2, 2, 2, 1]``."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts


def _first_host(env: Mapping[str, str]) -> str:
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    return str(SLURMEnvironment.resolve_root_node_address(hosts))
