"""What a user should know, and is told where it matters for the task."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from trainer import distributed
from trainer.config import DEFAULT_MONITORS, TrainerConfig
from trainer.data.plan import GlobalBatchPlan, ceil_div
from trainer.messages import counted, listed
from trainer.task import TaskModule

_FEW_STEPS = 10  # between two validations or checkpoints, which take as long as many steps


def print_notes(task: nn.Module, plan: GlobalBatchPlan, config: TrainerConfig) -> None:
    """Print what does not follow from the options at first sight, on rank 0."""
    if distributed.rank() == 0:
        cut = notes_on_cut(task, plan, config, distributed.world_size())
        for note in [*cut, *notes_on_epochs(config)]:
            print(f"note: {note}", flush=True)


def notes_on_epochs(config: TrainerConfig) -> list[str]:
    """Return a sentence if epochs are so short that what is done at their ends takes longer."""
    steps = config.overfit_batches
    every = {
        "validates": ("validate_every_n_epochs", config.validate_every_n_epochs),
        "saves": ("checkpoint.every_n_epochs", config.checkpoint.every_n_epochs),
    }
    often = {verb: name for verb, (name, n) in every.items() if n and n * steps <= _FEW_STEPS}
    if not steps or not often:
        return []
    return [
        f"overfit_batches={steps} makes an epoch of {counted(steps, 'step')}, at the end of which "
        f"the run {' and '.join(often)}; raise {' and '.join(often.values())} to do that less often"
    ]


def note_untrained(task: TaskModule, step: int) -> None:
    """Print, on rank 0, that no loss has had weight up to ``step``."""
    if distributed.rank() == 0 and not task.optimizes_itself:
        print(
            f"note: nothing was trained in the first {step} steps: loss returned None (a forgotten "
            "return?) or weight 0 for every micro-batch"
        )


def note_no_monitor(metrics: Iterable[str]) -> None:
    """Print that `best` is the last checkpoint, if one of ``metrics`` could have chosen it."""
    names = sorted(name for name in metrics if name.startswith("val"))
    if names:
        print(
            f"note: no {DEFAULT_MONITORS[0]} was measured, so the last checkpoint is the best; "
            f"checkpoint.monitor=<name> chooses by {listed(names)}",
            flush=True,
        )


def note_late_start(start_step: int, total_steps: int | None) -> None:
    """Print, on rank 0, that a run ends before PowerSGD begins, if it does."""
    if total_steps and total_steps <= start_step and distributed.rank() == 0:
        print(
            f"note: PowerSGD compresses nothing: the run ends after {total_steps} steps, and "
            f"powersgd_start_step={start_step}; a tenth of the run is {max(total_steps // 10, 1)}",
            flush=True,
        )


def note_too_small(rank: int) -> None:
    """Print, on rank 0, that PowerSGD finds no matrix that is worth compressing."""
    if distributed.rank() == 0:
        print(
            "note: PowerSGD compresses nothing: no parameter that is trained has so many rows and "
            f"columns that powersgd_rank={rank} would halve what is sent of it; a lower rank might",
            flush=True,
        )


def notes_on_cut(
    task: nn.Module, plan: GlobalBatchPlan, config: TrainerConfig, world_size: int
) -> list[str]:
    """Return one sentence for everything that does not follow from the options at first sight.

    Args:
        task: The user's module.
        plan: How global batches are cut.
        config: The options.
        world_size: The number of ranks.
    """
    size = plan.global_batch_size
    is_global = getattr(task, "global_loss", False)  # takes one micro-batch per rank
    notes = []
    if size is not None and (idle := _idle_ranks(plan, size, world_size)):
        even = ceil_div(size, world_size)
        if _idle_ranks(replace(plan, micro_batch_size=even), size, world_size):
            better = f"a global_batch_size that is a multiple of {world_size}"
        else:
            better = f"micro_batch_size={'null' if is_global else even}"
        notes.append(
            f"global_batch_size={size} in micro-batches of {plan.micro(size, world_size)} leaves "
            f"{idle} of {world_size} ranks without samples; {better} would give each a share"
        )
    following = ["the masks of dropout"] if any(map(_draws, task.modules())) else []
    if config.precision == "fp16":
        following.append("which steps overflow and are skipped (fp16)")
    if plan.micro_batch_size is None and world_size > 1 and following:
        fixed = "a number" if size is None else plan.micro(size, world_size)
        notes.append(
            "without micro_batch_size the cut into micro-batches follows the world size, and with "
            f"it {' and '.join(following)}; "
            + (
                "global_loss=True needs it so"
                if is_global
                else f"micro_batch_size={fixed} keeps that on any number of ranks"
            )
        )
    # In reproducible mode BatchNorm is refused; and SyncBatchNorm is, unless it can be exact.
    is_exact = config.reproducible or (config.sync_batchnorm and world_size > 1)
    is_cut = world_size > 1 if size is None else plan.micro(size, world_size) < size
    norms = [name for name, m in task.named_modules() if isinstance(m, _BatchNorm) and m.training]
    if norms and is_cut and not is_exact:
        notes.append(
            f"BatchNorm ({listed(norms)}) normalizes each micro-batch by itself, so results depend "
            "on the cut, and the running statistics are rank 0's; sync_batchnorm=true (CUDA, one "
            "even micro-batch per rank) takes the global batch's"
        )
    return notes


def _idle_ranks(plan: GlobalBatchPlan, size: int, world_size: int) -> int:
    return sum(not plan.cut(size, rank, world_size) for rank in range(world_size))


def _draws(module: nn.Module) -> bool:
    """Whether a module drops at random in training: torch's own, or with a number ``dropout``."""
    # Attention and recurrent layers keep the probability as a number.
    p = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", None)
    return module.training and isinstance(p, int | float) and p > 0
