"""Number formats: autocast around forward and loss, and loss scaling for fp16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from trainer import distributed

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Mixed precision on one device: parameters stay fp32, matrix products run in ``name``."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        dtype = DTYPES.get(name)
        self._autocast: AbstractContextManager[None] = nullcontext()
        if dtype is not None:
            self._autocast = torch.autocast(device.type, dtype=dtype)

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context for forward and loss, which is no place for another one of these."""
        return self._autocast


class LossScaler(torch.amp.GradScaler):
    """Scales the loss so that fp16 gradients do not vanish, and skips steps in which they overflow.

    It does nothing for fp32 and bf16. Its ``step`` waits for an accelerator to learn of an
    overflow, unless the optimizer is a fused one.
    """

    def __init__(self, precision: Precision, averaged_over: int) -> None:
        """Set the first scale.

        Args:
            precision: Of the forward.
            averaged_over: What the strategy's reduction divides by. The step module scales losses
                up by as much; with less scale by as much, gradients overflow in the same steps as
                on one rank.
        """
        super().__init__(
            precision.device.type,
            init_scale=2.0**16 / averaged_over,
            enabled=precision.name == "fp16",
        )
        self._averaged_over = averaged_over

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the scale as on one rank; empty where nothing is scaled."""
        state = super().state_dict()
        return {**state, "scale": state["scale"] * self._averaged_over} if state else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned, in this precision or another."""
        if state:
            super().load_state_dict({**state, "scale": state["scale"] / self._averaged_over})
        elif self.is_enabled() and distributed.rank() == 0:
            print("resume: the checkpoint was not trained in fp16; its loss scale starts anew")
