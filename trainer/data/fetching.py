"""Fetching the samples of one micro-batch out of a dataset with indices."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from trainer.data import draws
from trainer.data.held import Generators, set_epoch
from trainer.data.loading import Indices, MicroBatch, Source, length
from trainer.diagnosis.failures import SampleError
from trainer.seeding import Stream, stream_key


def plain(indices: Indices) -> list[Any]:
    """Return the indices with Python's own numbers, as a dataset expects them."""
    return indices.tolist() if isinstance(indices, np.ndarray) else list(indices)


class Request(NamedTuple):
    """A micro-batch that is still to be loaded: its ``indices`` instead of its batch."""

    indices: Indices
    position: int
    number: int
    global_size: int
    is_last: bool
    epoch: int


class Fetch(Dataset[MicroBatch]):
    """Loads what a request asks for; runs in the rank's process or in a loader worker.

    What the dataset draws for a sample, from Python's, NumPy's and torch's global generators or
    from its own, is a function of the seed, the epoch and the sample's position; what
    ``__getitems__`` or the collate function draws, of the position of the micro-batch.
    """

    def __init__(self, source: Source, seed: int) -> None:
        self.source = source._replace(loader=None)  # workers need no copy of it
        self._dataset = source.dataset
        self._epoch = 0
        self._seed = seed
        self._generators = Generators(source)
        self._draws = False  # whether the dataset has been seen to draw random numbers

    def start(self, epoch: int) -> None:
        """Tell the dataset that ``epoch`` starts."""
        set_epoch(self._dataset, epoch)
        self._epoch = epoch
        self._generators.look()

    def __getitem__(self, request: Request) -> MicroBatch:
        """Load one micro-batch.

        Raises:
            ValueError: If the dataset does; says for which index.
        """
        if request.epoch != self._epoch:
            # A worker that lives through several epochs has its own copy of the dataset.
            self.start(request.epoch)
        size = len(request.indices)
        batch = self._load(request.indices, request.position) if size else None
        return MicroBatch(batch, size, *request[1:5], request.indices)

    def _load(self, chosen: Indices, position: int) -> Any:
        if type(self._dataset) is TensorDataset and self.source.collate is default_collate:
            with suppress(IndexError):  # item by item the index is found
                return _rows(self._dataset, chosen)
        indices = plain(chosen)
        key = stream_key(self._seed, Stream.MICRO_BATCH, self._epoch, position)
        if fetches_together(self._dataset):
            self._generators.seed(key)
            samples = self._get_items(indices)
            if not isinstance(samples, list):
                return samples  # a batch that is collated already
        else:
            samples = self._get_each(indices, position)
            self._generators.seed(key)
        return self._collate(samples, indices)

    def _get_each(self, indices: list[Any], position: int) -> list[Any]:
        if not self._draws and not self._generators.own:
            draws.watch()
            samples = [self._get_item(index) for index in indices]
            self._draws = draws.anything_drawn()
            if not self._draws:
                return samples
        samples = []
        for place, index in enumerate(indices, position):
            key = stream_key(self._seed, Stream.SAMPLE, self._epoch, place)
            self._generators.seed(key)
            samples.append(self._get_item(index))
        return samples

    def _collate(self, samples: list[Any], indices: list[Any]) -> Any:
        try:
            return self.source.collate(samples)
        except Exception as error:
            advice = (
                "samples of one batch must have the same keys and shapes, or collate_fn must pad "
                "them"
            )
            if "shared memory" in str(error):
                advice = (
                    "loader workers send batches through /dev/shm: make it larger (docker run "
                    "--shm-size=8g), or use fewer num_workers"
                )
            raise SampleError(
                f"collating the samples {indices} raised {type(error).__name__}: {error}; {advice}"
            ) from error

    def _get_item(self, index: Any) -> Any:
        try:
            return self._dataset[index]
        except Exception as error:
            raise _item_error(self._dataset, index, error) from error

    def _get_items(self, indices: list[Any]) -> Any:
        try:
            return self._dataset.__getitems__(indices)
        except Exception as error:
            for index in indices:
                try:
                    self._dataset.__getitems__([index])
                except Exception as alone:
                    raise _item_error(self._dataset, index, alone) from alone
            name = type(self._dataset).__name__
            raise SampleError(
                f"{name}.__getitems__ raised {type(error).__name__}: {error} for the indices "
                f"{indices}, though for none of them alone"
            ) from error


def fetches_together(dataset: Any) -> bool:
    """Whether ``dataset`` has a ``__getitems__``."""
    while type(dataset) is Subset:  # has a __getitems__ also where its dataset has none
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def _rows(dataset: TensorDataset, indices: Indices) -> list[torch.Tensor]:
    """Return what collating the items gives, in one call per tensor instead of one per sample.

    Raises:
        IndexError: If an index is none of 0 to the number of samples - 1.
    """
    numbers = np.asarray(indices)
    if numbers.dtype != np.int64:
        raise IndexError("a key of another kind")
    chosen = torch.from_numpy(numbers)  # a quarter of the time of torch.tensor
    return [
        tensor.index_select(0, chosen if tensor.is_cpu else _beside(tensor, chosen))
        for tensor in dataset.tensors
    ]


def _beside(tensor: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the indices on the device of ``tensor``.

    Raises:
        IndexError: Which a device would find out too late, and do nothing from then on.
    """
    if chosen.dim() != 1 or int(chosen.min()) < 0 or int(chosen.max()) >= len(tensor):
        raise IndexError("index out of range")
    return chosen.to(tensor.device, non_blocking=True)


def _item_error(dataset: Any, index: Any, error: Exception) -> SampleError:
    return SampleError(
        f"{type(dataset).__name__}[{index}] raised {type(error).__name__}: {error}; repair or "
        f"leave out the sample with index {index} (len() of the dataset: {length(dataset)})"
    )
