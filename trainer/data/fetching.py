"""Fetching the samples of one micro-batch out of a dataset with indices."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from trainer.data.loading import MicroBatch, Source, length, set_epoch


class Request(NamedTuple):
    """A micro-batch that is still to be loaded: its ``indices`` instead of its batch."""

    indices: Sequence[int]
    position: int
    number: int
    global_size: int
    is_last: bool
    epoch: int


class Fetch(Dataset[MicroBatch]):
    """Loads what a request asks for; runs in the rank's process or in a loader worker."""

    def __init__(self, source: Source) -> None:
        self.source = source._replace(loader=None)  # workers need no copy of it
        self._dataset = source.dataset
        self._epoch = 0

    def __getitem__(self, request: Request) -> MicroBatch:
        """Load one micro-batch.

        Raises:
            ValueError: If the dataset does; says for which index.
        """
        if request.epoch != self._epoch:
            # A worker that lives through several epochs has its own copy of the dataset.
            set_epoch(self._dataset, request.epoch)
            self._epoch = request.epoch
        indices = list(request.indices)
        batch = self._load(indices) if indices else None
        return MicroBatch(batch, len(indices), *request[1:5])

    def _load(self, indices: list[int]) -> Any:
        if callable(getattr(self._dataset, "__getitems__", None)):
            samples = self._get_items(indices)
            # Anything but a list is a batch that is collated already.
            return self._collate(samples, indices) if isinstance(samples, list) else samples
        if type(self._dataset) is TensorDataset and self.source.collate is default_collate:
            with suppress(IndexError, RuntimeError):  # item by item, the index at fault is found
                return _rows(self._dataset, indices)
        return self._collate([self._get_item(index) for index in indices], indices)

    def _collate(self, samples: list[Any], indices: list[int]) -> Any:
        try:
            return self.source.collate(samples)
        except Exception as error:
            raise ValueError(
                f"collating the samples {indices} raised {type(error).__name__}: {error}; samples "
                "of one batch must have the same keys and shapes, or collate_fn must pad them"
            ) from error

    def _get_item(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except Exception as error:
            raise _item_error(self._dataset, index, error) from error

    def _get_items(self, indices: list[int]) -> Any:
        try:
            return self._dataset.__getitems__(indices)
        except Exception as error:
            for index in indices:
                try:
                    self._dataset.__getitems__([index])
                except Exception as alone:
                    raise _item_error(self._dataset, index, alone) from alone
            name = type(self._dataset).__name__
            raise ValueError(
                f"{name}.__getitems__ raised {type(error).__name__}: {error} for the indices "
                f"{indices}, though for none of them alone"
            ) from error


def _rows(dataset: TensorDataset, indices: list[int]) -> list[torch.Tensor]:
    """Return what collating the items gives, in one call per tensor instead of one per sample."""
    chosen = torch.tensor(indices)
    return [tensor.index_select(0, chosen) for tensor in dataset.tensors]


def _item_error(dataset: Any, index: int, error: Exception) -> ValueError:
    return ValueError(
        f"{type(dataset).__name__}[{index}] raised {type(error).__name__}: {error}; repair or "
        f"leave out the sample with index {index} (len() of the dataset: {length(dataset)})"
    )
