"""Torchmetrics in a LightningModule, in the ways that their documentation shows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from side_by_side import assert_trains_alike, trainer
from support import on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score


def samples(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(count, 4, generator=generator),
        torch.randint(3, (count,), generator=generator),
    )


class Classifier(LightningModule):
    """Uses a metric of its own in every way: by object, by value, in a collection."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.train_acc = MulticlassAccuracy(3, average="micro")
        self.epoch_acc = MulticlassAccuracy(3, average="micro")
        self.val_acc = MulticlassAccuracy(3, average="micro")
        self.val_f1 = MulticlassF1Score(3)
        metrics = MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)])
        self.train_metrics = metrics.clone(prefix="train_")
        self.val_metrics = metrics.clone(prefix="val_")
        self.by_loader = nn.ModuleList(MulticlassAccuracy(3, average="micro") for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x)
        self.train_acc(logits, y)
        self.log("acc", self.train_acc, on_step=True, on_epoch=True)
        self.epoch_acc(logits, y)
        self.log("acc_of_step", self.epoch_acc)
        self.train_metrics.update(logits, y)
        self.log_dict(self.train_metrics, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(logits, y)

    def on_train_epoch_end(self) -> None:
        self.log("acc_of_epoch", self.epoch_acc)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        logits = self.net(x)
        if dataloader_idx == 0:
            self.val_acc.update(logits, y)
            self.log("val_acc", self.val_acc, add_dataloader_idx=False)
        self.val_f1.update(logits, y)
        self.val_metrics.update(logits, y)
        self.by_loader[dataloader_idx](logits, y)
        self.log("val_acc_of", self.by_loader[dataloader_idx])

    def on_validation_epoch_end(self) -> None:
        self.log("val_f1", self.val_f1.compute())
        self.val_f1.reset()
        self.log_dict(self.val_metrics.compute())
        self.val_metrics.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


# Of each epoch; the last one is compared.
EPOCH = (
    "acc_epoch",
    "acc_of_epoch",
    "train_MulticlassAccuracy",
    "train_MulticlassF1Score",
    "val_acc",
    "val_f1",
    "val_MulticlassAccuracy",
    "val_MulticlassF1Score",
    "val_acc_of/dataloader_idx_0",
    "val_acc_of/dataloader_idx_1",
)


def data() -> dict[str, Any]:
    return {
        "train_dataloaders": DataLoader(samples(22), batch_size=8),
        "val_dataloaders": [DataLoader(samples(n), batch_size=8) for n in (10, 5)],
    }


def test_values_are_those_of_lightning(tmp_path: Path) -> None:
    ours, theirs = assert_trains_alike(Classifier(), data(), tmp_path, max_epochs=2)
    found = {name: ours.metrics[name] for name in EPOCH}
    assert found == pytest.approx({name: theirs.metrics[name] for name in EPOCH}, abs=1e-6)
    assert {"acc_step", "acc_of_step"} <= ours.metrics.keys()
    assert ours.module.train_acc.update_count == 0  # reset at the end of an epoch


def test_values_are_the_same_on_two_ranks(tmp_path: Path) -> None:
    def fit(name: str) -> dict[str, float]:
        torch.manual_seed(0)
        result = trainer(tmp_path / name, max_epochs=1, devices=2).fit(Classifier(), **data())
        return {} if result is None else result.metrics

    torch.manual_seed(0)
    alone = trainer(tmp_path / "one", max_epochs=1).fit(Classifier(), **data()).metrics
    together = on_ranks(2, fit, "two")[0]
    for name in EPOCH:  # a mean of floats may be rounded otherwise
        assert together[name] == pytest.approx(alone[name], abs=1e-6), name


def test_a_run_that_resumes_in_mid_epoch_counts_on(tmp_path: Path) -> None:
    def fit(name: str, **options: Any) -> dict[str, float]:
        torch.manual_seed(0)
        return trainer(tmp_path / name, **options).fit(Classifier(), **data()).metrics

    whole = fit("whole", max_epochs=1)
    fit("cut", max_steps=2)
    resumed = fit("cut", max_epochs=1, resume="auto")
    assert [resumed[name] for name in EPOCH] == [whole[name] for name in EPOCH]
