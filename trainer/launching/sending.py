"""How work travels to fresh interpreters: by a file, of which they map what is large.

So the samples of a dataset, in tensors or NumPy arrays, are in memory once for all ranks of a
machine, as in ranks that are forked. A page that a rank writes to becomes its own.
"""

from __future__ import annotations

import os
import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from trainer.culprit import culprit
from trainer.diagnosis.failures import RankError

MAKE_ROOM = "make room there, or set TMPDIR to a folder that has more"

_LARGE = 1 << 20  # bytes of an array


def send(work: object, path: str) -> None:
    """Write ``work`` to a new file.

    Raises:
        ValueError: If it cannot be pickled.
        OSError: If it cannot be written.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if type(obj) is np.ndarray and _can_be_mapped(obj):
                return _array, (_bytes(obj), obj.dtype, obj.shape, obj.flags.writeable)
            return super().reducer_override(obj)

    module = SimpleNamespace(__name__=__name__, Pickler=Pickler)  # where torch looks for it
    try:
        with open(path, "wb") as file:
            torch.save(work, file, module, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        reason = refused_by_system(error)
        if reason is not None:
            raise OSError(
                "the task, the data and other arguments cannot be written to "
                f"{path}, where the ranks would read them: {reason}; {MAKE_ROOM}"
            ) from error
        raise ValueError(
            f"{culprit(work) or 'the task, the data or another argument'} cannot be sent to the "
            f"ranks: {error}; make it picklable (open files and locks where they are used, say)"
            f"{_ways_to_fork()}"
        ) from error


def refused_by_system(error: Exception) -> OSError | None:
    """Return why the system did not write, if that is why `torch.save` failed."""
    # Torch's writer makes a RuntimeError of it.
    reason = error.__context__ if isinstance(error, RuntimeError) else error
    return reason if isinstance(reason, OSError) else None


def receive(path: str) -> Any:
    """Return what `send` wrote.

    Raises:
        RankError: If that cannot be read here.
    """
    try:
        return torch.load(path, mmap=True, weights_only=False)
    except Exception as error:
        raise RankError(
            "the task, the data or another argument was sent to the ranks, but a rank cannot "
            f"unpickle it: {type(error).__name__}: {error}; make it one that a fresh interpreter "
            f"can read{_ways_to_fork()}"
        ) from error


def _ways_to_fork() -> str:
    """Return what else to do; ranks that are forked need nothing sent."""
    if "TRAINER_START_METHOD" in os.environ:
        return ", or unset TRAINER_START_METHOD, so that the ranks can be forked"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return (
            ", or start the ranks before CUDA is used in this process, so that they can be forked"
        )
    return "; the line `launcher: ...` says why the ranks are not forked, which needs none of this"


def _can_be_mapped(array: np.ndarray[Any, Any]) -> bool:
    return array.nbytes >= _LARGE and array.flags.c_contiguous and not array.dtype.hasobject


def _bytes(array: np.ndarray[Any, Any]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array.reshape(-1).view(np.uint8))


def _array(
    data: torch.Tensor, dtype: np.dtype[Any], shape: tuple[int, ...], writeable: bool
) -> np.ndarray[Any, Any]:
    array = data.numpy().view(dtype).reshape(shape)
    array.flags.writeable = writeable
    return array
