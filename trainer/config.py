"""Every option of the Trainer: its type, default, meaning and limits, in one place.

The same names work in ``Trainer(...)`` and, through Hydra, as ``trainer.<name>=...``. The
reference page is made from this file, and so is Hydra's typed ``trainer`` group.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.option_pairs import check_pairs
from trainer.options import check_fields, option, option_fields

_LONGEST_S = 100_000_000  # three years: gloo counts nanoseconds in 64 bits

DEFAULT_GLOBAL_BATCH_SIZE = 128
DEFAULT_MONITORS = ("val/loss", "val_loss")

PRECISIONS = {
    "fp32": ("fp32", "32", "32-true"),
    "bf16": ("bf16", "bf16-mixed"),
    "fp16": ("fp16", "16", "16-mixed"),
}


@dataclass
class CheckpointConfig:
    """Options below ``checkpoint``: when a checkpoint is written and which ones stay."""

    every_n_steps: int | None = option(
        None, "Write a checkpoint every so many steps; null: not by steps.", at_least=1
    )
    every_n_epochs: int | None = option(
        1, "Write a checkpoint every so many epochs; null: not by epochs.", at_least=1
    )
    keep: int | None = option(
        3, "How many checkpoints stay on disk; `best` and `last` always do. null: all.", at_least=1
    )
    monitor: str | None = option(
        None,
        "The metric that decides which checkpoint is `best`. null: `val/loss`, or `val_loss` (as "
        "LightningModules call it), where there is one, else the last checkpoint is the best.",
    )
    mode: str = option(
        "min", "Whether a smaller or a larger value of `monitor` is better.", choices=("min", "max")
    )
    asynchronous: bool = option(
        True, "Write beside the training; it stands still only while the state is copied."
    )
    on_error: str = option(
        "stop",
        "What happens when a checkpoint or a log cannot be written (full disk, lost mount): `stop` "
        "the run at the next step, or `warn`, train on, and try again when the next one is due.",
        choices=("stop", "warn"),
    )

    def __post_init__(self) -> None:
        check_fields(self, prefix="checkpoint.")

    @property
    def monitors(self) -> Sequence[str]:
        """The names of the metric that decides; the first that is measured counts."""
        return DEFAULT_MONITORS if self.monitor is None else (self.monitor,)


@dataclass
class TrainerConfig:
    """Every option of the `Trainer`, validated when it is constructed.

    Raises:
        ValueError: For a value of the wrong type or out of range, and for options that cannot
            work together. `from_options` adds unknown names.
    """

    devices: int | str = option(
        1,
        "Ranks (processes) per machine; `auto`: all devices.",
        at_least=1,
        at_most=512,
        choices=("auto",),
        section="Ranks",
    )
    num_nodes: int = option(
        1,
        "Machines. More than one need a launcher (torchrun, srun), which decides how many there "
        "are; a run that finds another number than this says so. Or each starts its own ranks, "
        "and is told by MASTER_ADDR, MASTER_PORT and NODE_RANK who the others are.",
        at_least=1,
    )
    accelerator: str = option(
        "auto", "Where to train; `auto`: CUDA where there is one.", choices=("auto", "cpu", "cuda")
    )
    launcher: str = option(
        "auto",
        "Who starts the ranks. `auto` uses torchrun's or SLURM's where it finds itself under one, "
        "else starts them itself, in a pod of a PyTorchJob together with the other pods; a "
        "launcher's world size beats `devices`.",
        choices=("auto", "self", "torchrun", "slurm", "kubernetes"),
    )
    strategy: Any = option(  # noqa: RUF009
        "ddp",
        "`ddp`, or a node with the `_target_` of a strategy of your own.",
        choices=("ddp",),
        section="Gradients between ranks",
    )
    bucket_cap_mb: float | str | None = option(
        None,
        "MiB per gradient bucket of DDP; null: torch's own (25, after a small first bucket); "
        "`auto`: the fastest of a few that are tried in the first 50 steps or so, "
        "with PowerSGD from powersgd_start_step on.",
        above=0,
        choices=("auto",),
    )
    find_unused_parameters: bool = option(
        False, "Let parameters go without a gradient in some steps; costs a search per step."
    )
    static_graph: bool = option(
        False, "Promise DDP that every step uses the same parameters in the same way."
    )
    gradient_as_bucket_view: bool = option(
        True, "Gradients are views into DDP's buckets, which saves one copy of them."
    )
    sync_batchnorm: bool = option(
        False, "BatchNorm statistics over all ranks instead of over each rank's own samples (CUDA)."
    )
    comm_hook: str | None = option(
        None,
        "Compress gradients for the all-reduce: `fp16` or `bf16` halve them; `powersgd` sends a "
        "low-rank approximation, as it is or in half the bytes (`powersgd+fp16`, `powersgd+bf16`), "
        "and makes up for its error in later steps. fp16 cannot hold gradients beyond 65504, bf16 "
        "has the range of fp32. null: send them as they are.",
        choices=("fp16", "bf16", "powersgd", "powersgd+fp16", "powersgd+bf16"),
    )
    powersgd_rank: int = option(
        4, "Rank of PowerSGD's approximation: more sends more, and is closer.", at_least=1
    )
    powersgd_start_step: int = option(
        1000,
        "Optimizer steps with uncompressed gradients before PowerSGD begins: early ones suffer "
        "most from an approximation.",
        at_least=0,
    )
    global_batch_size: int | None = option(
        None,
        f"Samples per optimizer step, over all ranks. null: {DEFAULT_GLOBAL_BATCH_SIZE}, or what a "
        "DataLoader of your own says; giving both is an error.",
        at_least=1,
        section="Batches",
    )
    micro_batch_size: int | None = option(
        None,
        "The most samples per forward on one rank; gradients accumulate over the micro-batches of "
        "a step. null: an even share of the global batch.",
        at_least=1,
    )
    eval_batch_size: int | None = option(
        None,
        "Samples per forward in evaluation and prediction on one rank; null: as in training.",
        at_least=1,
    )
    shuffle: bool = option(True, "A new order of the training data in every epoch.")
    drop_last: bool = option(False, "Leave the last, smaller global batch of an epoch out.")
    num_workers: int = option(0, "Loader processes per rank.", at_least=0)
    pin_memory: bool | str = option(
        "auto", "Page-locked batches, for faster copies; `auto`: on CUDA.", choices=("auto",)
    )
    max_epochs: int | None = option(
        None,
        "Stop after so many epochs. This or `max_steps` is required to fit.",
        at_least=1,
        section="Length",
    )
    max_steps: int | None = option(
        None, "Stop after so many optimizer steps; with both, whichever comes first.", at_least=1
    )
    precision: str = option(
        "fp32",
        "`fp32`, `bf16` (autocast) or `fp16` (autocast with loss scaling). Lightning's spellings "
        "(`32-true`, `bf16-mixed`, `16-mixed`, ...) work too.",
        choices=tuple(PRECISIONS),
        section="Optimization",
    )
    gradient_clip_norm: float | None = option(
        None, "Clip the gradients' global L2 norm to this, right before the step.", above=0
    )
    weight_average: str | None = option(
        None,
        "What comes out of a fit is an average of the weights over the training: `ema`, a moving "
        "one over the steps, or `swa`, the mean over the ends of epochs. It is what is validated, "
        "saved and tested.",
        choices=("ema", "swa"),
    )
    weight_average_decay: float = option(
        0.999, "What `ema` keeps of the average at each step, at most.", above=0, at_most=1
    )
    weight_average_start_epoch: int = option(
        0, "The first epoch, from 0, whose weights are averaged.", at_least=0
    )
    lr_scaling: str = option(
        "none",
        "The learning rate follows the global batch, which is k times `lr_reference_batch_size`: "
        "`linear` multiplies it by k (SGD); `sqrt` by the root of k, and changes betas and eps too "
        "(Adam).",
        choices=("none", "linear", "sqrt"),
    )
    lr_reference_batch_size: int | None = option(
        None,
        "The global batch that the task's learning rate is meant for; required by `lr_scaling`.",
        at_least=1,
    )
    lr_warmup_steps: int = option(
        0, "Steps in which a rate that `lr_scaling` makes larger rises to that.", at_least=0
    )
    seed: int = option(
        0,
        "Of everything random: data order, dropout, and the initial weights of a task that is made "
        "after the Trainer, which seeds when it is made (on the command line it is).",
        at_least=0,
        section="Random numbers",
    )
    reproducible: bool = option(
        False,
        "The same bits at any world size that is a power of two, up to `global_batch_size` / "
        "`micro_batch_size`, which must be given. `num_threads=auto` then is 1.",
    )
    log_every_n_steps: int = option(
        50,
        "Steps between two log events.",
        at_least=1,
        section="Logging and validation",
    )
    statistics: list[str] = option(  # noqa: RUF009
        [],
        "What to log of the steps that are logged, over all and by module: `gradients` "
        "(`train/grad_norm`, before clipping), `weights` (`train/weight_norm`), `updates` "
        "(`train/update_ratio`: the norm of a step's change over that of the weights).",
        choices=("gradients", "weights", "updates"),
    )
    validate_every_n_steps: int | None = option(
        None, "Validate every so many steps; null: not by steps.", at_least=1
    )
    validate_every_n_epochs: int | None = option(
        1, "Validate every so many epochs; null: not by epochs.", at_least=1
    )
    limit_train_batches: int | None = option(
        None,
        "At most so many global batches per training epoch.",
        at_least=1,
        section="Short runs, and the search for mistakes",
    )
    limit_val_batches: int | None = option(
        None, "At most so many global batches per validation.", at_least=1
    )
    limit_test_batches: int | None = option(
        None, "At most so many global batches per test.", at_least=1
    )
    fast_dev_run: bool = option(False, "Try everything once: one training and one validation step.")
    overfit_batches: int = option(
        0, "Train on the first so many global batches again and again; 0: off.", at_least=0
    )
    num_sanity_val_steps: int = option(
        0, "Global batches of validation to try before training starts.", at_least=0
    )
    detect_anomaly: bool = option(
        False, "torch.autograd's anomaly detection: finds the forward of a NaN, and is slow."
    )
    compile: bool | str = option(
        False,
        "Compile the task's `forward` (torch.compile), cut where gradients leave for the other "
        "ranks; or a mode of torch.compile's.",
        choices=("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        section="Speed",
    )
    matmul_precision: str | None = option(
        None,
        "torch.set_float32_matmul_precision; null leaves torch's setting alone.",
        choices=("highest", "high", "medium"),
    )
    num_threads: int | str = option(
        "auto",
        "CPU threads per rank; `auto`: the machine's cores shared between its ranks.",
        at_least=1,
        choices=("auto",),
    )
    profile: str | None = option(
        None,
        "`10-14`: trace these steps of a fit by torch.profiler, into a file per rank. `startup`: "
        "after the first step, say where the time since the start of the program went; after a "
        "restart, since that.",
        choices=("startup",),
        form=("steps such as 10-14", r"[1-9]\d*(-[1-9]\d*)?"),
    )
    run_dir: str | None = option(
        None,
        "The folder for everything a run writes. null: Hydra's output folder, else "
        "`runs/<time>`; under SLURM `runs/<job name>-<job id>`. Or a url for its checkpoints "
        "(`s3://bucket/run`: any that fsspec knows); the other files are then in "
        "`runs/s3/bucket/run`.",
        section="The run's folder and checkpoints",
    )
    checkpoint: CheckpointConfig = field(
        default_factory=CheckpointConfig, metadata={"doc": "When to write checkpoints."}
    )
    resume: str | None = option(
        None,
        "Go on from a checkpoint: a path or a url, or `auto` for the newest valid one of this "
        "`run_dir`. A requeued SLURM job goes on from its own in any case.",
    )
    accept_changes: list[str] = option(  # noqa: RUF009
        [],
        "What may differ from the run that `resume` goes on with; anything else that does is "
        "refused.",
        choices=("model", "optimizer", "schedule", "data"),
    )
    init_from: str | None = option(
        None,
        "Start a new run from these weights: a checkpoint, a `.safetensors` file, a `.ckpt` of "
        "Lightning, or the url of one. A checkpoint "
        "that `resume` finds comes first.",
    )
    timeout_s: float = option(
        300.0,
        "The longest, in seconds, that a rank may stay in one phase of a step (loading a batch, "
        "forward, saving, ...) and that a collective may wait; then the run ends and says why.",
        above=0,
        at_most=_LONGEST_S,
        section="Failures",
    )
    start_timeout_s: float | None = option(
        None,
        "The same until the first step is done (datasets are read, kernels are compiled); null: "
        "twice `timeout_s`.",
        above=0,
        at_most=_LONGEST_S,
    )
    max_restarts: int = option(
        0,
        "How often ranks that fail are all started again, from the newest checkpoint of the run. "
        "Under torchrun, its `--max-restarts` counts.",
        at_least=0,
    )

    def __post_init__(self) -> None:
        self.precision = _canonical_precision(self.precision)
        self.run_dir = _plain_path(self.run_dir)
        self.resume = _plain_path(self.resume)
        self.init_from = _plain_path(self.init_from)
        for name in ("accept_changes", "statistics"):
            if isinstance(given := getattr(self, name), tuple):
                setattr(self, name, list(given))
        if isinstance(self.checkpoint, Mapping):
            self.checkpoint = _build(CheckpointConfig, self.checkpoint, "checkpoint.")
        if isinstance(self.profile, int) and not isinstance(self.profile, bool):
            self.profile = str(self.profile)  # a single step
        _check_strategy(self.strategy)
        check_fields(self)
        if self.profiled_steps is not None and not self.profiled_steps:
            raise ValueError(f"profile={self.profile}: the first step comes before the last one")
        check_pairs(self)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> TrainerConfig:
        """Build the config from plain names and values.

        Args:
            options: Any of the options; ``checkpoint`` may be a mapping too.

        Raises:
            ValueError: For an unknown option (the message names the nearest one, or ours for a
                name known from another trainer) and for everything the constructor refuses.
        """
        config: TrainerConfig = _build(cls, options)
        return config

    @property
    def validates(self) -> bool:
        """Whether a fit validates at all, given the data."""
        return bool(self.validate_every_n_steps or self.validate_every_n_epochs)

    @property
    def uses_powersgd(self) -> bool:
        """Whether ``comm_hook`` is PowerSGD, alone or with something around it."""
        return self.comm_hook is not None and self.comm_hook.startswith("powersgd")

    @property
    def profiled_steps(self) -> range | None:
        """The steps that ``profile`` asks to be traced; None for none."""
        if self.profile is None or self.profile == "startup":
            return None
        first, _, last = self.profile.partition("-")
        return range(int(first), int(last or first) + 1)

    @property
    def timeouts_s(self) -> tuple[float, float]:
        """``timeout_s``, and ``start_timeout_s`` in seconds."""
        return self.timeout_s, self.start_timeout_s or 2 * self.timeout_s

    def check_limits(self) -> None:
        """Refuse to fit without an end.

        Raises:
            ValueError: If neither ``max_epochs`` nor ``max_steps`` is given.
        """
        if self.max_epochs is None and self.max_steps is None and not self.fast_dev_run:
            raise ValueError(
                "neither max_epochs nor max_steps is given, so the training would never end; set "
                "one of them (max_epochs=10, say), or both for whichever comes first"
            )


def option_names() -> list[str]:
    """Return the full name of every option, ``checkpoint.keep`` and the like included."""
    names = []
    for name in option_fields(TrainerConfig):
        if name == "checkpoint":
            names += [f"checkpoint.{sub}" for sub in option_fields(CheckpointConfig)]
        else:
            names.append(name)
    return names


def _build(cls: Any, options: Mapping[str, Any], prefix: str = "") -> Any:
    known = option_fields(cls)
    for name in options:
        if name not in known:
            from trainer.migration import explain_unknown

            raise ValueError(explain_unknown(f"{prefix}{name}", options))
    return cls(**options)


def _canonical_precision(value: Any) -> Any:
    spelling = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    for name, spellings in PRECISIONS.items():
        if spelling in spellings:
            return name
    return value


def _plain_path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _check_strategy(value: Any) -> None:
    if value == "ddp" or (isinstance(value, Mapping) and "_target_" in value):
        return
    from trainer.migration import explain_strategy

    raise ValueError(explain_strategy(value))
