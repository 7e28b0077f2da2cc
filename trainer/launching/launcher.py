"""Who starts the ranks: this process, torchrun, SLURM; and how a job runs on all of them.

A process that starts ranks itself forks them where that is safe: they share its imports and its
data, and start at once. Elsewhere (CUDA already in use, no Linux) it starts fresh interpreters,
which get the job by cloudpickle. The environment variable ``TRAINER_START_METHOD`` (``fork`` or
``fresh``) overrides the choice, for a process whose other libraries do not survive a fork.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainer import distributed
from trainer.compiling import prepare_to_compile
from trainer.config import TrainerConfig
from trainer.launching import machines, ranks, slurm, starting
from trainer.launching.joining import run_as_rank
from trainer.launching.machines import Machine
from trainer.launching.rank import Group, Work, in_child
from trainer.launching.starting import num_threads, threads_per_rank
from trainer.lazy_dynamo import defer_dynamo
from trainer.messages import counted

_STARTING = ("self", "kubernetes")  # under these, this process starts the ranks of its machine
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def launch(
    job: Callable[..., Any],
    *args: Any,
    config: TrainerConfig,
    where: Callable[[], str] = lambda: "",
    can_stop: bool = False,
) -> Any:
    """Run ``job(*args)`` on every rank, with the process group up.

    Args:
        job: What each rank runs.
        *args: Its arguments.
        config: Decides how many ranks there are, who starts them, and on which devices.
        where: Called in a rank that fails; says how far it had come ("step 12").
        can_stop: Whether ``job`` saves and stops when a signal asks it to (see ``stopping.py``).

    Returns:
        What ``job`` returned on rank 0; under a launcher, None on the other ranks; where every
        machine starts its own ranks, what it returned on the first one of them. One rank alone runs
        without a process group, and in this process unless it may have to be started again.

    Raises:
        ValueError: If the ranks asked for cannot be had here.
        Exception: What ``job`` raised on the first rank that failed. Its cause shows that
            rank's traceback.
        RankError: If that rank was killed, exited or did not answer, or its exception cannot be
            pickled.
    """
    if in_child():
        return job(*args)
    defer_dynamo()
    prepare_to_compile(config)
    kind = distributed.accelerator(config.accelerator)
    launcher, reason = find_launcher(config.launcher, os.environ)
    if launcher not in _STARTING:
        return run_as_rank(job, args, config, where, kind, launcher, reason, can_stop)
    machine = _machine(launcher, config)
    count = local_ranks((machine and machine.devices) or config.devices, kind)
    if machine is not None and config.max_restarts:
        raise ValueError(_restarts_of_machines(config))
    if machine is not None or count > 1 or config.max_restarts:
        return _start_ranks(Work(job, args, where), config, kind, count, can_stop, machine, reason)
    print(f"launcher: 1 process, this one{_ignored(os.environ)}; {kind}", flush=True)
    with num_threads(threads_per_rank(config, 1)):
        return job(*args)


def starts_ranks(config: TrainerConfig) -> bool:
    """Whether this process starts all the ranks, or is the only one."""
    is_alone = find_launcher(config.launcher, os.environ)[0] == "self" and config.num_nodes == 1
    return not in_child() and is_alone


def this_machine(config: TrainerConfig) -> Machine | None:
    """Return this machine's place among several of which each starts its own ranks.

    Returns:
        None if this process starts all ranks, or none.

    Raises:
        ValueError: If nobody tells what it has to know of the others, or if that contradicts the
            options.
    """
    return _machine(find_launcher(config.launcher, os.environ)[0], config)


def is_one_of_several(options: Mapping[str, Any]) -> bool:
    """Whether this process is one of several that were started from outside: ranks, or machines.

    Args:
        options: Of the Trainer, as far as they are known.

    Raises:
        ValueError: If what the environment tells is no number.
    """
    return _number_outside(options) is not None


def speaks_for_all(options: Mapping[str, Any]) -> bool:
    """Whether this process is the first of several that were started from outside, or alone.

    Args:
        options: Of the Trainer, as far as they are known.

    Raises:
        ValueError: If what the environment tells is no number.
    """
    return not _number_outside(options)


def find_launcher(choice: str, env: Mapping[str, str]) -> tuple[str, str]:
    """Return who starts the ranks, and the reason in a few words.

    Args:
        choice: The option ``launcher``: auto, self, torchrun, slurm or kubernetes.
        env: The environment variables to look at.

    Returns:
        ``"self"``, ``"torchrun"``, ``"slurm"``, ``"kubernetes"`` (each pod starts its own), or
        ``"script"`` where a process group is up already; and why.

    Raises:
        ValueError: If a launcher is asked for that did not start this process.
    """
    if choice == "self":
        return "self", "launcher=self"
    if choice == "torchrun":
        missing = [name for name in (*_TORCHRUN, "MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing:
            raise ValueError(
                f"launcher=torchrun, but torchrun did not start this process: {', '.join(missing)} "
                "not set; start it with torchrun, or use launcher=auto"
            )
        return "torchrun", "launcher=torchrun"
    if choice == "slurm":
        missing = [name for name in slurm.VARIABLES if name not in env]
        if missing:
            raise ValueError(
                f"launcher=slurm, but srun did not start this process: {', '.join(missing)} not "
                "set; start it with srun, or use launcher=auto"
            )
        return "slurm", "launcher=slurm"
    if choice == "kubernetes":
        if not machines.is_pod(env):
            raise ValueError(
                "launcher=kubernetes, but this is no pod of a PyTorchJob or TrainJob with several: "
                "KUBERNETES_SERVICE_HOST with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or "
                "with PET_NNODES, are not set (or torchrun started this); use launcher=auto"
            )
        return "kubernetes", "launcher=kubernetes"
    if "TORCHELASTIC_RUN_ID" in env and all(name in env for name in _TORCHRUN):
        return "torchrun", "TORCHELASTIC_RUN_ID is set"
    if slurm.is_srun_task(env):
        return "slurm", f"srun started this process as task {env['SLURM_PROCID']}"
    if distributed.is_initialized():
        return "script", "it has set up a process group"
    if machines.is_pod(env):
        named = "PET_NNODES" if "PET_NNODES" in env else "RANK"
        return "kubernetes", f"a pod in which {named} is set"
    return "self", "no launcher"


def local_ranks(devices: int | str, kind: str) -> int:
    """Return how many ranks this process is to start.

    Raises:
        ValueError: If there are fewer CUDA devices.
    """
    available = torch.cuda.device_count() if kind == "cuda" else starting.cores()
    if devices == "auto":
        return available
    count = int(devices)
    if kind == "cuda" and count > available:
        raise ValueError(
            f"devices={count}, but this machine shows {available} CUDA device(s); use "
            f"devices={available} or auto, or accelerator=cpu to train on the processor"
        )
    return count


def _machine(launcher: str, config: TrainerConfig) -> Machine | None:
    if launcher == "kubernetes":
        return machines.pod(os.environ, config)
    if launcher != "self" or config.num_nodes == 1:
        return None
    machine = machines.by_hand(os.environ, config)
    if machine is None:
        raise ValueError(_several_machines(config))
    return machine


def _number_outside(options: Mapping[str, Any]) -> int | None:
    """Return the number of this process, or of its machine; None if it is alone."""
    launcher, _ = find_launcher(options.get("launcher", "auto"), os.environ)
    if launcher == "self" and options.get("num_nodes", 1) == 1:
        return None
    names = {
        "self": ["NODE_RANK"],
        "slurm": ["SLURM_PROCID"],
        "kubernetes": ["PET_NODE_RANK", "RANK"],
    }
    told = [name for name in names.get(launcher, ["RANK"]) if name in os.environ]
    return machines.number(told[0], os.environ[told[0]]) if told else 0


def _start_ranks(
    work: Work,
    config: TrainerConfig,
    kind: str,
    count: int,
    can_stop: bool,
    machine: Machine | None,
    reason: str,
) -> Any:
    place = "this machine"
    if machine is not None:
        place = f"machine {machine.rank} of {machine.count} ({reason})"

    def announce(how: str) -> None:
        print(
            f"launcher: {counted(count, 'process')} on {place}, started here ({how})"
            f"{'' if machine else _ignored(os.environ)}; {distributed.backends(kind)} on {kind}",
            flush=True,
        )

    group = Group(
        count=count,
        machine=machine,
        kind=kind,
        num_threads=threads_per_rank(config, count),
        timeouts_s=config.timeouts_s,
        can_stop=can_stop,
    )
    return ranks.run(group, work, config.max_restarts, announce)


def _ignored(env: Mapping[str, str]) -> str:
    """Return what looks as if this process were one of several, though it is not taken for one."""
    if slurm.num_tasks(env) > 1:
        return f"; SLURM has {slurm.num_tasks(env)} tasks for this job: srun starts them"
    if env.get("WORLD_SIZE", "1") != "1" and "RANK" in env:
        return (
            f"; not used: RANK={env['RANK']}, WORLD_SIZE={env['WORLD_SIZE']} (unset them, or set "
            "launcher=torchrun if they are meant)"
        )
    return ""


def _several_machines(config: TrainerConfig) -> str:
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = f"-m {main.name.removesuffix('.__main__')}" if main else sys.argv[0] or "train.py"
    return (
        f"num_nodes={config.num_nodes}, but a process can start ranks on its own machine only; "
        f"run this on every machine instead:\n  torchrun --nnodes={config.num_nodes} "
        f"--nproc-per-node={config.devices} --rdzv-backend=c10d --rdzv-id=run "
        f"--rdzv-endpoint=<first machine>:29400 {program}\n"
        f"or set {', '.join(machines.BY_HAND)} (0 to {config.num_nodes - 1}) on every machine, and "
        "start it there as it is"
    )


def _restarts_of_machines(config: TrainerConfig) -> str:
    return (
        f"max_restarts={config.max_restarts} with several machines that start their own ranks: "
        "nobody would start those of the other machines again; use torchrun --max-restarts, or "
        "have each machine run the same command again, with resume=auto"
    )
