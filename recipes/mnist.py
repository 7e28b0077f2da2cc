"""A small convolutional net on the original MNIST files: over 99 % in well under a minute.

    python -m recipes.mnist                                     # one process
    python -m recipes.mnist trainer.devices=4                   # four DDP processes, the same run
    python -m recipes.mnist trainer.devices=4 trainer.global_batch_size=512 task.learning_rate=0.008
    torchrun --nproc-per-node=4 -m recipes.mnist                # torchrun starts the processes
    python -m recipes.mnist mode=test ckpt_path=outputs/<run>/checkpoints/best

Every setting stands in `conf/mnist.yaml`. The digits come with the project (`recipes/data/mnist`).
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from trainer import DataModule, OptimizerSetup, TaskModule, hydra_main, run

ORIGINAL_FILES = Path(__file__).parent / "data" / "mnist"
SHA256 = {
    "train-images-idx3": "71524e2cd1ad2968737f7f2f2ff69cbfc32df8ccddff51593f7cb2d4e0eb5b64",
    "train-labels-idx1": "fe03b8bd7915f70bf5aa08be480aa413fbd85afcaa58b35d230d335f284fd88e",
    "t10k-images-idx3": "5634745efa576a17e7d4cf5cd9d09123c75e6538e5114267c2d156edaf519341",
    "t10k-labels-idx1": "ae18e77e031ccde52407f794d123116439864147d33ac992975f85dd4dc42af6",
}
# Mean and standard deviation of the training pixels, which run from 0 to 255.
PIXEL_MEAN, PIXEL_STD = 33.32, 78.57

Batch = tuple[Tensor, Tensor]


class Digits(Dataset[Batch]):
    """Images (n, 28, 28) and labels (n) in memory; a batch is taken out in one call."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return the ready batch of these samples."""
        chosen = torch.as_tensor(indices)
        return self.images[chosen], self.labels[chosen]


class MnistData(DataModule):
    """Trains on 55,000 images, validates on the last 5,000 of the training file, tests on 10,000.

    The files are read here and not in every rank, so ranks that are forked share the memory.

    Args:
        folder: Where the four original files are; None for the ones that come with the project.
        num_val: How many training images, counted from the end, are held out for validation.
    """

    def __init__(self, folder: str | None = None, num_val: int = 5_000) -> None:
        source = Path(folder) if folder else ORIGINAL_FILES
        images, labels = read_pair(source, "train")
        self.train = Digits(images[:-num_val], labels[:-num_val])
        self.val = Digits(images[-num_val:], labels[-num_val:])
        self.test = Digits(*read_pair(source, "t10k"))

    def train_dataset(self) -> Digits:
        """Return the training images that are not held out."""
        return self.train

    def val_dataset(self) -> Digits:
        """Return the held-out training images."""
        return self.val

    def test_dataset(self) -> Digits:
        """Return the official test images."""
        return self.test

    def predict_dataset(self) -> Digits:
        """Return the official test images."""
        return self.test


class MnistTask(TaskModule):
    """Two convolutions and two linear layers, trained with AdamW on a one-cycle schedule."""

    def __init__(
        self, learning_rate: float = 0.004, weight_decay: float = 0.01, dropout: float = 0.25
    ) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(32 * 4 * 4, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits (n, 10)."""
        images, _ = batch
        # Pixels stay bytes until here: a quarter of the memory, and of the copy to a GPU.
        logits: Tensor = self.net((images.unsqueeze(1).float() - PIXEL_MEAN) / PIXEL_STD)
        return logits

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the mean cross-entropy."""
        _, labels = batch
        return F.cross_entropy(outputs, labels)

    def configure_optimizers(self) -> OptimizerSetup:
        """Return AdamW, with one cycle over the run where its length is known."""
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay, fused=True
        )
        steps = self.run.total_steps
        schedule = torch.optim.lr_scheduler.OneCycleLR
        return OptimizerSetup(
            optimizer, schedule(optimizer, self.learning_rate, steps) if steps else None
        )

    def build_metrics(self, split: str) -> Mapping[str, Metric]:
        """Return the accuracy, outside training."""
        if split == "train":
            return {}
        return {"accuracy": MulticlassAccuracy(num_classes=10, average="micro")}

    def update_metrics(self, metrics: Mapping[str, Any], outputs: Tensor, batch: Batch) -> None:
        """Count the digits that were recognised."""
        _, labels = batch
        if metrics:
            metrics["accuracy"].update(outputs, labels)

    def predict(self, batch: Batch) -> Tensor:
        """Return the recognised digits."""
        digits: Tensor = self(batch).argmax(dim=1)
        return digits


def read_pair(folder: Path, part: str) -> Batch:
    """Return the images and labels of ``part``, ``train`` or ``t10k``."""
    return read_idx(folder, f"{part}-images-idx3"), read_idx(folder, f"{part}-labels-idx1").long()


def read_idx(folder: Path, name: str) -> Tensor:
    """Return the bytes in one of the four original files, in their shape.

    Raises:
        ValueError: If the file is missing, or is not the original.
    """
    path = folder / f"{name}-ubyte.gz"
    if not path.is_file():
        raise ValueError(
            f"{path} is missing; data.folder must be a folder with the four original MNIST files, "
            "or null for the ones that come with the project"
        )
    packed = path.read_bytes()
    found = hashlib.sha256(packed).hexdigest()
    if found != SHA256[name]:
        raise ValueError(
            f"{path} is not the original MNIST file, or was damaged: its SHA-256 is {found} and "
            f"must be {SHA256[name]}; fetch it again, or set data.folder=null for the one that "
            "comes with the project"
        )
    return parse_idx(gzip.decompress(packed))


def parse_idx(data: bytes) -> Tensor:
    """Return the tensor in an IDX file: a header with big-endian sizes, then the bytes in rows."""
    kind, dimensions = data[2], data[3]
    assert kind == 0x08, "every MNIST file holds unsigned bytes"
    start = 4 + 4 * dimensions
    shape = np.frombuffer(data[4:start], dtype=">u4").tolist()
    return torch.tensor(np.frombuffer(data[start:], dtype=np.uint8)).view(shape)


@hydra_main(config_path="../conf", config_name="mnist")
def main(cfg: DictConfig) -> Any:
    """Do what the config says; return its ``optimized_metric``."""
    return run(cfg)


if __name__ == "__main__":
    main()
