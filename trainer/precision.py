"""Number formats: autocast around forward and loss, and loss scaling for fp16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from trainer import distributed

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Mixed precision on one device: parameters stay fp32, matrix products run in ``name``.

    Attributes:
        scaler: Scales the loss so that fp16 gradients do not vanish, and skips steps in which they
            overflow; it does nothing for fp32 and bf16. Its ``step`` waits for an accelerator to
            learn of an overflow, unless the optimizer is a fused one.
    """

    def __init__(self, name: str, device: torch.device, averaged_over: int) -> None:
        self._device = device
        self._dtype = DTYPES.get(name)
        # The step module scales losses up by what the strategy's reduction divides by. Starting
        # with less scale by as much makes gradients overflow in the same steps as on one rank.
        self._spare = averaged_over
        self.scaler = torch.amp.GradScaler(
            device.type, init_scale=2.0**16 / self._spare, enabled=name == "fp16"
        )

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context for forward and loss."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scaling on one rank; empty where there is none."""
        state = self.scaler.state_dict()
        return {**state, "scale": state["scale"] * self._spare} if state else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned, in this precision or another."""
        if state:
            self.scaler.load_state_dict({**state, "scale": state["scale"] / self._spare})
        elif self.scaler.is_enabled() and distributed.rank() == 0:
            print("resume: the checkpoint was not trained in fp16; its loss scale starts anew")
