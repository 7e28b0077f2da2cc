"""Option names and values that people know from other trainers, and what they are called here.

Nothing here makes a foreign name work: it turns an error into the line to write instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.config import DEFAULT_GLOBAL_BATCH_SIZE, option_names
from trainer.data.plan import ceil_div
from trainer.options import show

# The same value under another name (Lightning, Accelerate, the Hugging Face Trainer, torchrun).
RENAMED = {
    "check_val_every_n_epoch": "validate_every_n_epochs",
    "dataloader_drop_last": "drop_last",
    "dataloader_num_workers": "num_workers",
    "dataloader_pin_memory": "pin_memory",
    "ddp_bucket_cap_mb": "bucket_cap_mb",
    "ddp_comm_hook": "comm_hook",
    "ddp_find_unused_parameters": "find_unused_parameters",
    "ddp_timeout": "timeout_s",
    "default_root_dir": "run_dir",
    "epochs": "max_epochs",
    "eval_steps": "validate_every_n_steps",
    "finetune_from_model": "init_from",
    "float32_matmul_precision": "matmul_precision",
    "gpus": "devices",
    "gradient_clip_val": "gradient_clip_norm",
    "gradient_clipping": "gradient_clip_norm",
    "init_checkpoint": "init_from",
    "load_from": "init_from",
    "log_dir": "run_dir",
    "logging_dir": "run_dir",
    "logging_steps": "log_every_n_steps",
    "matrix_approximation_rank": "powersgd_rank",
    "max_grad_norm": "gradient_clip_norm",
    "max_iters": "max_steps",
    "metric_for_best_model": "checkpoint.monitor",
    "mixed_precision": "precision",
    "nnodes": "num_nodes",
    "nproc_per_node": "devices",
    "num_epochs": "max_epochs",
    "num_machines": "num_nodes",
    "num_processes": "devices",
    "num_steps": "max_steps",
    "num_train_epochs": "max_epochs",
    "output_dir": "run_dir",
    "per_device_eval_batch_size": "eval_batch_size",
    "project_dir": "run_dir",
    "restore_file": "resume",
    "resume_from_checkpoint": "resume",
    "save_steps": "checkpoint.every_n_steps",
    "save_total_limit": "checkpoint.keep",
    "seed_everything": "seed",
    "start_powerSGD_iter": "powersgd_start_step",
    "steps": "max_steps",
    "sync_bn": "sync_batchnorm",
    "total_steps": "max_steps",
    "workers": "num_workers",
    "checkpoint.every_n_train_steps": "checkpoint.every_n_steps",
    "checkpoint.save_top_k": "checkpoint.keep",
    "checkpoint.dirpath": "run_dir",
}

# What does not exist here, and why it is not missed.
WITHOUT = {
    "barebones": "a step costs little beside its own work; callbacks=False and logger=False leave "
    "out what observes it",
    "benchmark": "set torch.backends.cudnn.benchmark in the task or the script",
    "enable_autolog_hparams": "the config of the run goes to every logger",
    "enable_progress_bar": "the progress bar is the callback `progress`: leave it out with "
    "callbacks.progress=null on the command line; callbacks=False in Python leaves all of them out",
    "enable_model_summary": "the start of a run always prints the task's size, in one line",
    "gradient_clip_algorithm": "clipping is by the global L2 norm: set gradient_clip_norm; clip by "
    "value in the task's before_optimizer_step",
    "ignore_data_skip": "nothing is skipped: a resumed run goes on at its position in the data",
    "inference_mode": "evaluation always runs without gradients",
    "limit_predict_batches": "predict goes through the whole dataset; pass it a shorter one",
    "load_best_model_at_end": "the best checkpoint is FitResult.best_checkpoint; test=true tests "
    "it after fit, and ckpt_path=best loads it",
    "max_time": "end the run with a signal, as `timeout -s TERM 8h` does: it is saved, and goes on "
    "with resume=auto",
    **dict.fromkeys(
        ("min_epochs", "min_steps"),
        "a run ends at max_epochs or max_steps; the callback EarlyStopping has a patience",
    ),
    "model_registry": "checkpoints lie in the run's folder or store, see run_dir",
    "reload_dataloaders_every_n_epochs": "datasets are built once; one whose content changes "
    "with the epoch defines set_epoch, and DataModule.train_indices orders each epoch anew",
    "use_distributed_sampler": "the Trainer cuts every batch over the ranks itself, also those of "
    "a sampler of your own",
    "replace_sampler_ddp": "the Trainer cuts every batch over the ranks itself, also those of a "
    "sampler of your own",
    "split_batches": "global_batch_size is over all ranks",
    **dict.fromkeys(
        ("learning_rate", "lr", "betas", "momentum", "weight_decay", "optim", "optimizer"),
        "the optimizer belongs to the task: see its configure_optimizers. What that reads from the "
        "task's arguments is set there: task.learning_rate=..., say",
    ),
    **dict.fromkeys(
        ("lr_scheduler", "lr_scheduler_type", "scheduler", "warmup_ratio", "warmup_steps"),
        "schedules belong to the task: return OptimizerSetup(optimizer, scheduler) from its "
        "configure_optimizers",
    ),
    **dict.fromkeys(
        ("scale_lr", "auto_scale_lr"),
        "set lr_scaling=linear (or sqrt) and lr_reference_batch_size, the global batch size that "
        "the task's learning rate is meant for",
    ),
    "plugins": "there are none; a strategy of your own is a _target_ under strategy",
    "profiler": "set profile=10-14 for a trace of these steps, profile=startup for where the time "
    "until the first step goes; perf/ values say in every log what a step takes",
    "track_grad_norm": "set statistics=[gradients]",
    **dict.fromkeys(
        ("auto_lr_find", "lr_finder"), "run mode=find_lr, or Trainer.find_lr, before the fit"
    ),
    **dict.fromkeys(
        ("auto_scale_batch_size", "auto_find_batch_size"),
        "run mode=find_micro_batch_size, or Trainer.find_micro_batch_size, before the fit",
    ),
    "enable_checkpointing": "set checkpoint.every_n_epochs=null for no checkpoints by epoch",
    "save_strategy": "set checkpoint.every_n_steps or checkpoint.every_n_epochs",
    "eval_strategy": "set validate_every_n_steps or validate_every_n_epochs",
    "evaluation_strategy": "set validate_every_n_steps or validate_every_n_epochs",
    "logging_strategy": "set log_every_n_steps",
    "checkpoint.filename": "checkpoints are named by their step: checkpoints/step-00000500",
    "checkpoint.save_last": "checkpoints/last always points to the newest one",
}


def explain_unknown(name: str, options: Mapping[str, Any]) -> str:
    """Return the message for an option that does not exist.

    Args:
        name: The option as given, ``checkpoint.`` in front for the ones below it.
        options: All options as given, the unknown one included (by its last part).
    """
    value = options.get(name.rpartition(".")[2])
    head = f"there is no option {name!r}"
    if name in CONVERTED:
        return f"{head}; {CONVERTED[name](value, options)}"
    if name in RENAMED:
        ours = RENAMED[name]
        return f"{head}; it is called {ours} here: set {ours}={show(value)}"
    if name in WITHOUT:
        return f"{head}; {WITHOUT[name]}"
    near = nearest(name.rpartition(".")[2], option_names())
    if near:
        return f"{head}; did you mean {near}?"
    return f"{head}; the options are: {', '.join(option_names())}"


def nearest(name: str, names: Sequence[str], cutoff: float = 0.6) -> str | None:
    """Return the entry of ``names`` that is closest to ``name`` by its last part, if any is.

    Args:
        name: As given.
        names: To choose from.
        cutoff: How alike they must be, from 0 to 1.
    """
    by_last_part = {full.rpartition(".")[2]: full for full in reversed(names)}
    found = difflib.get_close_matches(name.lower(), by_last_part, n=1, cutoff=cutoff)
    return by_last_part[found[0]] if found else None


def explain_strategy(value: Any) -> str:
    """Return the message for a strategy that does not exist."""
    spelled = str(value).lower()
    if "find_unused_parameters_true" in spelled:
        advice = "set strategy=ddp and find_unused_parameters=true"
    elif "static_graph" in spelled:
        advice = "set strategy=ddp and static_graph=true"
    elif spelled in ("auto", "none", "single_device", "ddp_find_unused_parameters_false"):
        advice = "set strategy=ddp, which also covers a single device"
    elif spelled in ("ddp_spawn", "ddp_fork", "ddp_notebook"):
        advice = "set strategy=ddp; how the ranks are started is chosen by launcher"
    else:
        advice = "this version has strategy=ddp, or a mapping with the _target_ of your own"
    return f"strategy={show(value)} is not known here; {advice}"


def hint(name: str, value: Any) -> str | None:
    """Return what to write for a value that other trainers take and this one refuses."""
    if value == -1 and type(value) is int:
        return VALUES_OF_MINUS_ONE.get(name)
    if isinstance(value, str) and (ours := VALUES.get(name, {}).get(value.lower())):
        return f"{name}={ours}"
    if name == "accelerator" and value in ("gpu", "nccl", "gloo"):
        return f"accelerator={'cpu' if value == 'gloo' else 'cuda'}"
    if name == "devices" and isinstance(value, list | tuple):
        return f"devices={len(value)}, and choose which ones with CUDA_VISIBLE_DEVICES"
    if name.startswith("limit_") and isinstance(value, float):
        return f"the number of global batches that this fraction stands for, {name}=10 say"
    if name == "resume" and value is True:
        return "resume=auto"
    if name == "accept_changes" and value in ("model", "optimizer", "schedule", "data"):
        return f"accept_changes=[{value}]"
    if name == "fast_dev_run" and isinstance(value, int):
        return f"limit_train_batches={value} and limit_val_batches={value}"
    return None


# Other words for a value, which are not just another spelling (PyTorch, Accelerate).
VALUES = {
    "comm_hook": {
        "bf16_compress_hook": "bf16",
        "fp16_compress_hook": "fp16",
        "powersgd_hook": "powersgd",
        "none": "null",
        "no": "null",
    },
    "compile": {"default": "true"},
    "precision": {
        "bfloat16": "bf16",
        "float16": "fp16",
        "half": "fp16",
        "float32": "fp32",
        "no": "fp32",
    },
}

VALUES_OF_MINUS_ONE = {
    "devices": "devices=auto for all devices",
    "max_epochs": "max_epochs=null for no limit",
    "max_steps": "max_steps=null for no limit",
    "checkpoint.keep": "checkpoint.keep=null to keep all",
    "num_sanity_val_steps": "the number of global batches to try",
}


def _world_size(options: Mapping[str, Any]) -> int | None:
    devices, nodes = options.get("devices", 1), options.get("num_nodes", 1)
    return devices * nodes if isinstance(devices, int) and isinstance(nodes, int) else None


def _accumulation(value: Any, options: Mapping[str, Any]) -> str:
    why = "the number of accumulation steps follows from micro_batch_size"
    batch = options.get("global_batch_size") or DEFAULT_GLOBAL_BATCH_SIZE
    world = _world_size(options)
    if isinstance(value, int) and value > 0 and isinstance(batch, int) and world:
        micro = ceil_div(batch, value * world)
        sum_ = f"global_batch_size {batch} / ({value} x world size {world})"
        return f"{why}: set micro_batch_size={micro} ({sum_})"
    return f"{why}: set micro_batch_size = global_batch_size / ({value} x world size)"


def _per_device_batch(value: Any, options: Mapping[str, Any]) -> str:
    why = "batch sizes are over all ranks here"
    world = _world_size(options)
    rounds = options.get("gradient_accumulation_steps", options.get("accumulate_grad_batches", 1))
    if not (isinstance(value, int) and isinstance(rounds, int) and world):
        return f"{why}: set global_batch_size = {value} x world size"
    if rounds == 1:
        return f"{why}: set global_batch_size={value * world} ({value} x world size {world})"
    return (
        f"{why}: set global_batch_size={value * rounds * world} and micro_batch_size={value} "
        f"({value} x {rounds} accumulation steps x world size {world})"
    )


def _check_interval(value: Any, options: Mapping[str, Any]) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"set validate_every_n_steps={value}; it counts optimizer steps, over all epochs"
    if value == 1.0:
        return "set validate_every_n_epochs=1, the default"
    return f"set validate_every_n_steps to {value} of the steps in an epoch"


def _precision(name: str) -> Callable[[Any, Mapping[str, Any]], str]:
    return lambda value, _: f"set precision={name if value else 'fp32'}"


def _cpu(value: Any, options: Mapping[str, Any]) -> str:
    return f"set accelerator={'cpu' if value else 'auto'}"


def _reproducible(value: Any, options: Mapping[str, Any]) -> str:
    if not value:
        return "that is the default; leave it out"
    if options.get("micro_batch_size") is None:
        return "set reproducible=true, and micro_batch_size, which it needs"
    return "set reproducible=true"


def _greater_is_better(value: Any, options: Mapping[str, Any]) -> str:
    return f"set checkpoint.mode={'max' if value else 'min'}"


# What has another form here, worked out from the value and the other options.
CONVERTED: dict[str, Callable[[Any, Mapping[str, Any]], str]] = {
    "accumulate_grad_batches": _accumulation,
    "gradient_accumulation_steps": _accumulation,
    "accumulation_steps": _accumulation,
    "accumulate": _accumulation,
    "batch_size": _per_device_batch,
    "per_device_train_batch_size": _per_device_batch,
    "train_batch_size": _per_device_batch,
    "val_check_interval": _check_interval,
    "bf16": _precision("bf16"),
    "fp16": _precision("fp16"),
    "amp": _precision("bf16"),
    "use_cpu": _cpu,
    "deterministic": _reproducible,
    "full_determinism": _reproducible,
    "no_cuda": _cpu,
    "greater_is_better": _greater_is_better,
}
