"""What loading is made of: micro-batches, the user's data taken apart, torch's ``DataLoader``.

A rank's epoch is a stream of `MicroBatch`, in the order in which the loop computes them. Datasets
with indices are cut in ``batches.py``, iterable ones in ``streams.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    default_collate,
)

from trainer import distributed
from trainer.plan import stream_key


class MicroBatch(NamedTuple):
    """What one forward gets.

    Attributes:
        batch: The collated samples; None on a rank that has none of this global batch.
        num_samples: Samples in ``batch``.
        position: Position in the epoch of its first sample.
        number: Its number within the global batch, over all ranks.
        global_size: Samples in the whole global batch.
        is_last: Whether it is this rank's last one of the global batch.
    """

    batch: Any
    num_samples: int
    position: int
    number: int
    global_size: int
    is_last: bool


@dataclass(frozen=True)
class LoaderOptions:
    """How a rank loads.

    Attributes:
        num_workers: Loader processes of this rank; a user's DataLoader brings its own number.
        pin_memory: Whether batches are put into page-locked memory, for asynchronous copies.
        seed: Seed of the run.
        count: Counts the samples of a ready-made batch (``TaskModule.batch_size``).
    """

    num_workers: int
    pin_memory: bool
    seed: int
    count: Callable[[Any], int]


class Source(NamedTuple):
    """A dataset or a user's DataLoader, taken apart."""

    dataset: Any
    collate: Callable[[list[Any]], Any] | None
    loader: DataLoader[Any] | None

    @property
    def is_stream(self) -> bool:
        """Whether the samples come one after the other, without an index."""
        return isinstance(self.dataset, IterableDataset)

    @property
    def batch_size(self) -> int | None:
        """The global batch size that a user's DataLoader defines, if it has a fixed one."""
        if self.loader is None:
            return None
        batch_sampler: Any = self.loader.batch_sampler
        return self.loader.batch_size or getattr(batch_sampler, "batch_size", None)


def open_source(data: Any, collate: Callable[[list[Any]], Any] | None, split: str) -> Source:
    """Take ``data`` apart, and refuse what cannot be cut into global batches.

    Raises:
        ValueError: If ``data`` is no dataset or loader, or is a loader that cannot be cut.
    """
    if isinstance(data, DataLoader):
        loader: DataLoader[Any] = data
        samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
        if any(isinstance(s, DistributedSampler) and s.num_replicas > 1 for s in samplers):
            raise ValueError(
                f"the {split} DataLoader has a DistributedSampler, which drops the other ranks' "
                "samples; give a plain sampler (or shuffle=True): each of its batches is one "
                "global batch, and the Trainer cuts it for the ranks"
            )
        is_stream = isinstance(loader.dataset, IterableDataset)
        if loader.batch_sampler is None and not is_stream:
            raise ValueError(
                f"the {split} DataLoader has batch_size=None over an indexed dataset, so a batch "
                "cannot be divided without loading it on every rank; give it batch_size or "
                "batch_sampler, and let the dataset's __getitems__(indices) return ready batches"
            )
        # With batch_size=None torch collates nothing: the stream's items are batches already.
        collate_fn = loader.collate_fn if loader.batch_size or not is_stream else None
        return Source(loader.dataset, collate_fn, loader)
    if isinstance(data, IterableDataset):
        return Source(data, collate or default_collate, None)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return Source(data, collate or default_collate, None)
    raise ValueError(
        f"the {split} data is a {type(data).__name__}; it must be a Dataset (with __getitem__ and "
        "__len__), an IterableDataset or a DataLoader"
    )


class Batches:
    """One rank's micro-batches, epoch after epoch.

    Attributes:
        steps_per_epoch: Global batches in an epoch; None if only the data's end tells.
    """

    steps_per_epoch: int | None

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of one epoch, from global batch ``start_step`` on."""
        raise NotImplementedError


def data_loader(
    dataset: Dataset[Any],
    options: LoaderOptions,
    user: DataLoader[Any] | None,
    sampler: Sampler[Any] | None = None,
) -> DataLoader[Any]:
    """Return torch's loader for ``dataset``, whose items are ready as they are.

    Args:
        dataset: Yields or fetches `MicroBatch` objects.
        options: How to load.
        user: A user's DataLoader, whose settings win.
        sampler: What to fetch; None for a stream.
    """
    own: dict[str, Any] = {"num_workers": options.num_workers, "pin_memory": options.pin_memory}
    if user is not None:
        own = {
            "num_workers": user.num_workers,
            "pin_memory": user.pin_memory or options.pin_memory,
            "timeout": user.timeout,
            "worker_init_fn": user.worker_init_fn,
            "multiprocessing_context": user.multiprocessing_context,
            "prefetch_factor": user.prefetch_factor,
        }
    # Loader workers are seeded from here: apart from the global generator, and unlike on each rank.
    generator = torch.Generator().manual_seed(stream_key(options.seed, distributed.rank()))
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        collate_fn=_as_it_is,
        generator=generator,
        # A stream starts anew in fresh workers: that is how set_epoch reaches them.
        persistent_workers=own["num_workers"] > 0 and sampler is not None,
        **own,
    )


def set_epoch(thing: Any, epoch: int) -> None:
    """Call ``set_epoch(epoch)`` on ``thing`` and on every sampler and dataset that it holds."""
    seen: set[int] = set()

    def visit(node: Any) -> None:
        if id(node) in seen:
            return
        seen.add(id(node))
        if isinstance(node, list | tuple):
            # Of a long list of samples nothing is a sampler: a look at the first few tells.
            for part in node[:64]:
                visit(part)
            return
        if not isinstance(node, Sampler | Dataset) and not hasattr(node, "set_epoch"):
            return
        if callable(getattr(node, "set_epoch", None)):
            node.set_epoch(epoch)
        for part in vars(node).values() if hasattr(node, "__dict__") else ():
            visit(part)

    visit(thing)


def _as_it_is(batch: Any) -> Any:
    return batch
