"""What a strategy is."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn

from trainer.step import StepModule


class Strategy:
    """Wraps the step module so that gradients are those of all ranks together.

    ``setup`` and ``teardown`` may run several times in a process: after the parameters that are
    trained have changed, and for every ``fit``.
    """

    def setup(self, step: StepModule, device: torch.device) -> nn.Module:
        """Return what the loop calls instead of ``step``, with the same arguments."""
        raise NotImplementedError

    def no_sync(self) -> AbstractContextManager[None]:
        """Return the context for micro-batches after which gradients are not reduced yet."""
        raise NotImplementedError

    def teardown(self) -> None:
        """Let go of the wrapped module and its hooks on parameters."""
        raise NotImplementedError
