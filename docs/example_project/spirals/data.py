"""Points on two spirals."""

from __future__ import annotations

import math

import torch
from torch.utils.data import TensorDataset

from trainer import DataModule


def spirals(count: int, turns: float, noise: float, seed: int) -> TensorDataset:
    """Return ``count`` points (x, y) and the arm, 0.0 or 1.0, that each of them lies on."""
    random = torch.Generator().manual_seed(seed)
    arm = torch.arange(count) % 2
    radius = torch.rand(count, generator=random).sqrt()
    angle = 2 * math.pi * turns * radius + math.pi * arm
    points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    points += noise * torch.randn(count, 2, generator=random)
    return TensorDataset(points, arm.float())


class Spirals(DataModule):
    """Makes its points when it is built, so there is nothing to download.

    Args:
        num_train: Points to train on; half as many to validate with, and to test with.
        turns: How often each arm goes around.
        noise: The standard deviation of the points from their arm.
    """

    def __init__(self, num_train: int = 2000, turns: float = 1.0, noise: float = 0.02) -> None:
        self.train = spirals(num_train, turns, noise, seed=0)
        self.val = spirals(num_train // 2, turns, noise, seed=1)
        self.test = spirals(num_train // 2, turns, noise, seed=2)

    def train_dataset(self) -> TensorDataset:
        """Return the points to train on."""
        return self.train

    def val_dataset(self) -> TensorDataset:
        """Return the points to validate with."""
        return self.val

    def test_dataset(self) -> TensorDataset:
        """Return the points to test with."""
        return self.test
