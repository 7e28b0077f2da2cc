"""What loading is made of: micro-batches, the user's data taken apart, torch's ``DataLoader``.

A rank's epoch is a stream of `MicroBatch`, in the order in which the loop computes them. Datasets
with indices are cut in ``batches.py``, iterable ones in ``streams.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from trainer import distributed, stopping
from trainer.launching import children
from trainer.seeding import Stream, stream_key
from trainer.trees import to_device

Indices: TypeAlias = Sequence[Any] | npt.NDArray[np.int64]


class MicroBatch(NamedTuple):
    """What one forward gets.

    Attributes:
        batch: The collated samples; None on a rank that has none of this global batch.
        num_samples: Samples in ``batch``.
        position: Position in the epoch of its first sample.
        number: Its number within the global batch, over all ranks.
        global_size: Samples in the whole global batch.
        is_last: Whether it is this rank's last one of the global batch.
        indices: The dataset's indices of its samples, in order; none where samples have no index.
    """

    batch: Any
    num_samples: int
    position: int
    number: int
    global_size: int
    is_last: bool
    indices: Indices = ()

    def pin_memory(self) -> MicroBatch:
        """Pin the batch; torch's loader asks for it, and would go through the numbers too."""
        return self._replace(batch=pin_memory(self.batch))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class LoaderOptions:
    """How a rank loads.

    Attributes:
        num_workers: Loader processes of this rank; a user's DataLoader brings its own number.
        pin_memory: Whether batches are put into page-locked memory, for asynchronous copies.
        seed: Seed of the run.
        count: Counts the samples of a ready-made batch (``TaskModule.batch_size``).
        reproducible: Whether nothing that is loaded may depend on the world size.
    """

    num_workers: int
    pin_memory: bool
    seed: int
    count: Callable[[Any], int]
    reproducible: bool


class Source(NamedTuple):
    """A dataset or a user's DataLoader, taken apart.

    Attributes:
        dataset: Where the samples are.
        collate: Makes a batch of a list of samples; of one item where the items are batches.
        loader: The user's DataLoader, if one was given.
    """

    dataset: Any
    collate: Callable[[Any], Any]
    loader: DataLoader[Any] | None

    @property
    def is_stream(self) -> bool:
        """Whether the samples come one after the other, without an index."""
        return isinstance(self.dataset, IterableDataset)

    @property
    def yields_batches(self) -> bool:
        """Whether the items of the stream are batches already."""
        return self.is_stream and self.loader is not None and self.loader.batch_size is None

    @property
    def batch_size(self) -> int | None:
        """The global batch size that a user's DataLoader defines, if it has a fixed one."""
        if self.loader is None:
            return None
        if isinstance(self.loader.batch_sampler, BatchSampler):
            return self.loader.batch_sampler.batch_size
        return None


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
        return Source(loader.dataset, loader.collate_fn, loader)
    is_indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, IterableDataset) or (is_indexed and not isinstance(data, Mapping | str)):
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

    def state_dict(self) -> dict[str, Any]:
        """Return what ``epoch`` needs, beside epoch and step, to go on from here in a later run.

        Call it on every rank, at the end of a step; rank 0's state is the one to keep. It is empty
        where the order is a formula.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what rank 0's ``state_dict`` returned; call it on every rank.

        Raises:
            ValueError: If these batches cannot go on from there.
        """

    def order_facts(self) -> dict[str, Any]:
        """Return what the order of the samples follows from, beside the seed and the clock."""
        return {}

    def close(self) -> None:
        """End the loader workers."""


def data_loader(
    dataset: Dataset[Any],
    options: LoaderOptions,
    user: DataLoader[Any] | None,
    sampler: Sampler[Any] | None = None,
) -> Loader:
    """Return torch's loader for ``dataset``, whose items are ready as they are.

    Where neither workers nor page-locked memory are wanted there is nothing left for torch's
    loader to do, and the items are fetched directly.

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
            "multiprocessing_context": user.multiprocessing_context,
            "prefetch_factor": user.prefetch_factor,
        }
    if sampler is not None and not own["num_workers"] and not own["pin_memory"]:
        return _InProcess(dataset, sampler)
    # Loader workers are seeded from here: apart from the global generator, and unlike on each rank.
    generator = torch.Generator().manual_seed(
        stream_key(options.seed, Stream.LOADER, distributed.rank())
    )
    return _TorchLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        collate_fn=_as_it_is,
        generator=generator,
        worker_init_fn=_WorkerInit(None if user is None else user.worker_init_fn),
        # A stream starts anew in fresh workers: that is how set_epoch reaches them.
        persistent_workers=own["num_workers"] > 0 and sampler is not None,
        **own,
    )


class Loader(Protocol):
    """Yields items, in one pass after the other."""

    def __iter__(self) -> Iterator[Any]: ...

    def close(self) -> None:
        """End the worker processes."""


class _InProcess:
    """Fetches what a sampler asks for, in this process."""

    def __init__(self, dataset: Dataset[Any], sampler: Sampler[Any]) -> None:
        self._dataset = dataset
        self._sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        for item in self._sampler:  # not map: a StopIteration from a dataset would end it silently
            yield self._dataset[item]

    def close(self) -> None:
        pass


class _TorchLoader(DataLoader[Any]):
    """Torch's loader, whose workers end when they are told to.

    Else they live until their iterator is freed: where a cycle of references leads to it, by
    Python's garbage collection, which may come late, or in a process that was forked since.
    """

    _latest: Callable[[], Any] = staticmethod(lambda: None)

    def __iter__(self) -> Any:
        # A signal to a whole process group would take the workers first.
        with stopping.held_back(), children.taken_along():
            iterator = super().__iter__()
        self._latest = weakref.ref(iterator)
        return iterator

    def close(self) -> None:
        iterator = self._latest()
        if isinstance(iterator, _MultiProcessingDataLoaderIter):
            iterator._shutdown_workers()  # what freeing it does
            for worker in iterator._workers:
                worker.kill()  # one that hangs, and that nothing else ends
        self._iterator = None  # another pass, if there is one, starts new workers


class _WorkerInit:
    """Shows a loader worker's user code the user's dataset, not the one that wraps it.

    Every worker reads the whole of a stream. A dataset or ``worker_init_fn`` that splits it by
    ``get_worker_info()`` is therefore told that its worker is the only one, and one that shuffles
    by its seed gets the same one everywhere: with a part of the stream or an order of its own in
    each worker, positions would mean other samples in every one of them.
    """

    def __init__(self, user_init: Callable[[int], None] | None) -> None:
        self._user_init = user_init

    def __call__(self, worker_id: int) -> None:
        children.settle_worker()
        info = cast(torch_worker.WorkerInfo, get_worker_info())
        ours: Any = info.dataset
        number, count, seed = info.id, info.num_workers, info.seed
        if isinstance(ours, IterableDataset):
            seed = ours.become(number, count)  # type: ignore[attr-defined]
            number, count = 0, 1
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=number, num_workers=count, seed=seed, dataset=ours.source.dataset
        )
        if self._user_init is not None:
            self._user_init(worker_id)


def length(sized: Any) -> int | None:
    """Return ``len(sized)``, or None where it has none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def has_state(thing: Any) -> bool:
    """Whether ``thing`` can be taken up again where it was."""
    return all(callable(getattr(thing, f"{verb}state_dict", None)) for verb in ("", "load_"))


def _as_it_is(batch: Any) -> Any:
    return batch


def by_step(
    micros: Iterator[MicroBatch], num_turns: int, device: torch.device
) -> Iterator[tuple[int, Iterable[MicroBatch]]]:
    """Yield one global batch after the other: its samples, and this rank's micro-batches of it.

    Args:
        micros: All of an epoch.
        num_turns: How often those of a global batch are gone through. Only if that is more than
            once are they all held at the same time.
        device: Where they are then held.
    """
    for first in micros:
        group: Iterable[MicroBatch] = _until_last(first, micros)
        if num_turns > 1:
            group = [micro._replace(batch=to_device(micro.batch, device)) for micro in group]
        yield first.global_size, group
        for _ in group:  # that nobody wanted: the next one belongs to another global batch
            pass


def _until_last(micro: MicroBatch, rest: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    yield micro
    while not micro.is_last:
        micro = next(rest)
        yield micro
