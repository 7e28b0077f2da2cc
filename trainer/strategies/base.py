"""What a strategy is."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from trainer import distributed
from trainer.data.loading import MicroBatch
from trainer.data.plan import GlobalBatchPlan
from trainer.precision import LossScaler
from trainer.step import StepModule
from trainer.strategies.comm_clock import CommTimes


class Strategy:
    """Wraps the step module so that gradients are those of all ranks together.

    The contract, for what ``setup`` returns and for every trained parameter of the step module,
    its ``extra_weight`` included:

    - Weights and buffers are rank 0's after ``setup``.
    - After a ``backward`` outside of ``no_sync``, gradients are the sum over the ranks of what each
      of them has accumulated, divided by ``averaged_over``, the same to the last bit on every rank.
    - ``extra_weight`` arrives in full precision, however gradients are sent: a weight that was
      rounded would be an error in all of them.
    - Every rank runs one such ``backward`` per step, but any number of them within ``no_sync``.

    ``setup`` and ``teardown`` may run several times in a process: after the parameters that are
    trained have changed, and for every ``fit``. ``teardown`` and ``state_dict`` must also do where
    nothing is set up: the loop tears down before each ``setup``, the first one too, and in the end
    whatever has happened; and a run that resumes may save before it trains.

    Attributes:
        may_miss_gradients: Whether parameters may go without a gradient in a step. If not, one that
            has none is an error, and a rank without samples gives zeros to all of them.
        scaler: What scales the loss, for a strategy that keeps something of one step's gradients
            for the next; it is there before ``setup``.
        wants_setup: Whether the loop is to tear down and set up once more after this step, because
            the strategy goes on in another way; the same on every rank. Weights and buffers then
            stay as they are.
    """

    may_miss_gradients: bool = False
    wants_setup: bool = False
    scaler: LossScaler | None = None

    @property
    def averaged_over(self) -> int:
        """What the reduction divides by; the step module scales each loss up by as much."""
        return distributed.world_size()

    def check(self, plan: GlobalBatchPlan, device: torch.device, always_full: bool) -> None:
        """Refuse what this strategy cannot do; the default can do everything.

        Called once, before ``setup``, so a strategy may keep the plan that it needs there.

        Args:
            plan: How global batches are cut.
            device: The device of this rank.
            always_full: Whether every global batch of every epoch has the planned size.

        Raises:
            ValueError: Naming the option and what to change.
        """

    def setup(self, step: StepModule, device: torch.device) -> nn.Module:
        """Return what the loop calls instead of ``step``, with the same arguments."""
        raise NotImplementedError

    def no_sync(self) -> AbstractContextManager[None]:
        """Return the context for micro-batches after which gradients are not reduced yet."""
        raise NotImplementedError

    def after_backward(self, micro: MicroBatch) -> None:
        """Do what is left to do after each ``backward``; by default gradients just accumulate."""

    def take_comm_times(self) -> CommTimes | None:
        """Return what communication takes in the steps since the last call.

        The loop asks at every log event, when the host has waited for all that the device had to do
        in them. None, as by default, says that it is not known; that must be so on every rank or on
        none.
        """
        return None

    def teardown(self) -> None:
        """Let go of the wrapped module and its hooks on parameters, if there is one."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, at any world size: tensors and plain values.

        Every rank calls it, before each save, so it may run collectives; rank 0's is kept. Before
        the first ``setup`` it is what ``load_state_dict`` was given.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned, on every rank and before ``setup``.

        Empty in a new run. By default there is nothing to take back.
        """
        if state and distributed.rank() == 0:
            print(
                "resume: what the checkpoint has kept of gradients that were sent in another way "
                "is dropped",
                flush=True,
            )
