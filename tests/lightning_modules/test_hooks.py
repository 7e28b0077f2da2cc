"""Which hooks a LightningModule may define, and when they run."""

import inspect
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from side_by_side import run_theirs, trainer

from trainer.config import option_names
from trainer.lightning.hooks import CALLED, REFUSED
from trainer.migration import explain_unknown

# For the module's own use; to define them anew has no effect on a run, or the expected one.
USED = frozenset(
    (
        "CHECKPOINT_HYPER_PARAMS_KEY",
        "CHECKPOINT_HYPER_PARAMS_NAME",
        "CHECKPOINT_HYPER_PARAMS_TYPE",
        "all_gather",
        "automatic_optimization",
        "clip_gradients",
        "current_epoch",
        "device",
        "dtype",
        "example_input_array",
        "freeze",
        "from_datasets",
        "global_rank",
        "global_step",
        "hparams",
        "hparams_initial",
        "load_from_checkpoint",
        "local_rank",
        "log_dict",
        "logger",
        "loggers",
        "lr_schedulers",
        "manual_backward",
        "name",
        "on_gpu",
        "optimizers",
        "print",
        "remove_ignored_hparams",
        "save_hyperparameters",
        "strict_loading",
        "to_onnx",
        "to_tensorrt",
        "to_torchscript",
        "toggle_optimizer",
        "toggled_optimizer",
        "trainer",
        "unfreeze",
        "untoggle_optimizer",
        *("cpu", "cuda", "double", "float", "forward", "half", "to", "type"),
    )
)

# What the two trainers do at other times, or not every time.
ELSEWHERE = {
    "configure_optimizers",  # theirs: after configure_model, ours: once the data is known
    "on_before_zero_grad",  # theirs: before the next backward
    "lr_scheduler_step",  # theirs: in the last batch of an epoch
    "state_dict",
    "load_state_dict",
    "on_load_checkpoint",
    "on_save_checkpoint",
    "on_exception",
    "configure_gradient_clipping",
    *(f"{split}_dataloader" for split in ("train", "val", "test", "predict")),
}


def recording(cls: type, calls: list[str], who: str = "") -> Any:
    """Return an instance of a subclass that notes each of its hooks."""

    def noting(name: str, inherited: Any) -> Any:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(who + name)
            return inherited(self, *args, **kwargs)

        hook.__signature__ = inspect.signature(inherited)  # type: ignore[attr-defined]
        return hook

    names = [n for n in sorted(CALLED - ELSEWHERE) if callable(getattr(cls, n, None))]
    if who:  # the module has these
        names = [name for name in names if "transfer" not in name]
    return type(cls.__name__, (cls,), {n: noting(n, getattr(cls, n)) for n in names})()


@pytest.mark.parametrize("package", [lightning, pytorch_lightning])
def test_every_public_name_is_called_used_or_refused(package: Any) -> None:
    for cls in (package.LightningModule, package.LightningDataModule):
        names = {name for name in vars_of(cls) if not name.startswith("_")}
        assert names <= CALLED | USED | REFUSED.keys(), f"{cls.__name__} has a name that is new"
    known = {
        name for cls in (package.LightningModule, package.LightningDataModule) for name in dir(cls)
    }
    assert CALLED | USED | REFUSED.keys() <= known, "a name that is none of theirs"
    assert not CALLED & USED
    assert not (CALLED | USED) & REFUSED.keys()


def vars_of(cls: type) -> set[str]:
    """What a class of Lightning has beside, or in place of, what torch gives it."""
    plain = torch.nn.Module if issubclass(cls, torch.nn.Module) else object
    return {n for n in dir(cls) if getattr(cls, n) is not getattr(plain, n, None)}


def test_hooks_run_in_the_same_order(tmp_path: Path) -> None:
    ours: list[str] = []
    theirs: list[str] = []
    options: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 2, "limit_val_batches": 1}
    run = trainer(tmp_path, num_sanity_val_steps=1, **options)
    run.fit(recording(BoringModel, ours), recording(BoringDataModule, ours, "data."))
    data = recording(BoringDataModule, theirs, "data.")
    module = recording(BoringModel, theirs)
    run_theirs("fit", module, datamodule=data, num_sanity_val_steps=1, **options)
    assert ours == theirs


def test_every_option_of_their_trainer_leads_to_one_of_ours() -> None:
    names = set(inspect.signature(lightning.Trainer.__init__).parameters)
    ours = {"self", "callbacks", "logger", *option_names()}
    assert all("the options are" not in explain_unknown(name, {name: 1}) for name in names - ours)
