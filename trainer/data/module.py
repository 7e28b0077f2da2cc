"""What a user gives as data: a `DataModule`, or datasets and loaders by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset


class DataModule:
    """Where the samples come from.

    Each ``<split>_dataset`` returns a ``Dataset``, an ``IterableDataset`` or a ``DataLoader``; it
    runs on every rank, once per launch. ``val_dataset`` may return a dict of them, whose metrics
    are named ``val/<set>/<metric>``.

    Attributes:
        collate_fn: Turns a list of samples into a batch; None for torch's ``default_collate``.
            Datasets whose ``__getitems__`` returns something else than a list do not need it.
        prepare_timeout_s: The longest that ``prepare`` may take while other ranks wait, in seconds.
    """

    collate_fn: Callable[[list[Any]], Any] | None = None
    prepare_timeout_s: float = 3600.0

    def prepare(self) -> None:
        """Download or unpack. Runs once per machine, before any dataset is built.

        It must not set attributes: they would exist in one process only.
        """

    def train_dataset(self) -> Any:
        """Return the training data."""
        raise ValueError(
            f"{type(self).__name__} defines no train_dataset(), which fit needs; define it, or "
            "call fit(task, train=dataset)"
        )

    def val_dataset(self) -> Any:
        """Return the validation data; None (the default) means no validation."""
        return None

    def test_dataset(self) -> Any:
        """Return the test data."""
        return None

    def predict_dataset(self) -> Any:
        """Return the data to predict for."""
        return None

    def train_indices(self, seed: int, epoch: int) -> Sequence[int]:
        """Return the dataset indices of one epoch, in order; replaces the shuffle.

        Optional (a subclass that defines it is asked): for weighted or curriculum orders. It runs
        on rank 0, and every epoch must have the same length.
        """
        raise NotImplementedError

    def _end(self, error: BaseException | None) -> None:
        """Clean up after a job, or after the error that ended it; for data of somebody else's."""

    @property
    def orders_epochs(self) -> bool:
        """Whether this class defines ``train_indices``."""
        return type(self).train_indices is not DataModule.train_indices


class GivenData(DataModule):
    """The `DataModule` behind ``fit(task, train=..., val=...)``."""

    def __init__(self, **given: Any) -> None:
        self._given = given

    def has(self, split: str) -> bool:
        """Whether there is data for ``split``."""
        return self._given.get(split) is not None

    def train_dataset(self) -> Any:
        """Return what was given as ``train``."""
        if self._given.get("train") is None:
            return super().train_dataset()
        return self._given["train"]

    def val_dataset(self) -> Any:
        """Return what was given as ``val``."""
        return self._given.get("val")

    def test_dataset(self) -> Any:
        """Return what was given as ``test``."""
        return self._given.get("test")

    def predict_dataset(self) -> Any:
        """Return what was given as ``predict``."""
        return self._given.get("predict")


def as_data_module(data: Any, **given: Any) -> DataModule:
    """Return ``data`` if it is a `DataModule`, else one made of what was given by name.

    Raises:
        ValueError: If both or neither were given, or ``data`` is something else.
    """
    given = {split: value for split, value in given.items() if value is not None}
    if data is None:
        if not given:
            raise ValueError(
                "no data was given; pass a trainer.DataModule, or datasets by name: "
                "fit(task, train=dataset, val=dataset)"
            )
        return GivenData(**given)
    if given:
        raise ValueError(
            f"data was given twice: as a DataModule and by name ({', '.join(given)}); give one"
        )
    if isinstance(data, DataModule):
        return data
    if isinstance(data, Dataset | DataLoader):
        raise ValueError(
            f"data is a {type(data).__name__}; say what it is for: fit(task, train=...), "
            "validate(task, val=...), test(task, test=...) or predict(task, predict=...)"
        )
    raise ValueError(
        f"data is a {type(data).__name__}; it must be a trainer.DataModule (derive the class "
        "from it), or datasets by name: fit(task, train=dataset, val=dataset)"
    )


def prepare(data: DataModule) -> None:
    """Run ``data.prepare()`` and refuse one that sets attributes."""
    before = dict(vars(data))
    data.prepare()
    after = vars(data)
    changed = sorted(
        name
        for name in {*before, *after}
        if name not in before or name not in after or before[name] is not after[name]
    )
    if changed:
        raise ValueError(
            f"{type(data).__name__}.prepare() set {', '.join(changed)}; it runs in one process per "
            "machine, so the other ranks would not have it. Write files in prepare() and read them "
            "in __init__ or in the <split>_dataset methods"
        )


def evaluation_sets(data: DataModule, split: str) -> dict[str, Any]:
    """Return the data of ``split`` by metric prefix: ``{"val": ...}`` or ``{"val/<set>": ...}``."""
    found = getattr(data, f"{split}_dataset")()
    if found is None:
        return {}
    if isinstance(found, Mapping):
        return {f"{split}/{name}": part for name, part in found.items()}
    return {split: found}
