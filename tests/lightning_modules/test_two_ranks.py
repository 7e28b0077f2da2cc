"""What a LightningModule measures and follows is the same on two ranks as on one.

Of nine validation samples in batches of four the ranks have different numbers; of one sample, one
rank has none.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from side_by_side import trainer
from support import on_ranks, weights
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC


def samples(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.arange(count) % 3)


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3).double()
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.linspace(-1, number, parameter.numel()).view_as(parameter))
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("by_step", loss)
        self.log("size", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class OnAPlateau(Classifier):
    """Follows what is logged in steps of training, at the end of each epoch or in each step."""

    def __init__(self, interval: str = "epoch") -> None:
        super().__init__()
        self.interval = interval
        self.seen: list[float] = []

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(self.trainer.callback_metrics["by_step"]))

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.9)
        schedule = {"scheduler": plateau, "monitor": "by_step", "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class ComputesItself(Classifier):
    """Computes its metrics itself, without logging them as objects."""

    def __init__(self, curve: bool = True) -> None:
        super().__init__()
        self.auroc = MulticlassAUROC(3) if curve else MeanMetric()
        self.outputs = CatMetric()
        found = {"accuracy": MulticlassAccuracy(3), "mean": MeanMetric()}
        self.many = MetricCollection(found, compute_groups=False)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.auroc.update(*((self.net(x), y) if isinstance(self.auroc, MulticlassAUROC) else (y,)))
        self.outputs.update(self.net(x).max(dim=1).values)
        self.many["accuracy"].update(self.net(x), y)
        self.many["mean"].update(x)

    def on_validation_epoch_end(self) -> None:
        for _ in range(2):  # the second time it is no other
            self.log("auroc", self.auroc.compute())
        self.log("largest", self.outputs.compute().median())
        self.log_dict(self.many.compute())
        if self.trainer.sanity_checking:
            return  # one that is not reset counts on
        for metric in (self.auroc, self.outputs, self.many):
            metric.reset()


class KeepsOutputs(Classifier):
    """Takes the mean of all outputs itself, at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.losses.append(self.net(batch[0]).detach().amax(dim=1))
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("train_mean", torch.cat(self.losses).mean())
        self.losses.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outputs.append(self.net(batch[0]).amax(dim=1))

    def on_validation_epoch_end(self) -> None:
        self.log("val_mean", torch.cat(self.outputs).mean())
        self.log("count", 1.0)
        self.outputs.clear()


MODULES: dict[str, tuple[Any, int]] = {
    "plateau by epoch": (OnAPlateau, 9),
    "plateau by step": (lambda: OnAPlateau("step"), 9),
    "computes itself": (ComputesItself, 9),
    "a rank without a sample": (lambda: ComputesItself(curve=False), 1),
    "keeps outputs": (KeepsOutputs, 9),
}
DRAWN = ("train/", "perf/", "lr")


def data(count: int, train: int = 15) -> dict[str, Any]:
    return {
        "train_dataloaders": DataLoader(samples(train), batch_size=4),
        "val_dataloaders": DataLoader(samples(count), batch_size=4),
    }


def fitted(path: Path) -> dict[str, Any]:
    found = {}
    for name, (make, count) in MODULES.items():
        module = make()
        options: dict[str, Any] = {"max_epochs": 4, "num_sanity_val_steps": 1}
        result = trainer(path / name, **options).fit(module, **data(count))
        metrics = {n: v for n, v in result.metrics.items() if not n.startswith(DRAWN)}
        seen = getattr(module, "seen", [])
        found[name] = (module.rates, seen, weights(module), metrics)
    return found


@pytest.fixture(scope="module")
def alone_and_together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    path = tmp_path_factory.mktemp("runs")
    return fitted(path / "one"), on_ranks(2, fitted, path / "two")


@pytest.mark.parametrize("name", MODULES)
def test_two_ranks_are_as_one(name: str, alone_and_together: tuple[Any, list[Any]]) -> None:
    alone, together = alone_and_together
    rates, seen, trained, metrics = alone[name]
    for rank in together:
        assert rank[name][0] == rates
        assert rank[name][1] == pytest.approx(seen, rel=1e-6)
        torch.testing.assert_close(rank[name][2], trained, rtol=1e-9, atol=1e-9)
    assert together[0][name][3] == pytest.approx(metrics, rel=1e-6)
    assert len(metrics) >= 2
    if "plateau" in name:
        assert 1 < len(set(rates)) < len(rates), (
            "the schedule must do something for this to say something"
        )


def test_a_run_that_resumes_in_mid_epoch_has_what_all_ranks_logged(tmp_path: Path) -> None:
    def fit(name: str, **options: Any) -> float:
        result = trainer(tmp_path / name, **options).fit(Classifier(), **data(1))
        return result.metrics.get("size", 0.0) if result is not None else 0.0

    def both() -> tuple[float, float]:
        whole = fit("whole", max_epochs=1)
        fit("cut", max_steps=2)
        return whole, fit("cut", max_epochs=1, resume="auto")

    whole, resumed = on_ranks(2, both)[0]
    assert whole == resumed == 15  # the sizes of the parts of all batches


class Gathers(Classifier):
    """Calls the collectives that a module has."""

    def __init__(self, where: str = "", what: str = "") -> None:
        super().__init__()
        self.where, self.what = where, what
        self.found: list[Any] = []

    def on_train_start(self) -> None:
        copy.deepcopy(self.trainer._task)  # as mode=verify does

    def on_validation_epoch_end(self) -> None:
        number = torch.tensor([self.global_rank, 1])
        strategy = self.trainer.strategy
        self.found = [
            self.all_gather({"a": number, "b": 2.0})["a"].tolist(),
            self.gradient().tolist(),
            strategy.reduce(number, reduce_op="sum").tolist(),
            strategy.reduce(number).tolist(),
            strategy.broadcast(self.global_rank),
        ]
        self.gather("end", torch.ones(2 + self.global_rank))

    @torch.enable_grad()
    def gradient(self) -> Tensor:
        own = torch.ones(2, requires_grad=True)
        (self.all_gather(own, sync_grads=True).sum() * (1 + self.global_rank)).backward()
        assert own.grad is not None
        return own.grad

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean.update(batch[0])
        self.gather("step", batch[0].mean())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.mean.update(batch[0])
        self.gather("training", batch[0].mean())
        return super().training_step(batch, batch_idx)

    def gather(self, where: str, own: Tensor) -> None:
        if where == self.where:
            {
                "gather": lambda: self.all_gather(own),
                "reduce": lambda: self.trainer.strategy.reduce(own),
                "barrier": lambda: self.trainer.strategy.barrier(),
                "compute": lambda: self.mean.compute(),
            }[self.what]()

    def configure_model(self) -> None:
        self.mean = MeanMetric()


WRONG = {
    ("end", "gather"): r"all_gather got tensors of different kinds.*\(2,\) of float32, \(3,\) of",
    ("end", "reduce"): r"reduce got tensors of different kinds.*CatMetric",
    ("step", "gather"): "self.all_gather in validation_step: the ranks have different numbers",
    ("step", "barrier"): "barrier in validation_step",
    ("step", "compute"): r"MeanMetric.compute\(\) in validation_step",
    ("training", "gather"): r"self.all_gather in training_step.*drop_last=True",
    ("training", "compute"): r"MeanMetric.compute\(\) in training_step",
}


def test_what_all_ranks_ask_of_each_other(tmp_path: Path) -> None:
    def fit() -> list[Any]:
        module = Gathers()
        trainer(tmp_path, max_epochs=1).fit(module, **data(9))
        for (where, what), message in WRONG.items():
            short = 14 if where == "training" else 15  # the last batch is rank 0's
            with pytest.raises(ValueError, match=message):
                trainer(tmp_path, max_epochs=1).fit(Gathers(where, what), **data(9, short))
        for count, limit in ((14, 3), (15, None)):
            for what in ("gather", "compute"):
                run = trainer(tmp_path, max_epochs=1, limit_train_batches=limit)
                run.fit(Gathers("training", what), **data(9, count))
        return module.found

    both = [[0, 1], [1, 1]]
    assert on_ranks(2, fit) == [[both, [3.0, 3.0], [1, 2], [0.5, 1.0], 0]] * 2


def test_a_hook_that_needs_a_sample_on_every_rank(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"on_validation_epoch_end failed on rank 1, .*no sample"):
        trainer(tmp_path, max_epochs=1, devices=2).fit(KeepsOutputs(), **data(1))
