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

from typing import Any

from trainer import distributed
from trainer.data.plan import GlobalBatchPlan, ceil_div
from trainer.gathering import Gathered, gather
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
    if plan.halving:
        raise ValueError(
            f"reproducible=true, but {type(task).__name__} has global_loss=True, which takes one "
            "micro-batch per rank, so the cut and the last bits follow the world size; use "
            "reproducible=false"
        )
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


class TaskLoss:
    """Calls a task's ``loss``: with a micro-batch, or with a global batch if the loss is global."""

    def __init__(self, task: TaskModule, logbook: Logbook) -> None:
        """Note what every call needs.

        Args:
            task: The user's module.
            logbook: Is told that what a global loss logs counts once, not once per rank.
        """
        self._task = task
        self._logbook = logbook
        self._parts: list[dict[str, Any]] = []
        self._sizes: list[int] = []
        self._has_compared = False

    def __call__(
        self, outputs: Any, batch: Any, num_samples: int, global_size: int, *, is_last: bool = True
    ) -> Any:
        """Return what ``loss`` returns, or None where there is nothing to call it with.

        A collective if the loss is global and ``is_last``.

        Args:
            outputs: What ``forward`` returned.
            batch: The micro-batch; None if this rank has no sample.
            num_samples: Samples in it.
            global_size: Samples in the global batch.
            is_last: Whether it is the global batch's last one on this rank; a global loss keeps
                the others until then.

        Raises:
            ValueError: On every rank, if the parts of a global batch cannot be put together.
        """
        if not self._task.global_loss:
            return None if batch is None else self._task.loss(outputs, batch)
        if batch is not None:
            self._parts.append({"outputs": outputs, "batch": batch})
            self._sizes.append(num_samples)
        return self._of_all(global_size) if is_last else None

    def _of_all(self, global_size: int) -> Any:
        parts, sizes, self._parts, self._sizes = self._parts, self._sizes, [], []
        if distributed.world_size() == 1 and len(parts) == 1:
            whole = Gathered(parts[0], sizes[0], first_rank=0)
        else:
            # What must be the same in all parts is compared once: it takes a look at the values.
            compare, self._has_compared = not self._has_compared, True
            whole = gather(parts, sizes, self._task.run.device, compare=compare)
        if whole.num_samples != global_size:
            raise ValueError(
                f"only {whole.num_samples} samples of a global batch of {global_size} are there "
                f"at once, and {type(self._task).__name__} has global_loss=True, so its loss needs "
                "all of them; the DataLoader's batch sampler must not yield more samples than the "
                "batch_size that it announces"
            )
        self._logbook.count(global_size, is_counted=whole.first_rank == distributed.rank())
        return self._task.loss(whole.tree["outputs"], whole.tree["batch"])
