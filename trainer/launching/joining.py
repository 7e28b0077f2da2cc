"""A rank that torchrun, SLURM or a script has started: how it joins the others."""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from trainer import distributed, startup
from trainer.config import TrainerConfig
from trainer.diagnosis import flight_recorder
from trainer.diagnosis.failures import follows_from_another
from trainer.launching import attempt, children, slurm
from trainer.launching.attempt import Attempt
from trainer.launching.rank import LINGER_S
from trainer.launching.starting import num_threads, threads_per_rank
from trainer.launching.watching import watching_each_other
from trainer.meeting import Meeting, has_agent_store, meet
from trainer.messages import counted, first_line

_jobs = 0  # calls of run_as_rank: the same number on every rank, and at every attempt
_meeting: Meeting | None = None


def run_as_rank(
    job: Callable[..., Any],
    args: tuple[Any, ...],
    config: TrainerConfig,
    where: Callable[[], str],
    kind: str,
    launcher: str,
    reason: str,
    can_stop: bool,
) -> Any:
    """Run the job in a rank that somebody else started. The group stays up for the next call."""
    if launcher != "script":
        _settle()
    if launcher == "slurm":
        os.environ.update(slurm.torchrun_env(os.environ))
    if kind == "cuda":
        _check_devices(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if launcher == "torchrun" and can_stop:
        _check_restarts(config)
    attempt.enter(_attempt(launcher, config))
    if distributed.is_initialized():
        _check_group(kind)  # the script's own, or ours from the last call
        distributed.set_timeouts(config.timeouts_s)
    elif int(os.environ["WORLD_SIZE"]) > 1:
        _join_group(kind, config)
        startup.note("join")
    unused = _unused(config)
    if distributed.rank() == 0:
        count = distributed.world_size()
        print(
            f"launcher: {counted(count, 'process')}, started by {launcher} ({reason}"
            f"{unused}); {distributed.backends(kind)} on {kind}",
            flush=True,
        )
    threads = threads_per_rank(config, distributed.local_world_size())
    is_alone = distributed.world_size() == 1
    watched = nullcontext() if is_alone else watching_each_other(config.timeout_s)
    with num_threads(threads), watched:
        try:
            result = job(*args)
        except Exception as error:
            atexit.unregister(distributed.teardown)  # it could wait for ranks that are gone
            _explain(error, where)
            raise
    return result if distributed.rank() == 0 else None


@functools.cache
def _settle() -> None:
    """Have nothing that this rank starts outlive it if it is killed, nor the rank its torchrun."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        children.die_with_parent()
    janitor = children.start_janitor()
    children.take_along(janitor.folder)
    if os.getpgrp() == os.getpid() > 1:  # 1: a container ends with it
        janitor.watch([os.getpid()])


def _attempt(launcher: str, config: TrainerConfig) -> Attempt:
    """Say which attempt of which launch the next job belongs to."""
    global _jobs
    _jobs += 1
    if launcher != "torchrun" or not has_agent_store():
        return Attempt()  # nobody could tell one launch from another
    met = _met(config)
    return Attempt(f"{met.launch}-{_jobs}", met.number)


def _met(config: TrainerConfig) -> Meeting:
    """Meet the other ranks, once in the life of this process."""
    global _meeting
    if _meeting is None:
        _meeting = meet(config.timeouts_s[1])
    return _meeting


def _check_restarts(config: TrainerConfig) -> None:
    """Refuse that torchrun starts ranks again which could not tell that they are not the first.

    Raises:
        ValueError: Saying what to give.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and not has_agent_store() and config.resume != "auto":
        raise ValueError(
            f"torchrun --max-restarts={restarts} keeps nothing between its attempts here "
            "(TORCHELASTIC_USE_AGENT_STORE is not True), so each would begin anew; set run_dir="
            "<folder> and resume=auto, by which it finds its checkpoints"
        )


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
    started = flight_recorder.recorded()
    last = f", after its {started[-1]}" if started else ""
    print(
        f"{place}: ends because another rank did{last} ({first_line(error)})",
        file=sys.stderr,
        flush=True,
    )
    time.sleep(LINGER_S)  # a launcher reports the rank that ends first
    raise SystemExit(1) from None


def _join_group(kind: str, config: TrainerConfig) -> None:
    """Join the launcher's group, for the rest of this process's life."""
    # Torch's compiler imports this; the first import while there is a group keeps it for ever, and
    # its threads can abort a process that ends while they still hold a tensor.
    importlib.import_module("torch.distributed.nn")
    store = _met(config).store
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed.setup(store, rank, world_size, kind, config.timeouts_s)
    atexit.register(distributed.teardown)


def _check_group(kind: str) -> None:
    """Refuse a process group that the script has set up in a way that we cannot use.

    Raises:
        ValueError: If objects cannot travel, or nobody knows which ranks share a machine.
    """
    found = str(dist.get_backend_config())
    if "cpu:" not in found or (kind == "cuda" and "cuda:nccl" not in found):
        raise ValueError(
            f"the process group that this script set up has the backends {found}; it needs "
            f"{distributed.backends(kind)}: init_process_group({distributed.backends(kind)!r})"
        )
    missing = [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name not in os.environ]
    if missing and distributed.world_size() > 1:
        raise ValueError(
            f"this script set up a process group, but {' and '.join(missing)} are not in the "
            "environment; set them for each process, or leave the group to the Trainer"
        )
