"""Which options of the Trainer cannot work together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.options import option_fields, show

if TYPE_CHECKING:
    from trainer.config import TrainerConfig


def check_pairs(config: TrainerConfig) -> None:
    """Refuse options that cannot work together, or of which one has no effect beside another.

    Raises:
        ValueError: Naming both, and what to change.
    """
    if config.static_graph and config.find_unused_parameters:
        raise ValueError(
            "static_graph=true together with find_unused_parameters=true: a static graph "
            "promises that every step uses every parameter; set one of them to false"
        )
    if config.sync_batchnorm and config.accelerator == "cpu":
        raise ValueError(
            "sync_batchnorm=true with accelerator=cpu: torch's SyncBatchNorm works on CUDA "
            "only; set sync_batchnorm=false, or train on CUDA"
        )
    if config.reproducible and config.micro_batch_size is None:
        raise ValueError(
            "reproducible=true without micro_batch_size: an even share of the global batch "
            "would depend on the world size, and so would the last bits; give a fixed size, "
            "such as micro_batch_size = global_batch_size / the most ranks you will use"
        )
    if config.reproducible and isinstance(config.compile, str):
        raise ValueError(
            f"reproducible=true together with compile={config.compile}: that chooses code by "
            "measuring it, so ranks may have different code; set compile=true"
        )
    for name in ("comm_hook", "sync_batchnorm"):
        if config.reproducible and (given := getattr(config, name)):
            raise ValueError(
                f"reproducible=true together with {name}={show(given)}: what it computes "
                f"depends on the number of ranks; leave one of them out"
            )
    for name in ("powersgd_rank", "powersgd_start_step"):
        given, default = getattr(config, name), option_fields(config)[name].default
        if given != default and not config.uses_powersgd:
            raise ValueError(
                f"{name}={given} with comm_hook={show(config.comm_hook)} has no effect; set "
                "comm_hook=powersgd (or powersgd+bf16), or leave it out"
            )
    needed = {"weight_average_decay": ("ema",), "weight_average_start_epoch": ("ema", "swa")}
    for name, kinds in needed.items():
        given, default = getattr(config, name), option_fields(config)[name].default
        if given != default and config.weight_average not in kinds:
            raise ValueError(
                f"{name}={given} with weight_average={show(config.weight_average)} has no effect; "
                f"set weight_average={' or '.join(kinds)}, or leave it out"
            )
    if config.accept_changes and config.resume is None:
        raise ValueError(
            f"accept_changes={show(config.accept_changes)} without resume has no effect: it says "
            "what may differ from the run that is resumed; leave it out, or set resume"
        )
    _check_lr_scaling(config)


def _check_lr_scaling(config: TrainerConfig) -> None:
    if config.lr_scaling != "none":
        if config.lr_reference_batch_size is None:
            raise ValueError(
                f"lr_scaling={config.lr_scaling} without lr_reference_batch_size; give the "
                "global batch size that the task's learning rate is meant for"
            )
    elif config.lr_reference_batch_size is not None:
        raise ValueError(
            f"lr_reference_batch_size={config.lr_reference_batch_size} with lr_scaling=none has "
            "no effect; set lr_scaling=linear or sqrt, or leave it out"
        )
    elif config.lr_warmup_steps:
        raise ValueError(
            f"lr_warmup_steps={config.lr_warmup_steps} with lr_scaling=none has no effect: it is "
            "the way from the task's learning rate to the scaled one. Set lr_scaling, or let "
            "a scheduler from the task's configure_optimizers warm up (LinearLR)"
        )
