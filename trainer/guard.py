"""No collective from code that runs on one rank only: it would wait for the others for ever.

What runs on rank 0 only (callbacks, loggers, a user's sampler) runs inside `no_collectives`, where
a collective raises before it starts, however it was reached: through ``torch.distributed``,
torchmetrics, SyncBatchNorm, DDP or a compiled function. All of them end in torch's dispatcher,
which shows every operation to the mode below. Only making a group does not.
"""

from __future__ import annotations

import functools
import linecache
import os
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

# Namespaces of torch's operators: the plain collectives, those of compiled functions, of DTensor.
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")
_TORCH = str(Path(torch.__file__).parent)
_NOT_THE_USERS = (
    str(Path(os.__file__).parent),  # Python's own
    str(Path(torch.__file__).parents[1]),  # installed
    _TORCH,
    str(Path(__file__).parent),
    "<",  # made by a compiler
)


class _Here(threading.local):
    what: str | None = None  # that runs alone, in this thread


_here = _Here()


@contextmanager
def no_collectives(what: str) -> Iterator[None]:
    """Refuse collectives meanwhile, also in threads that are started here.

    In a world of one rank, which waits for nobody, nothing is refused. It takes some microseconds,
    and as many for each tensor operation inside.

    Args:
        what: Which of the user's code runs on one rank only: ``"a callback"``.

    Raises:
        ValueError: At the collective, naming it, its line, and what to do instead.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    _watch_groups_and_threads()
    outer, _here.what = _here.what, what
    try:
        with _RefuseCollectives():  # type: ignore[no-untyped-call]
            yield
    finally:
        _here.what = outer


class _RefuseCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True  # such as flex_attention

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled functions compiled: the collectives that they run are seen too."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__module__ == "torch.distributed.tensor" for kind in types):
            return NotImplemented  # a DTensor acts first, and what it calls comes here
        # Waiting for what all ranks have started before is no collective.
        if func.namespace in _COLLECTIVES and not func.__name__.startswith("wait_tensor"):
            raise _refusal(func.__name__.split(".")[0].strip("_"))
        return func(*args, **(kwargs or {}))


@functools.cache
def _watch_groups_and_threads() -> None:
    """Refuse to make a group, and have threads run alone that are started where all runs alone."""
    name_group, start = distributed_c10d._process_group_name, threading.Thread.start

    @functools.wraps(name_group)
    def name_group_of_all(*args: Any, **kwargs: Any) -> Any:
        if _here.what is not None:
            raise _refusal("new_group")
        return name_group(*args, **kwargs)

    @functools.wraps(start)
    def start_alike(thread: threading.Thread) -> None:
        if _here.what is not None:
            what, run = f"a thread that was started in {_named(_called_from()[0])}", thread.run

            def run_alone() -> None:
                with no_collectives(what):
                    run()

            thread.run = run_alone  # type: ignore[method-assign]
        start(thread)

    # Every way to make a group gives it a name before anything is sent.
    distributed_c10d._process_group_name = name_group_of_all
    threading.Thread.start = start_alike  # type: ignore[assignment,method-assign]


def _refusal(operation: str) -> ValueError:
    """Return the error for a collective that this thread is about to start."""
    who, frames = _called_from()
    for frame in reversed(frames):  # its name as the user called it
        if frame.f_code.co_filename == distributed_c10d.__file__:
            operation = frame.f_code.co_name
            break
    files = [frame.f_code.co_filename for frame in frames]
    # The innermost line of the user's, else of another library, else any.
    places = [
        *(f for f, file in zip(frames, files, strict=True) if not file.startswith(_NOT_THE_USERS)),
        *(f for f, file in zip(frames, files, strict=True) if not file.startswith(_TORCH)),
        *frames,
    ]
    code, line = places[0].f_code, places[0].f_lineno
    text = linecache.getline(code.co_filename, line, places[0].f_globals).strip()
    return ValueError(
        f"{operation} needs every rank, and only rank {dist.get_rank()} runs {_named(who)}: it "
        "would wait for the others for ever. It is called here:\n"
        f'  File "{code.co_filename}", line {line}, in {code.co_name}\n'
        f"    {text}\n"
        "Call it in a hook of the TaskModule, which every rank runs (on_epoch_start, "
        "before_optimizer_step, after_optimizer_step, on_validation_end, on_epoch_end), or log the "
        "value with TaskModule.log: the metrics that callbacks and loggers get are over all ranks"
    )


def _named(who: str) -> str:
    return f"{_here.what} ({who})" if who else str(_here.what)


def _called_from() -> tuple[str, list[FrameType]]:
    """Return the method that the Trainer called, if known, and the frames from here out to it."""
    from trainer.callbacks import Callback
    from trainer.data.module import DataModule
    from trainer.loggers import Logger

    who, frames, count = "", [], None
    for frame, _ in traceback.walk_stack(None):
        frames.append(frame)
        owner = frame.f_locals.get("self")
        if isinstance(owner, Callback | Logger | DataModule):
            who, count = f"{type(owner).__name__}.{frame.f_code.co_name}", len(frames)
    return who, frames[:count]
