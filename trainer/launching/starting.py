"""How the processes of the ranks are started: by fork, or as fresh interpreters."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import process
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer import startup
from trainer.config import TrainerConfig
from trainer.forking import wait_for_rest
from trainer.launching.machines import Machine
from trainer.launching.rank import HANDLED_SIGNALS, HOST, Group, Work, forked_rank, work_path
from trainer.launching.sending import send

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext

_PROBE_S = 5.0  # for a backward pass of one number in a forked child
_HEAVY_MODULES = (  # what every rank of a training run imports
    "torch.distributed.nn",
    "torch.distributed.elastic.multiprocessing",
    "torch.nn.parallel.distributed",
    "torch.optim",
    "torch.utils.data",
    "torch.utils.serialization.config",
)


def cores() -> int:
    """The number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_rank(config: TrainerConfig, local_world_size: int) -> int | None:
    """Return the threads for each rank, or None to leave torch's own choice."""
    if isinstance(config.num_threads, int):
        return config.num_threads
    if config.reproducible:  # how many share a sum decides how it is rounded
        return 1
    if "OMP_NUM_THREADS" in os.environ or local_world_size == 1:
        return None
    return max(1, cores() // local_world_size)


@contextmanager
def num_threads(count: int | None) -> Iterator[None]:
    """Compute with so many threads meanwhile; None leaves them as they are."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(before)


def start_method(others_run: bool) -> tuple[str, str]:
    """Return ``"fork"`` or ``"fresh"``, and why it is not the usual fork.

    Args:
        others_run: Whether this process has ranks of another launch.

    Raises:
        ValueError: If the environment variable asks for something else.
    """
    forced = os.environ.get("TRAINER_START_METHOD")
    if forced in ("fork", "fresh"):
        return forced, "TRAINER_START_METHOD is set"
    if forced is not None:
        raise ValueError(f"TRAINER_START_METHOD={forced}: it must be fork or fresh")
    if sys.platform != "linux":
        return "fresh", "forking is only safe on Linux"
    if multiprocessing.current_process().daemon:
        return "fresh", "this is a daemonic process"
    if others_run:
        return "fresh", "this process runs other ranks too"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "fresh", "CUDA is in use in this process"
    cuda_built = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    if cuda_built and not _survives_fork():
        return "fresh", "a process forked from this one could not train on CUDA"
    return "fork", ""


def _survives_fork() -> bool:
    """Fork a child to see whether it can still use CUDA and run a backward pass."""
    with _fork_warnings_muted():
        child = os.fork()
    if child == 0:
        usable = False
        try:
            # Beside threads of the parent's autograd the pass below may wait for ever.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
            signal.setitimer(signal.ITIMER_REAL, _PROBE_S)
            torch.zeros(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
            usable = not torch.cuda._is_in_bad_fork()
        finally:
            os._exit(0 if usable else 1)
    return os.waitpid(child, 0)[1] == 0


def start(group: Group, method: str, work: Work, listener: socket.socket) -> PContext:
    """Start the ranks' processes."""
    from torch.distributed.elastic.multiprocessing import (
        DefaultLogsSpecs,
        MultiprocessContext,
        start_processes,
    )

    entrypoint: Callable[..., None] | str
    arguments: dict[int, tuple[Any, ...]]
    environment: dict[str, str] = {}
    numbers = range(group.count)
    # They wait until a rank has its own handlers: it must not run the caller's, nor die of them.
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    if method == "fork":
        for name in _HEAVY_MODULES:
            importlib.import_module(name)  # once, and not in each rank
        wait_for_rest()
        entrypoint = forked_rank
        arguments = {n: (n, group, work, listener) for n in numbers}
    else:
        entrypoint = sys.executable
        program = _fresh_program(_write_work(group, work))
        arguments = dict.fromkeys(numbers, ("-c", program))
        # An OpenMP thread that spins while it waits takes the core from one that works, as soon as
        # there are more of them than cores. Read when torch is loaded: too late for a forked rank.
        environment["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "passive")
    with _fork_warnings_muted():
        context = start_processes(
            name="rank",
            entrypoint=entrypoint,
            args=arguments,
            envs={n: environment | _environment(group, n) for n in numbers},
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
            start_method="fork",
        )
    if isinstance(context, MultiprocessContext) and context._pc is not None:
        # Else any thread that starts a process by multiprocessing takes the exit code of a rank.
        process._children.difference_update(context._pc.processes)  # type: ignore[attr-defined]
    return context


def _environment(group: Group, number: int) -> dict[str, str]:
    """Return the variables that torchrun would set too; users' code and libraries read them."""
    machine = group.machine or Machine(0, 1, HOST, group.port)
    return {
        "RANK": str(group.first_rank + number),
        "WORLD_SIZE": str(group.world_size),
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": str(group.count),
        "GROUP_RANK": str(machine.rank),
        "GROUP_WORLD_SIZE": str(machine.count),
        "MASTER_ADDR": machine.address,
        "MASTER_PORT": str(machine.port),
        "TORCHELASTIC_RESTART_COUNT": str(group.attempt.number),
    }


def _fresh_program(path: str) -> str:
    """Return the Python program of a rank that is a fresh interpreter."""
    return (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        f"from trainer.launching.rank import fresh_rank; fresh_rank({path!r})"
    )


def _write_work(group: Group, work: Work) -> str:
    """Write what fresh interpreters need, and return the path."""
    path = Path(group.folder, "work")
    send(work, work_path(path))  # first: it says what to do about a full disk
    path.write_bytes(pickle.dumps((group, sys.argv, startup.noted())))
    return str(path)


@contextmanager
def _fork_warnings_muted() -> Iterator[None]:
    """Keep back warnings about forking beside threads, and elastic's about a replaced stderr."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        warnings.filterwarnings("ignore", "Unable to enable fault handler", UserWarning)
        yield
