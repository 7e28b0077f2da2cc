"""The ranks that this process starts on its own machine, on torch elastic's process supervision.

The *caller's* thread owns the signals and waits. A *supervisor* thread starts the ranks, watches
them, and outlives them: the kernel kills a rank when the thread that started it ends, so no rank
survives this process. A fresh thread also has no OpenMP pool yet, so ranks that it forks can build
their own, whatever the caller has computed before.

The supervisor holds the store through which the ranks find each other, on a port that the system
chooses and to which they report their failures, and a private folder for rank 0's result.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from trainer.failures import Failure, death_of, unanswered
from trainer.rank import HANDLED_SIGNALS, HOST, Group, Work, flush, forked_rank, result_path

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext

_POLL_S = 0.05
_GRACE_S = 2  # between SIGTERM and SIGKILL, when the caller wants to stop
_PROBE_S = 5.0  # for a backward pass of one number in a forked child
_HEAVY_MODULES = (  # what every rank of a training run imports; torch._dynamo alone takes a second
    "torch._dynamo",
    "torch.distributed.elastic.multiprocessing",
    "torch.nn.parallel.distributed",
    "torch.optim",
    "torch.utils.data",
)

_starting = threading.Lock()  # the warning filters belong to the whole process


def cores() -> int:
    """The number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def start_method() -> tuple[str, str]:
    """Return ``"fork"`` or ``"fresh"``, and why it is not the usual fork.

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


def run(group: Group, method: str, work: Work) -> Any:
    """Start the ranks, wait for them, and return rank 0's result.

    Whatever ends the wait (an exception in a rank, Ctrl-C, SIGTERM), no rank is left behind.

    Args:
        group: How many ranks, and how they run.
        method: ``"fork"`` or ``"fresh"``.
        work: What they run.
    """
    if method == "fork":
        for name in _HEAVY_MODULES:
            importlib.import_module(name)
    supervisor = _Supervisor(group, method, work)
    with _end_on_signal(supervisor):
        try:
            supervisor.start()
            supervisor.finished.wait()
        except BaseException:
            supervisor.stopping = True
            if supervisor.is_alive():
                supervisor.finished.wait()
            raise
    supervisor.join()
    if supervisor.error is not None:
        try:
            raise supervisor.error
        finally:
            del supervisor  # else the traceback would keep it, and itself, alive
    return supervisor.result


@contextmanager
def _end_on_signal(supervisor: _Supervisor) -> Iterator[None]:
    """End the ranks before this process dies of SIGTERM or SIGHUP. Ctrl-C stays as it is."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    received: list[int] = []

    def stop(signum: int, frame: object) -> None:
        received.append(signum)
        supervisor.stopping = True

    ends_process = (signal.SIGTERM, signal.SIGHUP)
    previous = {
        number: signal.signal(number, stop)
        for number in ends_process
        if signal.getsignal(number) not in (signal.SIG_IGN, None)
    }
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # nobody would learn the exit codes
        previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if received:
        flush()
        signal.raise_signal(received[0])
        raise SystemExit(128 + received[0])  # the caller's own handler returned


class _Supervisor(threading.Thread):
    """Starts the ranks, watches them, and leaves nothing behind.

    Attributes:
        stopping: Set by the caller to end the ranks.
        finished: Set when no rank is left.
        result: What rank 0 returned.
        error: What the caller is to raise instead.
    """

    def __init__(self, group: Group, method: str, work: Work) -> None:
        super().__init__(name="trainer-ranks")
        self._group = group
        self._method = method
        self._work: Work | None = work
        self.stopping = False
        self.finished = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with _elastic_log_muted():
                self._supervise()
        except BaseException as error:
            self.error = error
        finally:
            self._work = None
            self.finished.set()

    def _supervise(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        folder = tempfile.mkdtemp(prefix="trainer-")
        try:
            # The ranks may connect as soon as the socket listens. The store itself starts after
            # the fork, because its thread would not survive that.
            with socket.create_server((HOST, 0), backlog=2 * self._group.world_size) as listener:
                port = listener.getsockname()[1]
                group = replace(self._group, port=port, parent=os.getpid(), folder=folder)
                context = _start(group, self._method, work, listener)
                listener_fd = listener.detach()  # it is the store's now
            try:
                store = TCPStore(
                    HOST,
                    port,
                    is_master=True,
                    wait_for_workers=False,
                    master_listen_fd=listener_fd,
                )
                deaths = _wait(context, store, lambda: self.stopping)
                if deaths:
                    self.error = _first_failure(deaths, store, group)
                elif not self.stopping:
                    self.result = torch.load(
                        result_path(group), map_location="cpu", weights_only=False
                    )
            finally:
                context.close(timeout=_GRACE_S)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # a dying process may still write there


def _start(group: Group, method: str, work: Work, listener: socket.socket) -> PContext:
    """Start the ranks' processes."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

    entrypoint: Callable[..., None] | str
    arguments: dict[int, tuple[Any, ...]]
    environment: dict[str, str] = {}
    numbers = range(group.world_size)
    if method == "fork":
        # Until a rank has its own handlers, it must not run the caller's.
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
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
        return start_processes(
            name="rank",
            entrypoint=entrypoint,
            args=arguments,
            envs={n: environment | _environment(group, n) for n in numbers},
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
            start_method="fork",
        )


def _environment(group: Group, number: int) -> dict[str, str]:
    """Return the variables that torchrun would set too; users' code and libraries read them."""
    return {
        "RANK": str(number),
        "WORLD_SIZE": str(group.world_size),
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": str(group.world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(group.port),
    }


def _wait(context: PContext, store: Store, stopping: Callable[[], bool]) -> dict[int, int]:
    """Wait until all ranks are done or one has failed.

    Returns:
        The exit codes of those that failed. Elastic would see them too, but then it lets the other
        ranks half a minute, and takes code 0 for success, whenever it comes.
    """
    while not stopping():
        codes = {number: _exit_code(pid) for number, pid in context.pids().items()}
        ended = {number: code for number, code in codes.items() if code is not None}
        if any(ended.values()) or (ended and not store.check(["all done"])):
            return ended
        finished = context.wait(0)
        if finished is not None:
            return {n: failure.exitcode for n, failure in finished.failures.items()}
        time.sleep(_POLL_S)
    return {}


def _exit_code(pid: int) -> int | None:
    """Return a child's exit code (negative: the signal), or None while it runs; reap nothing."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0  # elastic has seen it end, and would have told another code
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _first_failure(deaths: dict[int, int], store: Store, group: Group) -> BaseException:
    """Return the error of the rank that failed first, not of one that lost its peer through it."""
    keys = [f"failure/{n}" for n in range(1, store.add("failures", 0) + 1)]
    # A rank that was killed on the way to its report has none.
    reported: list[Failure] = [pickle.loads(store.get(key)) for key in keys if store.check([key])]
    for failure in reported:
        if not failure.secondary:
            return failure.error()
    heard = {failure.rank for failure in reported}
    for number, code in deaths.items():
        if number not in heard:
            return death_of(number, code)
    return unanswered(set(range(group.world_size)) - heard, group.timeout_s, reported[0])


def _fresh_program(path: str) -> str:
    """Return the Python program of a rank that is a fresh interpreter."""
    return (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        f"from trainer.rank import fresh_rank; fresh_rank({path!r})"
    )


def _write_work(group: Group, work: Work) -> str:
    """Write what fresh interpreters need, and return its path."""
    import cloudpickle

    path = Path(group.folder, "work")
    with path.open("wb") as file:
        pickle.dump((group, sys.argv), file)
        try:
            cloudpickle.dump(work, file)
        except Exception as error:
            raise ValueError(
                f"the task, the data or another argument cannot be sent to the ranks: {error}; "
                "make it picklable (open files and locks where they are used, say), or start the "
                "ranks before CUDA is used in this process, so that they can be forked"
            ) from error
    return str(path)


@contextmanager
def _elastic_log_muted() -> Iterator[None]:
    """Keep back elastic's log of what happens in this thread: the caller is told, once."""
    thread = threading.get_ident()

    def of_another_thread(record: logging.LogRecord) -> bool:
        return record.thread != thread

    loggers = [
        logging.getLogger("torch.distributed.elastic.multiprocessing.api"),
        logging.getLogger("torch.multiprocessing.spawn"),
    ]
    for logger in loggers:
        logger.addFilter(of_another_thread)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(of_another_thread)


@contextmanager
def _fork_warnings_muted() -> Iterator[None]:
    """Keep back warnings about forking beside threads, and elastic's about a replaced stderr."""
    with _starting, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        warnings.filterwarnings("ignore", "Unable to enable fault handler", UserWarning)
        yield
