"""A loss over the whole global batch: every rank gets all of its samples, and the same value.

Each rank runs ``forward`` on its own samples. Outputs and batches then travel to all ranks, in the
order of the global batch, and every rank calls ``loss`` with the same tensors. Backward needs no
communication for that: the step's reduction of gradients is enough. With N ranks, and the loss L
divided by N on each,

- a parameter that ``loss`` uses gets dL / N on every rank, which adds up to dL;
- a parameter that ``forward`` uses gets, on each rank, what goes through that rank's own samples.
  These parts add up to dL if what reaches a rank's own outputs is multiplied by N.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from trainer import distributed
from trainer.data.plan import GlobalBatchPlan, ceil_div
from trainer.gathering import gather
from trainer.logbook import Logbook
from trainer.task import TaskModule


def check_plan(task: TaskModule, plan: GlobalBatchPlan, world_size: int) -> None:
    """Refuse a global loss where a rank would need more than one micro-batch per step.

    Args:
        task: With or without a global loss.
        plan: How training batches are cut.
        world_size: The number of ranks.

    Raises:
        ValueError: Saying what to change.
    """
    size, micro = plan.global_batch_size, plan.micro_batch_size
    if not task.global_loss or micro is None:
        return
    why = (
        f"{type(task).__name__} has global_loss=True, so its loss needs the outputs of the whole "
        "global batch at once, and a rank can have one micro-batch per step only; "
    )
    if size is None:
        raise ValueError(
            f"{why}micro_batch_size={micro} does not promise that for global batches of any size. "
            "Set micro_batch_size=null"
        )
    steps = plan.accumulation_steps(size, world_size)
    if steps > 1:
        raise ValueError(
            f"{why}micro_batch_size={micro} with global_batch_size={size} on {world_size} "
            f"{'rank' if world_size == 1 else 'ranks'} makes {steps}. Set micro_batch_size=null or "
            f"at least {ceil_div(size, world_size)}, or use at least {ceil_div(size, micro)} ranks "
            "(devices)"
        )


class Part(NamedTuple):
    """One micro-batch that a rank has run forward on."""

    outputs: Any
    batch: Any
    num_samples: int


class GlobalLoss:
    """Calls a task's ``loss`` with the outputs and the batch of a whole global batch."""

    def __init__(self, task: TaskModule, logbook: Logbook) -> None:
        """Note what every step needs.

        Args:
            task: The user's module.
            logbook: Is told that what ``loss`` logs counts once, not once per rank.
        """
        self._task = task
        self._logbook = logbook
        self._has_compared = False

    def __call__(self, parts: Sequence[Part], global_size: int) -> Any:
        """Return what ``loss`` returns. A collective: every rank calls it, with its own parts.

        Args:
            parts: This rank's micro-batches; none where it has no sample.
            global_size: Samples in the global batch.

        Raises:
            ValueError: On every rank, if the parts cannot be put together.
        """
        if distributed.world_size() == 1 and len(parts) == 1:
            outputs, batch, num_samples = parts[0]
            first_rank = 0
        else:
            trees = [{"outputs": part.outputs, "batch": part.batch} for part in parts]
            sizes = [part.num_samples for part in parts]
            # What must be the same in all parts is compared once: it takes a look at the values.
            compare, self._has_compared = not self._has_compared, True
            found = gather(trees, sizes, self._task.run.device, compare=compare)
            outputs, batch = found.tree["outputs"], found.tree["batch"]
            num_samples, first_rank = found.num_samples, found.first_rank
        if num_samples != global_size:
            raise ValueError(
                f"only {num_samples} samples of a global batch of {global_size} are there at once, "
                f"and {type(self._task).__name__} has global_loss=True, so its loss needs all of "
                "them; the DataLoader's batch sampler must not yield more samples than the "
                "batch_size that it announces"
            )
        is_counted = first_rank == distributed.rank()
        self._logbook.begin(*self._logbook.place, global_size, is_counted=is_counted)
        return self._task.loss(outputs, batch)
