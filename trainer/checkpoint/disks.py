"""Machines that share no disk: the newest checkpoint may lie on another one than rank 0's.

Rank 0 writes the checkpoints of a run, and reads them for all. When machines come and go, another
one may have rank 0 than before. So before a run goes on, the machines tell each other what they
have, and rank 0 gets the newest. Each machine also notes the last checkpoint that rank 0's began to
write: so that one that is left alone knows that it lacks something.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from trainer import distributed
from trainer.checkpoint.finding import run_place
from trainer.checkpoint.manifest import FOLDER, step_of
from trainer.checkpoint.store import LocalStore
from trainer.config import TrainerConfig
from trainer.launching import attempt
from trainer.watch import Phase, watch

_NOTE = "elsewhere.json"
_CHUNK = 16 << 20  # bytes of a file on their way, at a time


class _Elsewhere(NamedTuple):
    """What a machine knows of checkpoints that it does not have itself."""

    host: str
    step: int
    launch: str | None


class _Machine(NamedTuple):
    """What a machine tells the others.

    Attributes:
        rank: Of its first rank, which speaks for it.
        host: Its name.
        names: Its checkpoints that the run may go on from, oldest first.
        elsewhere: What it knows of others.
    """

    rank: int
    host: str
    names: list[str]
    elsewhere: _Elsewhere | None


def gather_newest(config: TrainerConfig, run_dir: Path) -> None:
    """Bring the newest checkpoint that the run may go on from to rank 0's disk.

    Must be called on every rank, before rank 0 looks for it.

    Raises:
        ValueError: If a newer one is known to be on a machine that is not here.
    """
    own = attempt.current()
    launch = own.launch if own.is_restart else None
    if not own.is_restart and config.resume != "auto":
        return
    if not isinstance(run_place(config, run_dir), Path):
        return  # a store that all machines reach
    machines = _asked(run_dir, launch)
    if len(machines) > 1:
        _drop_damaged(machines, run_dir)
    newest = max(machines, key=_order)
    distributed.on_first_rank(lambda: _check_complete(newest, machines, run_dir))
    if newest.rank > 0 and newest.names:
        _bring(newest, run_dir)


class Witness:
    """Notes on a machine without rank 0's disk which checkpoint is being written there.

    Every rank has one. On the first rank of such a machine it writes; else it does nothing. It is
    noted when it begins: at the end the machines may have lost each other, and a run that goes on
    without a checkpoint that is there loses work in silence.
    """

    def __init__(self, config: TrainerConfig, run_dir: Path, step: int) -> None:
        """Forget what is beyond the step from which the run starts. Must be called on every rank.

        Args:
            config: Of the run.
            run_dir: Its folder.
            step: Where it starts.
        """
        self._note: Path | None = None
        if not isinstance(run_place(config, run_dir), Path):
            return
        if distributed.rank() == 0:
            (run_dir / _NOTE).unlink(missing_ok=True)  # what this run saves is here
        if _is_only_machine():
            return
        has_disk_of_first = _has_disk_of_first(run_dir)
        self._host = distributed.broadcast_object(socket.gethostname())
        if has_disk_of_first or distributed.local_rank() > 0:
            return
        self._note = run_dir / _NOTE
        self._note.unlink(missing_ok=True)
        store = LocalStore(run_dir / FOLDER)
        future = [name for name in store.names() if step_of(name) > step]
        if future:
            place = store.set_aside(future)
            print(
                f"moved the checkpoints beyond step {step}, where the run on {self._host} starts, "
                f"to {place}",
                file=sys.stderr,
            )

    def saves(self, step: int) -> None:
        """Note that rank 0 begins to save this step. It may be called on every rank."""
        if self._note is None:
            return
        found = _Elsewhere(self._host, step, attempt.current().launch)
        self._note.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._note.with_suffix(".tmp")
        temporary.write_text(json.dumps(found))
        temporary.replace(self._note)


def _asked(run_dir: Path, launch: str | None) -> list[_Machine]:
    """Return what the machines have, rank 0's first, of those that do not share its disk."""
    mine = None
    if not _has_disk_of_first(run_dir) or distributed.rank() == 0:
        names = _candidates(LocalStore(run_dir / FOLDER), launch)
        mine = _Machine(distributed.rank(), socket.gethostname(), names, _noted(run_dir, launch))
        mine = mine if distributed.local_rank() == 0 else None
    return [found for found in distributed.all_gather_object(mine) if found is not None]


def _order(machine: _Machine) -> tuple[int, bool]:
    return step_of(machine.names[-1]) if machine.names else -1, machine.rank == 0


def _drop_damaged(machines: list[_Machine], run_dir: Path) -> None:
    """Have the machine with the newest checkpoint read it, and take the next one if it must."""
    while (newest := max(machines, key=_order)).names:
        is_whole = False
        if distributed.rank() == newest.rank:
            try:
                LocalStore(run_dir / FOLDER).fetch(newest.names[-1])
                is_whole = True
            except ValueError as error:
                print(f"NOT using a damaged checkpoint: {error}", file=sys.stderr, flush=True)
        with watch.excused(Phase.PREPARING):
            if distributed.broadcast_object(is_whole, src=newest.rank):
                return
        newest.names.pop()


def _check_complete(newest: _Machine, machines: list[_Machine], run_dir: Path) -> None:
    """Refuse to go on if the run may have been saved later on a machine that is not here.

    Raises:
        ValueError: Saying which one, and what to do.
    """
    here = [machine.host for machine in machines]
    known = [m.elsewhere for m in machines if m.elsewhere and m.elsewhere.host not in here]
    missing = max(known, key=lambda each: each.step, default=None)
    if missing is None or missing.step <= _order(newest)[0]:
        return
    there = newest.names[-1] if newest.names else "none"
    raise ValueError(
        f"{missing.host} began to save this run at step {missing.step}, in {run_dir}, and is not "
        "here to tell whether it could; the newest checkpoint of the machines that are: "
        f"{there}. Start again together with {missing.host}, or copy its checkpoints to one of "
        "these machines. To go on without them, or if there is none of that step, remove "
        f"{run_dir / _NOTE} on every machine. With a run_dir that all machines share, or a url, "
        "this cannot happen"
    )


def _has_disk_of_first(run_dir: Path) -> bool:
    """Whether this rank sees the folder in which rank 0 writes. Must be called on every rank."""
    if _is_only_machine():
        return True
    token = run_dir / distributed.broadcast_object(f".{uuid.uuid4().hex}")
    if distributed.rank() == 0:
        token.touch()
    distributed.barrier()
    found = token.exists()
    distributed.barrier()
    if distributed.rank() == 0:
        token.unlink()
    return found


def _is_only_machine() -> bool:
    return distributed.world_size() == distributed.local_world_size()


def _candidates(store: LocalStore, launch: str | None) -> list[str]:
    """Return the names of checkpoints, of one launch if that is asked for, that look whole."""
    found = []
    for name in store.names():
        with suppress(ValueError):  # damaged: whoever reads it says so
            if launch is None or store.facts(name).get("launch") == launch:
                found.append(name)
    return found


def _noted(run_dir: Path, launch: str | None) -> _Elsewhere | None:
    try:
        found = _Elsewhere(*json.loads((run_dir / _NOTE).read_text()))
    except (OSError, ValueError, TypeError):  # none, or half of one
        return None
    return found if launch is None or found.launch == launch else None


def _bring(machine: _Machine, run_dir: Path) -> None:
    """Copy the machine's newest checkpoint to rank 0's disk, verified at both ends."""
    rank, name = distributed.rank(), machine.names[-1]
    store = LocalStore(run_dir / FOLDER)
    with watch.excused(Phase.PREPARING):
        if rank == machine.rank:
            _send(store.fetch(name))
        elif rank == 0:
            print(f"getting {name} from the machine of rank {machine.rank}", flush=True)
            store.open()
            workspace = store.workspace(name)
            _receive(workspace, machine.rank)
            store.put(workspace, name)
        distributed.barrier()


def _send(checkpoint: Path) -> None:
    files = sorted(path for path in checkpoint.iterdir() if path.is_file())
    listed: list[Any] = [[(path.name, path.stat().st_size) for path in files]]
    dist.send_object_list(listed, 0)
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                dist.send(torch.frombuffer(bytearray(chunk), dtype=torch.uint8), 0)


def _receive(folder: Path, source: int) -> None:
    listed: list[Any] = [None]
    dist.recv_object_list(listed, source)
    for name, size in listed[0]:
        with (folder / name).open("xb") as file:
            while size:
                chunk = torch.empty(min(size, _CHUNK), dtype=torch.uint8)
                dist.recv(chunk, source)
                file.write(chunk.numpy().data)
                size -= len(chunk)
            file.flush()
            os.fsync(file.fileno())
