"""Rank facts, the process group, and the few collectives that the project uses.

Every function works without a process group too: one process is a world of size 1. The group can
be taken down and set up again at a step boundary.
"""

from __future__ import annotations

import gc
import math
import os
import pickle
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import (
    _get_default_store,
    _set_pg_timeout,
    _world,
)

from trainer.diagnosis.failures import Failure
from trainer.forking import fork_safely
from trainer.guard import no_collectives
from trainer.meeting import no_network
from trainer.watch import Phase, watch

T = TypeVar("T")

# How much longer a collective waits than a rank may stay in one phase: whoever watches the phases
# speaks first, and can tell who was waited for.
_BACKSTOP_S = 10.0

_timeout_s = math.inf  # what `shorten_timeouts` goes down to

_runs_per_machine = 0  # calls of run_once_per_machine: the same number on every rank
_waits = 0  # calls of wait_for_first_rank, likewise


def is_initialized() -> bool:
    """Whether this process is part of a process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's number among all ranks."""
    return dist.get_rank() if is_initialized() else 0


def world_size() -> int:
    """The number of ranks that train together."""
    return dist.get_world_size() if is_initialized() else 1


def local_rank() -> int:
    """This process's number among the ranks of its machine."""
    return int(os.environ["LOCAL_RANK"]) if world_size() > 1 else 0


def local_world_size() -> int:
    """The number of ranks on this machine."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if world_size() > 1 else 1


def node_rank() -> int:
    """The number of this machine."""
    return _of_machine("GROUP_RANK", rank() // local_world_size())


def num_nodes() -> int:
    """The number of machines."""
    return _of_machine("GROUP_WORLD_SIZE", world_size() // local_world_size())


def _of_machine(name: str, where_alike: int) -> int:
    """Return what torchrun and we tell each rank; a script need not, but its machines are alike."""
    return int(os.environ.get(name, where_alike)) if world_size() > 1 else where_alike


def first_ranks() -> list[int]:
    """The first rank of each machine. A collective: every rank calls it."""
    return [number for number, local in enumerate(all_gather_object(local_rank())) if local == 0]


def accelerator(choice: str) -> str:
    """Return ``"cpu"`` or ``"cuda"`` for the option ``accelerator``: auto, cpu or cuda.

    Raises:
        ValueError: If CUDA is asked for and there is no device.
    """
    if choice == "cpu":
        return "cpu"
    # device_count asks NVML, so this process can still fork ranks that use CUDA.
    if torch.cuda.device_count():
        return "cuda"
    if choice == "cuda":
        raise ValueError(
            "accelerator=cuda, but torch finds no CUDA device here; use accelerator=cpu or auto, "
            "or check CUDA_VISIBLE_DEVICES, the driver and that torch is a CUDA build "
            f"(this is torch {torch.__version__})"
        )
    return "cpu"


def device(kind: str) -> torch.device:
    """Return the device of this rank, for ``kind`` as `accelerator` returned it."""
    if kind == "cpu":
        return torch.device("cpu")
    return _cuda_device(local_rank())


def _cuda_device(local_rank: int) -> torch.device:
    # A launcher may show each rank its own device only, which is then number 0.
    return torch.device("cuda", local_rank if torch.cuda.device_count() > 1 else 0)


def backends(kind: str) -> str:
    """Return torch's name for the backends of a group; objects always travel over gloo."""
    return "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"


def setup(
    store: Store, rank: int, world_size: int, kind: str, timeouts_s: tuple[float, float]
) -> None:
    """Join the process group.

    Args:
        store: Where the ranks find each other.
        rank: This process's number among all ranks; the environment tells
            LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK and GROUP_WORLD_SIZE, as torchrun sets them.
        world_size: The number of ranks.
        kind: ``"cpu"`` or ``"cuda"``.
        timeouts_s: For `set_timeouts`.
    """
    if sys.platform == "linux" and os.environ.get("GROUP_WORLD_SIZE") == "1":
        # The host's own name may lead to an address that does not answer.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    fork_safely()
    device_id = None
    if kind == "cuda":
        device_id = _cuda_device(int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device_id)
        # What NCCL would write into files of its own is in the report on a hang.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    set_timeouts(timeouts_s)
    problem = None
    try:
        dist.init_process_group(
            backends(kind),
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=_collective_timeout(),
            device_id=device_id,
        )
    except RuntimeError as error:
        if os.environ.get("GROUP_WORLD_SIZE") == "1":
            raise
        problem = no_network(error)
    if problem is not None:  # raised here, where torch's error is not its cause: it is its own
        raise problem


def new_gloo_group() -> dist.ProcessGroup:
    """Return a further group of all ranks, with the timeout of the first; every rank calls it."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_collective_timeout())
    # A rank may have connected to another that has not connected to it yet. Were the first to leave
    # the group at once, the other would take it for dead.
    dist.barrier(group)
    return group


def set_timeouts(timeouts_s: tuple[float, float]) -> None:
    """Limit how long this rank may stay in one phase, and a collective of any group may wait.

    Args:
        timeouts_s: The limits after `shorten_timeouts`, and until then.
    """
    global _timeout_s
    _timeout_s, start_timeout_s = timeouts_s
    _limit(start_timeout_s)


def shorten_timeouts() -> None:
    """Let nothing take longer than ``timeout_s`` from now on: the start is over."""
    if watch.limit_s != _timeout_s:
        _limit(_timeout_s)


def _limit(seconds: float) -> None:
    watch.limit_s = seconds
    for group in list(_world.pg_map):
        _set_pg_timeout(_collective_timeout(), group)


def _collective_timeout() -> timedelta:
    return timedelta(seconds=watch.limit_s + _BACKSTOP_S)


def teardown() -> None:
    """Leave the process group, if there is one, and end its threads."""
    if is_initialized():
        dist.destroy_process_group()
        gc.collect()  # DDP's wrappers hold the group, and themselves


def run_once_per_machine(fn: Callable[[], object], timeout_s: float) -> None:
    """Run ``fn`` on one rank of each machine while the others wait.

    The wait is no collective, so it may be longer than the group's timeout. If ``fn`` raises on
    any machine, every rank raises the same exception.

    Args:
        fn: What to run; its value is dropped.
        timeout_s: The longest to wait for the slowest machine.

    Raises:
        TimeoutError: If a machine is not done in time.
    """
    if world_size() == 1:
        with watch.excused(Phase.PREPARING):
            fn()
        return
    global _runs_per_machine
    _runs_per_machine += 1
    store = PrefixStore(f"once/{_runs_per_machine}", _get_default_store())
    machines = [str(first) for first in first_ranks()]
    with watch.excused(Phase.PREPARING):
        if local_rank() == 0:
            failure: Failure | None = None
            try:
                with no_collectives("work that is done once per machine"):
                    fn()
            except BaseException as error:
                failure = Failure.of(error, rank(), "in work that runs once per machine")
                raise
            finally:
                store.set(str(rank()), pickle.dumps(failure))  # type: ignore[arg-type]
        deadline = time.monotonic() + timeout_s
        pause_s = 0.001
        while not store.check(machines):
            if time.monotonic() > deadline:
                late = ", ".join(name for name in machines if not store.check([name]))
                raise TimeoutError(
                    f"rank {late} was not done after {timeout_s:g} s with work that runs once per "
                    "machine"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
    for name in machines:
        failure_there: Failure | None = pickle.loads(store.get(name))
        if failure_there is not None:
            raise failure_there.error()


def wait_for_first_rank() -> None:
    """Wait until rank 0 has come here too; no collective, so it may take long.

    Rank 0 may hold the store by which the others wait, so it goes last, if they come in time.
    """
    if world_size() == 1:
        return
    global _waits
    _waits += 1
    store, name = _get_default_store(), f"first rank {_waits}"
    watch.limit_s = math.inf
    watch.enter(Phase.DONE)
    if rank() == 0:
        store.set(name, "")
        others = [f"{name}, {number}" for number in range(1, world_size())]
        with suppress(DistError):  # one was killed, say: whoever started it tells
            store.wait(others, timedelta(seconds=_timeout_s))
    else:
        store.wait([name], timedelta(days=365))
        store.set(f"{name}, {rank()}", "")


def on_first_rank(fn: Callable[[], T]) -> T:
    """Return what ``fn()`` returns on rank 0, on every rank. It must be picklable.

    If it raises there, every rank raises the same exception.
    """
    if world_size() == 1:
        return fn()
    value: Any = None
    failure: Failure | None = None
    if rank() == 0:
        try:
            with no_collectives("work on behalf of all ranks"):
                value = fn()
        except Exception as error:
            failure = Failure.of(error, 0, "in work on behalf of all ranks")
            broadcast_object((None, failure))
            raise
    value, failure = broadcast_object((value, failure))
    if failure is not None:
        raise failure.error()
    result: T = value
    return result


def broadcast_object(value: T, src: int = 0) -> T:
    """Return rank ``src``'s picklable ``value`` on every rank."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=src)
    return box[0]


def all_gather_object(value: T) -> list[T]:
    """Return every rank's picklable ``value``, in rank order, on every rank."""
    if world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def gather_object(value: T) -> list[T] | None:
    """Return every rank's picklable ``value``, in rank order, on rank 0; None elsewhere."""
    if world_size() == 1:
        return [value]
    gathered: list[Any] | None = [None] * world_size() if rank() == 0 else None
    dist.gather_object(value, gathered)
    return gathered


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum ``tensor`` over all ranks, in place; its shape and dtype must agree on every rank."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def all_gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return every rank's ``tensor``, in rank order, along a new first dimension.

    Its shape and dtype must agree on every rank.
    """
    gathered = tensor.new_empty((world_size(), *tensor.shape))
    if world_size() > 1:
        dist.all_gather(list(gathered), tensor)
    else:
        gathered[0] = tensor
    return gathered


def broadcast_tensor(tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
    """Overwrite ``tensor`` with rank ``src``'s, in place."""
    if world_size() > 1:
        # Into a tensor with gaps gloo would write wrong values without a word.
        whole = tensor.contiguous()
        dist.broadcast(whole, src=src)
        if whole is not tensor and not torch.equal(whole, tensor):
            tensor.copy_(whole)
    return tensor


def share_buffers(module: torch.nn.Module) -> None:
    """Overwrite every rank's buffers (BatchNorm statistics) with rank 0's."""
    for buffer in module.buffers():
        broadcast_tensor(buffer)


def barrier() -> None:
    """Wait until every rank has come here."""
    all_reduce_sum(torch.zeros(1))
