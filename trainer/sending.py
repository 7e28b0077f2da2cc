"""How work travels to fresh interpreters: by a file, of which they map what is large.

So the samples of a dataset, in tensors or NumPy arrays, are in memory once for all ranks of a
machine, as in ranks that are forked. A page that a rank writes to becomes its own.
"""

from __future__ import annotations

import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

_LARGE = 1 << 20  # bytes of an array


def send(work: object, path: str) -> None:
    """Write ``work`` to a new file.

    Raises:
        ValueError: If it cannot be pickled.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if type(obj) is np.ndarray and _can_be_mapped(obj):
                return _array, (_bytes(obj), obj.dtype, obj.shape, obj.flags.writeable)
            return super().reducer_override(obj)

    module = SimpleNamespace(__name__=__name__, Pickler=Pickler)  # where torch looks for it
    try:
        torch.save(work, path, module, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise ValueError(
            f"the task, the data or another argument cannot be sent to the ranks: {error}; "
            "make it picklable (open files and locks where they are used, say), or start the "
            "ranks before CUDA is used in this process, so that they can be forked"
        ) from error


def receive(path: str) -> Any:
    """Return what `send` wrote."""
    return torch.load(path, mmap=True, weights_only=False)


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
