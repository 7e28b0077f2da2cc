import os
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from trainer.data.advice import faster_loading
from trainer.data.loading import open_source

MANY = "a __getitems__ that loads many samples at once"


class OneByOne(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


class Together(OneByOne):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(4))


@pytest.mark.parametrize(
    ("data", "num_workers", "expected"),
    [
        (OneByOne(), 0, ("num_workers=4", MANY)),
        (Subset(OneByOne(), [0]), 4, ("num_workers=8", MANY)),
        (OneByOne(), 8, (MANY,)),
        (Together(), 0, ("num_workers=4",)),
        (TensorDataset(torch.zeros(4)), 0, ("num_workers=4",)),
        (Stream(), 2, ("num_workers=4",)),
        (DataLoader(Together(), num_workers=2), 0, ("num_workers=4 of the DataLoader",)),
        (Together(), 8, ("to do less for each sample: what is the same every time, once",)),
    ],
)
def test_what_is_not_done_yet(
    data: Any, num_workers: int, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert faster_loading(open_source(data, None, "train"), num_workers) == expected


def test_few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert "num_workers=2" in faster_loading(open_source(OneByOne(), None, "train"), 0)
