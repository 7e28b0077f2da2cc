"""LightningModules and LightningDataModules, run as they are.

`adapted` makes a `TaskModule` and a `DataModule` of them; the Trainer knows no others. Lightning
itself is not imported here: whoever has a LightningModule has imported it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from trainer.data.module import DataModule, as_data_module

if TYPE_CHECKING:
    from trainer.config import TrainerConfig
    from trainer.task import TaskModule

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
# The keyword of Lightning's Trainer for the loaders of each kind of run, and ours.
LOADERS = {
    "fit": {"train_dataloaders": "train", "val_dataloaders": "val"},
    "validate": {"dataloaders": "val"},
    "test": {"dataloaders": "test"},
    "predict": {"dataloaders": "predict"},
}


def lightning_class(thing: Any, kind: str) -> type | None:
    """Return Lightning's class ``kind`` if ``thing`` is an instance of it, from either package."""
    for package in PACKAGES:
        found = getattr(sys.modules.get(package), kind, None)
        if isinstance(found, type) and isinstance(thing, found):
            return found
    return None


def adapted(
    task: Any,
    data: Any,
    stage: str,
    config: TrainerConfig,
    given: dict[str, Any],
    spelled: dict[str, Any],
) -> tuple[TaskModule, DataModule]:
    """Return the task and the data that a user gave, as the Trainer takes them.

    Args:
        task: A `TaskModule`, or a LightningModule.
        data: A `DataModule`, a LightningDataModule or None.
        stage: ``fit``, ``validate``, ``test`` or ``predict``.
        config: The options.
        given: Datasets and loaders by our names.
        spelled: What was given by the names of Lightning's Trainer, ``datamodule`` among them.

    Raises:
        ValueError: If data was given twice, or is of no use; if the LightningModule relies on
            something that is not supported.
    """
    _check_names(spelled, stage, given)
    spelled = {name: value for name, value in spelled.items() if value is not None}
    datamodule = spelled.pop("datamodule", None)
    if datamodule is not None and data is not None:
        raise ValueError("data was given twice: as datamodule= and by position; give one")
    data = datamodule if data is None else data
    for name, value in spelled.items():
        ours = LOADERS[stage][name]
        if given.get(ours) is not None:
            raise ValueError(f"{name}= and {ours}= are the same thing; give one")
        given = {**given, ours: value}
    module_class = lightning_class(task, "LightningModule")
    is_lightning_data = lightning_class(data, "LightningDataModule") is not None
    first = next(iter(LOADERS[stage].values()))
    if module_class and not is_lightning_data and not isinstance(data, DataModule | None):
        if given[first] is not None:
            raise ValueError(f"data was given twice: by position and as {first}=; give one")
        given, data = {**given, first: data}, None  # Trainer.fit(module, loader)
    if module_class is None:
        if is_lightning_data:
            from trainer.lightning.data import LightningData

            _refuse_twice(given)
            return task, LightningData(None, data, stage)
        return task, as_data_module(data, **given)
    from trainer.lightning.data import LightningData
    from trainer.lightning.module import lightning_task

    if not is_lightning_data and (data is not None or any(v is not None for v in given.values())):
        data = as_data_module(data, **given)
    elif is_lightning_data:
        _refuse_twice(given)
    source = LightningData(task, data, stage)
    return lightning_task(task, module_class, source, stage, config), source


def _refuse_twice(given: dict[str, Any]) -> None:
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise ValueError(
            f"data was given twice: as a LightningDataModule and by name ({', '.join(names)}); "
            "give one"
        )


def _check_names(spelled: dict[str, Any], stage: str, given: dict[str, Any]) -> None:
    if "ckpt_path" in spelled:
        raise ValueError(
            "fit(ckpt_path=...): Trainer(resume=...) goes on from a checkpoint of ours, "
            "Trainer(init_from=...) starts from the weights in one of Lightning's, too"
        )
    known = ("datamodule", *LOADERS[stage])
    for name in spelled:
        if name not in known:
            raise TypeError(
                f"{stage}() got an unexpected keyword argument {name!r}; data is given by position "
                f"or as one of {', '.join((*given, *known))}"
            )
