"""An average of the weights over the training, which is what comes out of a fit.

It is what is validated, saved as the checkpoint's weights, tested, and in the task at the end. The
trained weights, to go on from, are in the checkpoint's other state.

- ``ema``, an exponential moving average after every step (Polyak and Juditsky 1992; with weights
  that fade as in Tan and Le 2019, arXiv:1905.11946). The n-th average takes ``1 - min(decay, (1 +
  n) / (10 + n))`` of the new weights, so it soon forgets where the training began.
- ``swa``, the mean of the weights at the ends of epochs (Izmailov et al. 2018, arXiv:1803.05407).

Buffers in floating point, such as BatchNorm's statistics, are averaged like weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from trainer import distributed
from trainer.config import TrainerConfig


class WeightAverage:
    """The average beside a task. Every rank has one; it is as equal on them as weights are."""

    def __init__(self, task: nn.Module, config: TrainerConfig) -> None:
        """Note whose weights to average.

        Args:
            task: Whose.
            config: Says how, and from which epoch on; by default there is no average.
        """
        self._task = task
        self._kind = config.weight_average
        self._decay = config.weight_average_decay
        self._start_epoch = config.weight_average_start_epoch
        self._count = 0
        self._parameters: dict[str, nn.Parameter] = {}
        self._buffers: dict[str, tuple[nn.Module, str]] = {}  # where each is: a task may replace it
        self._averages: list[Tensor] = []

    def after_step(self, epoch: int) -> None:
        """Take in the weights after a step of ``epoch``, for a moving average."""
        if self._kind == "ema" and epoch >= self._start_epoch:
            decay = min(self._decay, (1 + self._count) / (10 + self._count))
            self._update(get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]

    def after_epoch(self, epoch: int) -> None:
        """Take in the weights at the end of ``epoch``, for a mean over the epochs."""
        if self._kind == "swa" and epoch >= self._start_epoch:
            self._update(get_swa_multi_avg_fn())  # type: ignore[no-untyped-call]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the task have the average in this context, if there is one by now."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def keep(self) -> None:
        """Let the task have the average from now on, which ends the averaging."""
        if self._kind is not None and not self._count and distributed.rank() == 0:
            print(
                f"note: weight_average={self._kind} has averaged nothing: epoch {self._start_epoch}"
                f" {'has not ended' if self._kind == 'swa' else 'has not begun'}",
                flush=True,
            )
        self._swap()
        self._kind, self._count = None, 0
        self._averages = []

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside the average, while that is `applied`.

        Empty where there is no average.
        """
        if not self._count:
            return {}
        return {
            "kind": self._kind,
            "count": self._count,
            "trained": dict(zip([*self._parameters, *self._buffers], self._averages, strict=True)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` returned; the task has the checkpoint's average before.

        Afterwards it has the trained weights.
        """
        if not state:
            return
        if self._kind == state["kind"]:
            self._hold()
            self._count = state["count"]
        elif distributed.rank() == 0:
            print(
                f"resume: weight_average was {state['kind']}, so that average is dropped",
                flush=True,
            )
        self._task.load_state_dict(state["trained"], strict=False)

    def _update(self, average: Callable[..., None]) -> None:
        if self._count:
            average(self._averages, self._tensors(), self._count)
        else:
            self._hold()
        self._count += 1

    def _hold(self) -> None:
        """Begin with what the task has now."""
        saved = self._task.state_dict().keys()
        self._parameters = {n: p for n, p in self._task.named_parameters() if n in saved}
        self._buffers = {
            name: (self._task.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name, buffer in self._task.named_buffers()
            if name in saved and buffer.is_floating_point()
        }
        self._averages = [tensor.clone() for tensor in self._tensors()]

    def _tensors(self) -> list[Tensor]:
        """Return what the task has now, in the order of the averages."""
        buffers = [module.get_buffer(name) for module, name in self._buffers.values()]
        return [tensor.detach() for tensor in (*self._parameters.values(), *buffers)]

    @torch.no_grad()
    def _swap(self) -> None:
        if self._count:
            tensors = self._tensors()
            trained = [t.clone() for t in tensors]
            torch._foreach_copy_(tensors, self._averages)
            torch._foreach_copy_(self._averages, trained)
