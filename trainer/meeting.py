"""How ranks that different processes have started find each other, and what is said if they do not.

The store in which they meet may be older than they are: torchrun's outlives ranks that it starts
again, and holds what their dead predecessors wrote. How often each machine's torchrun has started
its ranks tells no attempt from another: a machine that comes back counts anew. So rank 0 calls the
roll: the meeting is over when everybody has answered to the same list of names.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    PrefixStore,
    Store,
    TCPStore,
)

from trainer.diagnosis.failures import RankError
from trainer.watch import Phase, watch

_PATIENCE_S = 15.0  # before a rank says what it waits for


class Meeting(NamedTuple):
    """What all ranks know once they have met.

    Attributes:
        store: Theirs alone: nobody else has written there.
        launch: A name that the ranks' successors will find too; None if they would not.
        number: How many meetings of this launch there were before.
    """

    store: Store
    launch: str | None
    number: int


def meet(timeout_s: float) -> Meeting:
    """Wait until all ranks have come to the place that the environment names, as torchrun does.

    Rank 0 says who is missing, the others that rank 0 is.

    Args:
        timeout_s: How long to wait.

    Raises:
        RankError: If somebody did not come in time.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    deadline = time.monotonic() + timeout_s
    told = _said_after_a_while(f"rank {rank} waits for rank 0 at {place}", timeout_s, rank > 0)
    with watch.excused(Phase.STARTING), told:  # what is waited for is told here
        store = PrefixStore("meeting", _store(rank, place, timeout_s))
        found = meet_in(store, rank, world_size, deadline, place)
    return found if has_agent_store() else found._replace(launch=None, number=0)


def has_agent_store() -> bool:
    """Whether ranks that torchrun starts again find the store that their predecessors had."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(rank: int, place: str, timeout_s: float) -> Store:
    """Connect to the store; make it, where torchrun has not and this is rank 0."""
    host, _, port = place.rpartition(":")
    is_host = rank == 0 and not has_agent_store()
    problem = ""
    try:
        return TCPStore(
            host,
            int(port),
            is_master=is_host,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,  # it would not say for whom
            multi_tenant=True,  # the script may have one there
        )
    except DistError as error:
        problem = str(error).splitlines()[0]
    if is_host:
        raise RankError(f"rank 0 cannot listen at {place}; set MASTER_PORT to another ({problem})")
    raise RankError(
        f"rank {rank} did not reach rank 0 at {place} within {timeout_s:g} s: is it started there, "
        "is that the address of its machine, and is the port open between the machines? "
        f"({problem})"
    )


def meet_in(store: Store, rank: int, world_size: int, deadline: float, place: str) -> Meeting:
    """Meet in a store that predecessors may have used.

    Args:
        store: Which.
        rank: The number of this rank.
        world_size: How many there are now.
        deadline: By `time.monotonic`.
        place: What to call the store.

    Raises:
        RankError: If somebody does not come.
    """
    me = uuid.uuid4().hex[:12]
    store.set(f"name/{rank}", me)
    call = _call_the_roll if rank == 0 else _answer
    roll = call(store, rank, me, world_size, deadline, place)
    launch, number = json.loads(store.get(f"{roll}/complete"))
    return Meeting(PrefixStore(roll, store), launch, number)


def _call_the_roll(
    store: Store, rank: int, me: str, world_size: int, deadline: float, place: str
) -> str:
    """As rank 0, have all answer to the same list; return what it is called."""
    keys = [f"name/{number}" for number in range(world_size)]
    names: list[str] = []
    roll = ""

    def absent() -> list[int]:
        """Return who has no name yet, or has not answered to it: it may be a predecessor's."""
        wanted = [f"{roll}/here/{number}" for number in range(1, world_size)] if roll else keys
        return [int(key.rpartition("/")[2]) for key in wanted if not store.check([key])]

    def all_are_here() -> bool:
        nonlocal names, roll
        if not store.check(keys):
            return False
        found = [bytes(name).decode() for name in store.multi_get(keys)]
        if found != names:
            names, roll = found, uuid.uuid4().hex
            store.set("roll", json.dumps([roll, names]))
        return store.check([f"{roll}/here/{number}" for number in range(1, world_size)])

    def tell() -> None:
        listed = ", ".join(map(str, absent()))
        _say(f"rank 0 waits at {place} for rank {listed}", deadline - time.monotonic())

    if not _poll(all_are_here, deadline, tell):
        raise RankError(
            f"rank {', '.join(map(str, absent()))} did not come to {place} in time: is it started, "
            f"was every machine told the same number of ranks, and does {place} lead to rank 0?"
        )
    launch = store.compare_set("launch", "", uuid.uuid4().hex).decode()
    number = store.add("meetings", 1) - 1
    store.set(f"{roll}/complete", json.dumps([launch, number]))
    return roll


def _answer(store: Store, rank: int, me: str, world_size: int, deadline: float, place: str) -> str:
    """As another rank, answer to each list that has this rank's name; return the complete one."""
    answered = ""

    def is_complete() -> bool:
        nonlocal answered
        if not store.check(["roll"]):
            return False
        roll, names = json.loads(store.get("roll"))
        if names[rank : rank + 1] != [me]:
            return False
        if roll != answered:
            answered = roll
            store.set(f"{roll}/here/{rank}", "")
        return store.check([f"{roll}/complete"])

    if not _poll(is_complete, deadline):
        raise RankError(f"rank {rank} waited at {place}, but rank 0 has not called it in time")
    return answered


def _poll(
    is_done: Callable[[], bool], deadline: float, tell: Callable[[], None] = lambda: None
) -> bool:
    tell_at = time.monotonic() + _PATIENCE_S
    pause_s = 0.001
    while not is_done():
        now = time.monotonic()
        if now > deadline:
            return False
        if now > tell_at:
            tell_at = now + _PATIENCE_S
            tell()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    return True


@contextmanager
def _said_after_a_while(text: str, timeout_s: float, wanted: bool = True) -> Iterator[None]:
    timer = threading.Timer(_PATIENCE_S, _say, [text, timeout_s - _PATIENCE_S])
    timer.daemon = True
    if wanted:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(text: str, left_s: float) -> None:
    print(f"{text}, for {left_s:.0f} s more (start_timeout_s)", file=sys.stderr, flush=True)


def no_network(error: RuntimeError) -> RankError:
    """Return the error where ranks that have met cannot exchange data: what to set, mostly."""
    found = ", ".join(name for _, name in socket.if_nameindex())
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    values = ", ".join(f"{name}={os.environ.get(name, 'unset')}" for name in names)
    return RankError(
        "the ranks found each other, but cannot connect: on every machine set GLOO_SOCKET_IFNAME "
        "(and NCCL_SOCKET_IFNAME) to the network interface that leads to the other machines. This "
        f"one has {found}; {values} ({str(error).splitlines()[0]})"
    )
