"""The nets that the benchmarks train: a tiny one, and those of the recipes without a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from recipes.language_model import ByteTransformer
from recipes.mnist import Batch, MnistTask
from trainer import TaskModule


class TwoLayers(TaskModule):
    """Two linear layers; by default so small that a step is mostly overhead."""

    def __init__(self, inputs: int = 32, hidden: int = 64, outputs: int = 10) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.net(batch[0])
        return logits

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the mean cross-entropy."""
        return F.cross_entropy(outputs, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD, the cheapest there is."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Graded(TwoLayers):
    """`TwoLayers`, with the accuracy in its evaluation."""

    def build_metrics(self, split: str) -> Mapping[str, Metric]:
        """Return the accuracy."""
        return {"accuracy": MulticlassAccuracy(num_classes=10, average="micro")}

    def update_metrics(self, metrics: Mapping[str, Any], outputs: Tensor, batch: Batch) -> None:
        """Count what is right."""
        metrics["accuracy"].update(outputs, batch[1])


class ConvTask(MnistTask):
    """The net of the MNIST recipe, with its optimizer and without its schedule."""

    def configure_optimizers(self) -> torch.optim.Optimizer:  # type: ignore[override]
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), self.learning_rate, fused=True)


class TextTask(ByteTransformer):
    """The net of the language model recipe, with its optimizer and without its schedule."""

    def configure_optimizers(self) -> torch.optim.Optimizer:  # type: ignore[override]
        """Return AdamW."""
        return torch.optim.AdamW(
            self.parameters(), self.learning_rate, weight_decay=self.weight_decay, fused=True
        )
