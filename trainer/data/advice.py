"""What may make loading faster that a run does not do yet."""

from __future__ import annotations

import os

from torch.utils.data import TensorDataset

from trainer import distributed
from trainer.data.fetching import fetches_together
from trainer.data.loading import Source


def faster_loading(source: Source, num_workers: int) -> tuple[str, ...]:
    """Return what to try where training waits for its data.

    Args:
        source: The training data.
        num_workers: Loader processes of this rank, unless a DataLoader of the user's says.
    """
    where = "" if source.loader is None else " of the DataLoader"
    workers = num_workers if source.loader is None else source.loader.num_workers
    cores = max(1, (os.cpu_count() or 1) // distributed.local_world_size())
    found = []
    if not workers:
        found.append(f"num_workers={min(4, max(2, cores))}{where}")
    elif 2 * workers <= cores:
        found.append(f"num_workers={2 * workers}{where}")
    is_one_by_one = (
        not fetches_together(source.dataset) and type(source.dataset) is not TensorDataset
    )
    if not source.is_stream and is_one_by_one:
        found.append("a __getitems__ that loads many samples at once")
    return tuple(found or ["to do less for each sample: what is the same every time, once"])
