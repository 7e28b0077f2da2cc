"""Nets that compute on a device of their own, as it were: they take time, but not the processor's.

Hosts that share a processor would slow each other down with what they really compute.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer import TaskModule

# An operator, so that compiled code takes the time too: tracing would run an autograd.Function.
# (One made by `torch.library.custom_op` would load torch's compiler for whoever calls it.)
_REST = "benchmarks::rest"
torch.library.define(_REST, "(Tensor inputs, float seconds) -> Tensor")


@torch.library.impl(_REST, "CPU")
def _rest(inputs: Tensor, seconds: float) -> Tensor:
    time.sleep(seconds)
    return inputs.clone()


def _rest_twice(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return rest(grad, 2 * ctx.seconds), None


def _note_seconds(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.seconds = inputs[1]


torch.library.register_fake(_REST, lambda inputs, seconds: torch.empty_like(inputs))
torch.library.register_autograd(_REST, _rest_twice, setup_context=_note_seconds)


def rest(inputs: Tensor, seconds: float) -> Tensor:
    """Return the inputs after ``seconds``; the backward takes twice as long."""
    outputs: Tensor = torch.ops.benchmarks.rest(inputs, seconds)
    return outputs


class _Layer(nn.Linear):
    def __init__(self, width: int, seconds: float) -> None:
        super().__init__(width, width)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return rest(super().forward(x).relu(), self.seconds)


class Chain(TaskModule):
    """Equal linear layers in a row, whose gradients become ready one after the other.

    Samples are 32 numbers and one of ten classes.
    """

    def __init__(self, depth: int, width: int, compute_ms: float) -> None:
        """Build it.

        Args:
            depth: Layers, beside those at the ends, which take no time.
            width: Of each; it has 4 * width^2 bytes of gradients.
            compute_ms: All forwards and backwards, beside what the processor computes.
        """
        super().__init__()
        layers = [_Layer(width, compute_ms / 1000 / depth / 3) for _ in range(depth)]
        self.net = nn.Sequential(nn.Linear(32, width), nn.ReLU(), *layers, nn.Linear(width, 10))

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.net(batch[0])
        return logits

    def loss(self, outputs: Tensor, batch: Sequence[Tensor]) -> Tensor:
        """Return the mean cross-entropy."""
        return F.cross_entropy(outputs, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD, the cheapest there is."""
        return torch.optim.SGD(self.parameters(), lr=0.01)
