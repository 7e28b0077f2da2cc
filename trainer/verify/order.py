"""What a rank would load, epoch after epoch, and who decides the order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, SequentialSampler

from trainer.config import TrainerConfig
from trainer.data.batches import IndexedBatches
from trainer.data.fetching import Request
from trainer.data.loading import Source, length
from trainer.data.module import DataModule
from trainer.data.orders import generator_states, put_back

MOST_BATCHES = 10_000  # that are asked of a sampler which does not say how many it has
FEW_SAMPLES = 10  # two orders of so few can be equal by chance


def order_of(source: Source, data: DataModule, config: TrainerConfig) -> tuple[str, bool]:
    """Return what decides the order of an epoch, and whether it is meant to change with it."""
    if config.overfit_batches:
        return f"overfit_batches={config.overfit_batches}", False
    if source.loader is not None:
        sampler: Any = source.loader.batch_sampler
        if type(sampler) is BatchSampler:
            sampler = sampler.sampler
        return type(sampler).__name__, not isinstance(sampler, SequentialSampler)
    if data.orders_epochs:
        return f"{type(data).__name__}.train_indices", True
    return f"shuffle={str(config.shuffle).lower()}", config.shuffle


def requested(batches: IndexedBatches) -> list[list[Request]]:
    """Return what this rank would load in two epochs, or in more where there is little.

    Random generators that a user's sampler holds are afterwards where they were, so that what is
    trained next has the orders that are returned.
    """
    loader = batches.source.loader
    given = [] if loader is None else generator_states(loader)
    few = (length(batches.source.dataset) or 0) <= FEW_SAMPLES
    epochs = []
    for epoch in range(8 if few else 2):
        requests = batches.requests(epoch)
        if batches.steps_per_epoch is None:
            requests = _first_batches(requests, MOST_BATCHES)
        epochs.append(list(requests))
    put_back(given)
    return epochs


def _first_batches(requests: Iterator[Request], most: int) -> Iterator[Request]:
    """Yield the requests of the first global batches: of as many on every rank."""
    done = itertools.count(1)
    for request in requests:
        yield request
        if request.is_last and next(done) == most:
            return
