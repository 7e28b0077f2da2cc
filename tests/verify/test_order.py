"""What a verification lists as the orders of the epochs."""

from __future__ import annotations

from typing import Any

import torch
from support import samples
from torch.utils.data import DataLoader

from trainer.data.batches import IndexedBatches, train_batches
from trainer.data.fetching import Request
from trainer.data.loading import LoaderOptions, open_source
from trainer.data.plan import GlobalBatchPlan
from trainer.verify.order import requested


def indices(requests: Any) -> list[int]:
    return [index for request in requests for index in request.indices]


def test_what_is_listed_is_what_is_trained_where_the_sampler_holds_a_generator() -> None:
    own = torch.Generator().manual_seed(3)
    loader: DataLoader[Any] = DataLoader(samples(22), 8, shuffle=True, generator=own)
    batches = train_batches(
        open_source(loader, None, "train"),
        GlobalBatchPlan(8, None),
        LoaderOptions(0, pin_memory=False, seed=5, count=len, reproducible=False),
        shuffle=False,
        drop_last=False,
        limit=None,
        overfit=0,
        indices=None,
    )
    assert isinstance(batches, IndexedBatches)
    listed: list[list[Request]] = requested(batches)
    assert indices(listed[0]) != indices(listed[1])
    for epoch in range(2):
        assert indices(batches.epoch(epoch)) == indices(listed[epoch])
