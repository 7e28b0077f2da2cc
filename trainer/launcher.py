"""Who starts the ranks: this process, torchrun or SLURM; and how a job runs on all of them.

A process that starts ranks itself forks them where that is safe: they share its imports and its
data, and start at once. Elsewhere (CUDA already in use, no Linux) it starts fresh interpreters,
which get the job by cloudpickle. The environment variable ``TRAINER_START_METHOD`` (``fork`` or
``fresh``) overrides the choice, for a process whose other libraries do not survive a fork.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from trainer import distributed, ranks
from trainer.config import TrainerConfig
from trainer.failures import follows_from_another
from trainer.rank import LINGER_S, Group, Work
from trainer.rank import in_child as in_child  # callers of `launch` ask it too

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_JOB_ID")
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # SLURM's numbers for the batch script, an interactive shell, ...


def launch(
    job: Callable[..., Any],
    *args: Any,
    config: TrainerConfig,
    where: Callable[[], str] = lambda: "",
) -> Any:
    """Run ``job(*args)`` on every rank, with the process group up.

    Args:
        job: What each rank runs.
        *args: Its arguments.
        config: Decides how many ranks there are, who starts them, and on which devices.
        where: Called in a rank that fails; says how far it had come ("step 12").

    Returns:
        What ``job`` returned on rank 0; under a launcher, None on the other ranks. One rank alone
        runs in this process and without a process group.

    Raises:
        ValueError: If the ranks asked for cannot be had here.
        Exception: What ``job`` raised on the first rank that failed. Its cause shows that
            rank's traceback.
        RankError: If that rank was killed, exited or did not answer, or its exception cannot be
            pickled.
    """
    if in_child():
        return job(*args)
    kind = distributed.accelerator(config.accelerator)
    launcher, reason = find_launcher(config.launcher, os.environ)
    if launcher != "self":
        return _run_as_rank(job, args, config, where, kind, launcher, reason)
    if config.num_nodes > 1:
        raise ValueError(_several_machines(config))
    count = local_ranks(config.devices, kind)
    if count > 1:
        return _start_ranks(job, args, config, where, kind, count)
    print(f"launcher: 1 process, this one; {kind}", flush=True)
    with _num_threads(threads_per_rank(config, 1)):
        return job(*args)


def find_launcher(choice: str, env: Mapping[str, str]) -> tuple[str, str]:
    """Return who starts the ranks, and the reason in a few words.

    Args:
        choice: The option ``launcher``: auto, self, torchrun or slurm.
        env: The environment variables to look at.

    Returns:
        ``"self"``, ``"torchrun"``, ``"slurm"``, or ``"script"`` where a process group is up
        already; and why.

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
        missing = [name for name in _SLURM if name not in env]
        if missing:
            raise ValueError(
                f"launcher=slurm, but srun did not start this process: {', '.join(missing)} not "
                "set; start it with srun, or use launcher=auto"
            )
        return "slurm", "launcher=slurm"
    if "TORCHELASTIC_RUN_ID" in env and all(name in env for name in _TORCHRUN):
        return "torchrun", "TORCHELASTIC_RUN_ID is set"
    if _is_srun_task(env):
        return "slurm", f"srun started this process as task {env['SLURM_PROCID']}"
    if distributed.is_initialized():
        return "script", "it has set up a process group"
    return "self", "no launcher"


def _is_srun_task(env: Mapping[str, str]) -> bool:
    """Whether srun started this very program as one of several tasks.

    A batch script and a shell got by salloc or ``srun --pty`` have SLURM's variables too, but
    nobody else runs the program there.
    """
    step = env.get("SLURM_STEP_ID", "")
    return (
        all(name in env for name in _SLURM)
        and step.isdigit()
        and int(step) < _FIRST_SPECIAL_STEP
        and "SLURM_PTY_PORT" not in env
        and int(env.get("SLURM_STEP_NUM_TASKS", env["SLURM_NTASKS"])) > 1
    )


def slurm_env(env: Mapping[str, str]) -> dict[str, str]:
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


def local_ranks(devices: int | str, kind: str) -> int:
    """Return how many ranks this process is to start.

    Raises:
        ValueError: If there are fewer CUDA devices.
    """
    available = torch.cuda.device_count() if kind == "cuda" else ranks.cores()
    if devices == "auto":
        return available
    count = int(devices)
    if kind == "cuda" and count > available:
        raise ValueError(
            f"devices={count}, but this machine shows {available} CUDA device(s); use "
            f"devices={available} or auto, or accelerator=cpu to train on the processor"
        )
    return count


def threads_per_rank(config: TrainerConfig, local_world_size: int) -> int | None:
    """Return the threads for each rank, or None to leave torch's own choice."""
    if isinstance(config.num_threads, int):
        return config.num_threads
    if config.reproducible:  # how many share a sum decides how it is rounded
        return 1
    if "OMP_NUM_THREADS" in os.environ or local_world_size == 1:
        return None
    return max(1, ranks.cores() // local_world_size)


def _start_ranks(
    job: Callable[..., Any],
    args: tuple[Any, ...],
    config: TrainerConfig,
    where: Callable[[], str],
    kind: str,
    count: int,
) -> Any:
    method, reason = ranks.start_method()
    how = "fork" if method == "fork" else f"fresh interpreters, because {reason}"
    print(
        f"launcher: {count} processes on this machine, started here ({how}); "
        f"{distributed.backends(kind)} on {kind}",
        flush=True,
    )
    group = Group(
        world_size=count,
        kind=kind,
        num_threads=threads_per_rank(config, count),
        timeout_s=config.timeout_s,
    )
    return ranks.run(group, method, Work(job, args, where))


def _run_as_rank(
    job: Callable[..., Any],
    args: tuple[Any, ...],
    config: TrainerConfig,
    where: Callable[[], str],
    kind: str,
    launcher: str,
    reason: str,
) -> Any:
    """Run the job in a rank that somebody else started. The group stays up for the next call."""
    if launcher == "slurm":
        os.environ.update(slurm_env(os.environ))
    if kind == "cuda":
        _check_devices(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if distributed.is_initialized():
        _check_group(kind)  # the script's own, or ours from the last call
    elif int(os.environ["WORLD_SIZE"]) > 1:
        _join_group(kind, config.timeout_s)
    unused = _unused(config)
    if distributed.rank() == 0:
        count = distributed.world_size()
        print(
            f"launcher: {count} process{'es' if count > 1 else ''}, started by {launcher} ({reason}"
            f"{unused}); {distributed.backends(kind)} on {kind}",
            flush=True,
        )
    threads = threads_per_rank(config, distributed.local_world_size())
    with _num_threads(threads):
        try:
            result = job(*args)
        except Exception as error:
            atexit.unregister(distributed.teardown)  # it could wait for ranks that are gone
            _explain(error, where)
            raise
    return result if distributed.rank() == 0 else None


def _check_devices(local_world_size: int) -> None:
    """Refuse several ranks on one device.

    Raises:
        ValueError: If a launcher started more ranks on this machine than it has devices.
    """
    available = torch.cuda.device_count()
    # One device may be this rank's own: launchers can hide those of the others.
    if 1 < available < local_world_size:
        raise ValueError(
            f"the launcher started {local_world_size} ranks on this machine, which shows "
            f"{available} CUDA devices; start one rank per device (torchrun "
            f"--nproc-per-node={available}), or use accelerator=cpu"
        )


def _unused(config: TrainerConfig) -> str:
    """Return the options that say something else than the launcher did; called on every rank."""
    found = {
        "devices": distributed.local_world_size(),
        "num_nodes": len(distributed.first_ranks()),
    }
    given = {name: getattr(config, name) for name in found}
    unused = [f"{n}={v}" for n, v in given.items() if v not in (1, "auto", found[n])]
    return f"; not used: {', '.join(unused)}" if unused else ""


def _explain(error: Exception, where: Callable[[], str]) -> None:
    """Say which rank failed; Python prints the traceback when ``error`` leaves the program."""
    place = f"rank {distributed.rank()}, {where()}".removesuffix(", ")
    if not follows_from_another(error):
        print(f"{place}:", file=sys.stderr, flush=True)
        return
    print(
        f"{place}: ends because another rank did ({str(error).splitlines()[0]})",
        file=sys.stderr,
        flush=True,
    )
    time.sleep(LINGER_S)  # a launcher reports the rank that ends first
    raise SystemExit(1) from None


def _join_group(kind: str, timeout_s: float) -> None:
    """Join the launcher's group, for the rest of this process's life."""
    # DDP imports this; the first import while there is a group keeps the group for ever, and its
    # threads can abort a process that ends while they still hold a tensor.
    importlib.import_module("torch._dynamo")
    timeout = timedelta(seconds=timeout_s)
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    # Ranks that torchrun restarts meet an old store, with the addresses of their dead predecessors.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    distributed.setup(PrefixStore(f"attempt/{attempt}", store), rank, world_size, kind, timeout_s)
    atexit.register(distributed.teardown)


def _check_group(kind: str) -> None:
    """Refuse a process group that the script has set up in a way that we cannot use.

    Raises:
        ValueError: If objects cannot travel, or nobody knows which ranks share a machine.
    """
    found = dist.get_backend_config()
    if "cpu:" not in str(found):
        raise ValueError(
            f"the process group that this script set up has the backends {found}; it needs one for "
            f"CPU tensors too: init_process_group({distributed.backends(kind)!r})"
        )
    missing = [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name not in os.environ]
    if missing and distributed.world_size() > 1:
        raise ValueError(
            f"this script set up a process group, but {' and '.join(missing)} are not in the "
            "environment; set them for each process, or leave the group to the Trainer"
        )


def _several_machines(config: TrainerConfig) -> str:
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = f"-m {main.name.removesuffix('.__main__')}" if main else sys.argv[0] or "train.py"
    return (
        f"num_nodes={config.num_nodes}, but a process can start ranks on its own machine only; "
        f"run this on every machine instead:\n  torchrun --nnodes={config.num_nodes} "
        f"--nproc-per-node={config.devices} --rdzv-backend=c10d --rdzv-id=run "
        f"--rdzv-endpoint=<first machine>:29400 {program}"
    )


@contextmanager
def _num_threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(before)
