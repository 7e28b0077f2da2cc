"""What becomes of the public names of a LightningModule and a LightningDataModule here.

They are called, refused, or for the module's own use; a test finds one that is new in Lightning.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.config import TrainerConfig

# Called at their time if they are defined.
CALLED = frozenset(
    (
        "prepare_data",
        "setup",
        "configure_model",
        "configure_optimizers",
        "configure_gradient_clipping",
        "lr_scheduler_step",
        "train_dataloader",
        "val_dataloader",
        "test_dataloader",
        "predict_dataloader",
        "on_before_batch_transfer",
        "transfer_batch_to_device",
        "on_after_batch_transfer",
        "training_step",
        "validation_step",
        "test_step",
        "predict_step",
        "on_fit_start",
        "on_train_start",
        "on_train_epoch_start",
        "on_train_batch_start",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_before_zero_grad",
        "on_train_batch_end",
        "on_train_epoch_end",
        "on_train_end",
        "on_fit_end",
        "on_save_checkpoint",
        "on_load_checkpoint",
        "on_exception",
        "state_dict",
        "load_state_dict",
        "teardown",
        *(
            f"on_{stage}{when}"
            for stage in ("validation", "test", "predict")
            for when in (
                "_start",
                "_epoch_start",
                "_batch_start",
                "_batch_end",
                "_epoch_end",
                "_end",
            )
        ),
    )
)

# Where a rank without a part of the batch does not come.
OF_A_TRAINED_BATCH = frozenset(
    ("training_step", "on_train_batch_start", "on_before_backward", "on_train_batch_end")
)
OF_AN_EVALUATED_BATCH = frozenset(
    name
    for stage in ("validation", "test", "predict")
    for name in (f"{stage}_step", f"on_{stage}_batch_start", f"on_{stage}_batch_end")
)

_MODE = (
    "evaluation runs in eval mode, and every submodule has its own mode again afterwards; a layer "
    "that is to stay in training mode can be called through torch.nn.functional with training=True"
)

# Not supported: what to do instead.
REFUSED = {
    "backward": "the loop calls backward itself, so that the gradients of all ranks are reduced on "
    "its way; change the loss in training_step, or set automatic_optimization = False",
    "configure_callbacks": "Lightning's callbacks do not run here; give the Trainer callbacks=, "
    "such as trainer.callbacks.EarlyStopping",
    "configure_sharded_model": "use configure_model",
    "device_mesh": "there is one copy of the model per rank, and no mesh",
    "fabric": "the module runs under a Trainer, not under Fabric",
    "log": "the Trainer has one of its own; define a method of another name that calls self.log",
    "on_validation_model_eval": _MODE,
    "on_validation_model_train": _MODE,
    "on_validation_model_zero_grad": "gradients are cleared after every step; leave it out",
    "on_test_model_eval": _MODE,
    "on_test_model_train": _MODE,
    "on_predict_model_eval": _MODE,
    "optimizer_step": "the loop steps the optimizer itself; a warm-up of the learning rate is a "
    "scheduler with interval 'step' (torch.optim.lr_scheduler.LambdaLR), work before and after the "
    "update belongs to on_before_optimizer_step and on_train_batch_end",
    "optimizer_zero_grad": "the loop sets gradients to None after every step; leave it out",
}


# What each kind of run takes.
NEEDED = {
    "fit": ("training_step", "configure_optimizers"),
    "validate": ("validation_step",),
    "test": ("test_step",),
    "predict": (),
}

# Hooks of Lightning before version 2, by what has come in their place.
REMOVED = {
    f"{stage}_epoch_end": f"log in {stage}_step, or keep its outputs in a list of your own and use "
    f"them in on_{name}_epoch_end"
    for stage, name in (("training", "train"), ("validation", "validation"), ("test", "test"))
}


def defines(thing: Any, name: str, base: type) -> bool:
    """Whether ``thing`` defines ``name`` itself, in its class or as an attribute.

    Args:
        thing: An instance of ``base``.
        name: A public name of ``base``.
        base: Lightning's class.
    """
    inherited = getattr(base, name, None)
    return name in vars(thing) or getattr(type(thing), name, None) is not inherited


def check_module(module: Any, base: type, stage: str, config: TrainerConfig) -> None:
    """Refuse a LightningModule that lacks a step, or counts on what would not happen.

    Args:
        module: The user's module.
        base: Lightning's class.
        stage: ``fit``, ``validate``, ``test`` or ``predict``.
        config: The options.

    Raises:
        ValueError: Naming it, and what to do instead.
    """
    name = type(module).__name__
    for hook, advice in {**REFUSED, **REMOVED}.items():
        if hasattr(module, hook) and defines(module, hook, base):
            raise ValueError(f"{name} defines {hook}, which is not called here: {advice}")
    for step in NEEDED[stage]:
        if not defines(module, step, base):
            raise ValueError(f"{name} defines no {step}, which {stage} needs")
    for parameter in inspect.signature(module.training_step).parameters:
        if parameter in ("dataloader_iter", "optimizer_idx", "hiddens"):
            raise ValueError(
                f"{name}.training_step takes {parameter}, which is not supported; it takes "
                "(batch) or (batch, batch_idx)"
            )
    if config.gradient_clip_norm and defines(module, "configure_gradient_clipping", base):
        raise ValueError(
            f"gradient_clip_norm={config.gradient_clip_norm} and configure_gradient_clipping of "
            f"{name} would clip twice; leave one of them out"
        )
