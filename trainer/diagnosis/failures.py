"""How the failure of one rank reaches another process: as its own exception, with its traceback."""

from __future__ import annotations

import pickle
import re
import signal
import traceback
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import DistNetworkError

_LIMIT = 500_000  # of each part: a store refuses values over 8 MiB, by closing the connection

# What gloo and NCCL say when the other side is gone. A timeout counts too: the rank that reports
# it waited for another.
_TIMED_OUT = re.compile(r"[Tt]imed out|Application timeout")
_LINK_BROKE = re.compile(
    r"gloo/transport|Application timeout|Connection (reset|closed) by peer|ncclRemoteError"
)


class RankError(RuntimeError):
    """A rank ended in a way that left no exception to raise here: killed, silent, or by an exit."""


class SampleError(ValueError):
    """The user's dataset raised, or what makes batches of it: a mistake there, or an accident."""


class RemoteTraceback(Exception):  # noqa: N818 - shown as a cause, never raised
    """The traceback of another process as text; the cause of the exception raised here.

    Attributes:
        is_mistake: Whether the exception tells the user of a mistake, as `is_mistake` says.
        is_final: Whether it comes again however often it is tried.
    """

    def __init__(self, text: str, is_mistake: bool = False, is_final: bool = False) -> None:
        super().__init__(text)
        self.is_mistake = is_mistake
        self.is_final = is_final

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass(frozen=True)
class Failure:
    """An exception on its way to another process.

    Attributes:
        rank: Where it was raised.
        secondary: Whether it only follows from another rank's failure.
        text: Who, where, and the traceback.
        message: Type and message in one line.
        is_mistake: Whether it tells the user of a mistake.
        is_final: Whether it comes again however often it is tried.
        pickled: The exception itself; None where it cannot be pickled, or would end the caller
            (SystemExit, KeyboardInterrupt).
    """

    rank: int
    secondary: bool
    text: str
    message: str
    is_mistake: bool
    is_final: bool
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException, rank: int, where: str) -> Failure:
        """Describe ``error``, which is being handled on ``rank``."""
        first_frame = (
            error.__traceback__ and error.__traceback__.tb_next
        )  # without the caller's own
        trace = "".join(traceback.format_exception(type(error), error, first_frame))
        place = f"rank {rank}, {where}" if where else f"rank {rank}"
        return cls(
            rank=rank,
            secondary=follows_from_another(error),
            text=f"{place}:\n{trace[-_LIMIT:]}",
            message="".join(traceback.format_exception_only(type(error), error)).strip()[:_LIMIT],
            is_mistake=is_mistake(error),
            is_final=is_final(error),
            pickled=_pickle(error) if isinstance(error, Exception) else None,
        )

    def error(self) -> Exception:
        """Return the exception to raise here, with the other process's traceback as its cause."""
        error: Exception
        if self.pickled is None:
            error = RankError(f"rank {self.rank}: {self.message}")
        else:
            error = pickle.loads(self.pickled)
        error.__cause__ = RemoteTraceback(self.text, self.is_mistake, self.is_final)
        return error


def follows_from_another(error: BaseException) -> bool:
    """Whether ``error`` says no more than that another rank failed, or that its link broke."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, DistNetworkError | RemoteTraceback):
            return True
        if isinstance(seen, RuntimeError) and _LINK_BROKE.search(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def is_mistake(error: BaseException) -> bool:
    """Whether ``error`` is a `ValueError` by which this package tells the user of a mistake.

    It needs no traceback.
    """
    if isinstance(error.__cause__, RemoteTraceback):
        return error.__cause__.is_mistake
    frames = traceback.extract_tb(error.__traceback__)
    return (
        isinstance(error, ValueError)
        and not isinstance(error, SampleError)
        and bool(frames)
        and Path(__file__).parents[1] in Path(frames[-1].filename).parents
    )


def is_final(error: BaseException) -> bool:
    """Whether ``error`` comes again however often it is tried: a mistake that nothing else caused.

    An option can look wrong because a network disk did not answer.
    """
    if isinstance(error.__cause__, RemoteTraceback):
        return error.__cause__.is_final
    return is_mistake(error) and error.__cause__ is None


def shown(error: Exception) -> str:
    """Return what to show of an error: of a mistake, or a killed rank, no code."""
    if not is_mistake(error):
        if isinstance(error.__cause__, RemoteTraceback):
            return str(error.__cause__.args[0])
        if not isinstance(error, RankError):
            frames = error.__traceback__ and error.__traceback__.tb_next  # without the caller's own
            return "".join(traceback.format_exception(type(error), error, frames))
    return f"error: {error}\n"


def is_hopeless(error: Exception, before: Exception | None) -> bool:
    """Whether ranks that failed with ``error``, and ``before`` that, would do so again.

    It was no accident if the same exception came from the same place at the same step twice, or if
    it tells of a mistake.
    """
    trace = error.__cause__
    if not isinstance(trace, RemoteTraceback) or isinstance(error, RankError):
        return False
    if trace.is_final:
        return True
    return before is not None and _without_rank(shown(before)) == _without_rank(shown(error))


def _without_rank(text: str) -> str:
    return re.sub(r"^rank \d+", "", text)


def death_of(rank: int, exitcode: int) -> RankError:
    """Return the error for a rank that ended without saying why."""
    if exitcode >= 0:
        return RankError(f"rank {rank} ended with exit code {exitcode} before its work was done")
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = ""
    if -exitcode == signal.SIGKILL:
        hint = (
            "; if nobody did that by hand, the machine ran out of memory: use a smaller "
            "micro_batch_size, fewer num_workers or fewer devices"
        )
    return RankError(f"rank {rank} was killed by {name}{hint}")


def unanswered(silent: set[int], told_by: Failure) -> Exception:
    """Return the error where some ranks only tell of others, and the ``silent`` ones of nothing."""
    error = told_by.error()
    if not silent or not _TIMED_OUT.search(str(error)):
        return error
    ranks = ", ".join(map(str, sorted(silent)))
    named = RankError(
        f"rank {ranks} did not answer in time: it hangs, or does work that the other ranks do not "
        "wait for"
    )
    named.__cause__ = error.__cause__
    return named


def ended_elsewhere(told_by: Failure) -> RankError:
    """Return the error where all ranks of this machine only tell of those of another one."""
    kind, _, text = told_by.message.partition(": ")
    said = (text or kind).splitlines()[0]
    return RankError(
        f"rank {told_by.rank} ends because a rank on another machine did, or the network between "
        f"them broke; look there for the cause ({said})"
    )


def _pickle(error: BaseException) -> bytes | None:
    """Return ``error`` as bytes that load again, or None."""
    import cloudpickle

    # By reference first, so that the other side gets its own class and `except` finds it.
    for dumps in (pickle.dumps, cloudpickle.dumps):
        try:
            data: bytes = dumps(error)
            pickle.loads(data)
        except Exception:
            continue
        return data if len(data) < _LIMIT else None
    return None
