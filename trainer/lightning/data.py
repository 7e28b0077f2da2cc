"""The loaders of a LightningDataModule or LightningModule, as a `DataModule`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from trainer import distributed
from trainer.config import DEFAULT_GLOBAL_BATCH_SIZE, TrainerConfig
from trainer.data.module import DataModule, GivenData, prepare
from trainer.data.plan import GlobalBatchPlan
from trainer.lightning.hooks import defines

# Hooks of a batch's way to the device, in their order.
TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class LightningData(DataModule):
    """Where a LightningModule's samples come from.

    Each batch of a loader is one *global* batch, as for any DataLoader here: of several ranks each
    computes a part of it.

    Attributes:
        datamodule: The user's LightningDataModule; None where there is none.
        loaders: What was found for each split, so far.
    """

    def __init__(self, module: Any, source: Any, stage: str) -> None:
        """Note where to look.

        Args:
            module: The LightningModule, which may have loaders itself; None if the task is no
                LightningModule.
            source: A LightningDataModule, a `DataModule` or None.
            stage: ``fit``, ``validate``, ``test`` or ``predict``.
        """
        from trainer.lightning.adapting import lightning_class

        self._module = module
        self._own = source if isinstance(source, DataModule) else None
        self.datamodule = None if isinstance(source, DataModule) else source
        self._stage = stage
        self._set_up: set[str] = set()
        self._sets: dict[str, list[str]] = {}
        self.loaders: dict[str, Any] = {}
        # Who may have loaders and hooks of data, with the class that has their defaults.
        self._parts: list[tuple[Any, type]] = [
            (thing, base)
            for thing, kind in (
                (self.datamodule, "LightningDataModule"),
                (module, "LightningModule"),
            )
            if (base := lightning_class(thing, kind)) is not None
        ]
        if self._own is not None:
            self.collate_fn = self._own.collate_fn
            self.prepare_timeout_s = self._own.prepare_timeout_s

    def __deepcopy__(self, memo: dict[int, Any]) -> LightningData:
        """A copy of the task shares its data."""
        return self

    def prepare(self) -> None:
        """Run ``prepare_data`` of datamodule and module.

        Raises:
            ValueError: If one of them sets attributes, which the other ranks would not have.
        """
        if self._own is not None:
            prepare(self._own)
        for thing, base in self._parts:
            if not defines(thing, "prepare_data", base):
                continue
            before = {name: id(value) for name, value in vars(thing).items()}
            thing.prepare_data()
            changed = [n for n, value in vars(thing).items() if before.get(n) != id(value)]
            if changed and distributed.world_size() > 1:
                raise ValueError(
                    f"{type(thing).__name__}.prepare_data() set {', '.join(changed)}; it runs in "
                    "one process per machine, so the other ranks would not have it. Write files in "
                    "prepare_data() and read them in setup(stage)"
                )

    def set_up(self, stage: str | None = None) -> None:
        """Run ``setup(stage)`` of datamodule and module, once for each stage."""
        stage = stage or self._stage
        if stage not in self._set_up:
            self._set_up.add(stage)
            for thing, base in self._parts:
                if defines(thing, "setup", base):
                    thing.setup(stage)

    def _end(self, error: BaseException | None) -> None:
        """Run ``teardown(stage)`` likewise, for each stage that was set up."""
        for stage in sorted(self._set_up) if error is None else ():
            for thing, base in self._parts:
                if defines(thing, "teardown", base):
                    thing.teardown(stage)
        self._set_up.clear()
        if self.datamodule is not None:
            if isinstance(error, Exception):
                self.datamodule.on_exception(error)
            self.datamodule.trainer = None

    def transfer_hooks(self) -> dict[str, Any]:
        """Return the hooks of a batch's way to the device that datamodule or module define.

        Raises:
            ValueError: If both define the same one.
        """
        hooks: dict[str, Any] = {}
        for name in TRANSFER:
            found = [getattr(t, name) for t, base in self._parts if defines(t, name, base)]
            if len(found) > 1:
                raise ValueError(
                    f"both datamodule and module define {name}; define it in one of them"
                )
            if found:
                hooks[name] = found[0]
        return hooks

    def number(self, split: str, name: str | None) -> int:
        """Return the number of a set among several, 0 where there is one."""
        return self._sets[split].index(name) if name is not None else 0

    def is_one_of_many(self, split: str) -> bool:
        """Whether ``split`` has several sets."""
        return len(self._sets.get(split, ())) > 1

    def is_for_all(self, config: TrainerConfig, world_size: int) -> bool:
        """Whether every batch of training gives each of the ranks one micro-batch."""
        found = self.loaders.get("train")
        if isinstance(found, DataLoader):
            if type(found.batch_sampler) is not BatchSampler:  # another may give any size
                return False
            size, drop_last = int(found.batch_size or 1), found.drop_last
            count = len(found.sampler)  # type: ignore[arg-type]
        elif isinstance(found, Sized):
            size, drop_last = (
                config.global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE,
                config.drop_last,
            )
            count = len(found)
        else:  # a stream
            return False
        plan = GlobalBatchPlan(size, config.micro_batch_size, halving=config.reproducible)
        limit = config.limit_train_batches
        has_short = count % size and not drop_last and (limit is None or limit * size > count)
        return all(
            len(plan.cut(each, rank, world_size)) == 1
            for each in ((size, count % size) if has_short else (size,))
            for rank in range(world_size)
        )

    def train_dataset(self) -> Any:
        """Return the training loader.

        Raises:
            ValueError: If there is none, or more than one.
        """
        found = self._loader("train")
        if found is None:
            raise ValueError(
                "there is no training data: give fit(module, train_dataloaders=...), "
                "datamodule=..., or define train_dataloader()"
            )
        if isinstance(found, list | tuple | Mapping) or type(found).__name__ == "CombinedLoader":
            raise ValueError(
                f"the training data is a {type(found).__name__} of loaders, whose batches cannot "
                "be cut into parts for the ranks; give one DataLoader over a dataset that returns "
                "a sample of each (torch.utils.data.StackDataset, say)"
            )
        return found

    def val_dataset(self) -> Any:
        """Return the validation loaders; None if the module does not validate."""
        return self._evaluated("val", "validation_step")

    def test_dataset(self) -> Any:
        """Return the test loaders."""
        self.set_up("test")
        return self._evaluated("test", "test_step")

    def predict_dataset(self) -> Any:
        """Return the loader to predict for.

        Raises:
            ValueError: If there is more than one.
        """
        found = self._only(self._loader("predict"))
        if isinstance(found, list | tuple | Mapping):
            raise ValueError(
                f"there are {len(found)} loaders to predict for; call predict once for each: "
                "predict(module, dataloaders=loader)"
            )
        return found

    def train_indices(self, seed: int, epoch: int) -> Sequence[int]:
        """Return the order of an epoch, where a `DataModule` of ours gives it."""
        assert self._own is not None
        return self._own.train_indices(seed, epoch)

    @property
    def orders_epochs(self) -> bool:
        """Whether it does."""
        return self._own is not None and self._own.orders_epochs

    def _loader(self, split: str) -> Any:
        self.set_up()
        self.loaders[split] = found = self._found(split)
        return found

    def _found(self, split: str) -> Any:
        own = self._own
        if own is not None and (not isinstance(own, GivenData) or own.has(split)):
            return getattr(own, f"{split}_dataset")()
        for thing, base in self._parts:
            if defines(thing, f"{split}_dataloader", base):
                return getattr(thing, f"{split}_dataloader")()
        return None

    def _evaluated(self, split: str, step: str) -> Any:
        found = self._only(self._loader(split))
        if found is None:
            return None
        for thing, base in self._parts:
            if thing is self._module and not defines(thing, step, base):
                if distributed.rank() == 0:
                    print(
                        f"note: there is {split} data, but {type(thing).__name__} defines no "
                        f"{step}, so it is not used",
                        flush=True,
                    )
                return None
        if isinstance(found, list | tuple):
            found = {str(number): loader for number, loader in enumerate(found)}
        self._sets[split] = list(map(str, found)) if isinstance(found, Mapping) else []
        return found

    def _only(self, found: Any) -> Any:
        """Return the loader of a list of one."""
        if isinstance(found, list | tuple) and len(found) == 1:
            return found[0]
        return found
