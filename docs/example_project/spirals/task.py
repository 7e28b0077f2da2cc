"""The net, its loss and its optimizer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer import TaskModule

Batch = tuple[Tensor, Tensor]


class SpiralTask(TaskModule):
    """Two hidden layers, trained with Adam.

    Args:
        width: Features of each hidden layer.
        learning_rate: Adam's.
    """

    def __init__(self, width: int = 32, learning_rate: float = 0.01) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, batch: Batch) -> Tensor:
        """Return how much each point (n, 2) looks like arm 1, as logits (n)."""
        points, _ = batch
        logits: Tensor = self.net(points).squeeze(1)
        return logits

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the mean cross-entropy, and log the share of points that are told right."""
        _, arm = batch
        self.log("accuracy", ((outputs > 0) == (arm > 0.5)).float().mean())
        return nn.functional.binary_cross_entropy_with_logits(outputs, arm)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)
