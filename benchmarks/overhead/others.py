"""The same with other trainers, each as its documentation shows it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from benchmarks.overhead.by_hand import evaluate_net, predict_with
from benchmarks.overhead.work import Work, world_size

NO_EXTRAS: dict[str, Any] = {
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "logger": False,
}


def lightning(work: Work, folder: Path, **options: Any) -> None:
    """Lightning as it comes: progress bar, logger, checkpoints."""
    trainer = _lightning(
        folder,
        max_steps=work.total_steps,
        accumulate_grad_batches=work.accumulation,
        **options,
    )
    trainer.fit(_module(work), work.loader())


def lightning_evaluate(work: Work, folder: Path, **options: Any) -> None:
    """Lightning's validation as it comes."""
    trainer = _lightning(folder, **options)
    trainer.validate(_module(work), work.loader(shuffle=False), verbose=False)


def lightning_predict(work: Work, folder: Path, **options: Any) -> None:
    """Lightning's prediction as it comes."""
    _lightning(folder, **options).predict(_module(work), work.loader(shuffle=False))


def _lightning(folder: Path, **options: Any) -> Any:
    from lightning.pytorch import Trainer

    return Trainer(
        accelerator="cpu",
        devices=world_size(),
        strategy="ddp" if world_size() > 1 else "auto",
        default_root_dir=folder,
        **options,
    )


def _module(work: Work) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.optimizer = work.start()
            self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

        def training_step(self, batch: Any, index: int) -> Tensor:
            return work.loss(self.net(batch), batch)

        def validation_step(self, batch: Any, index: int) -> None:
            outputs = self.net(batch)
            self.log("val/loss", work.loss(outputs, batch))
            self.accuracy(outputs, batch[1])
            self.log("val/accuracy", self.accuracy)

        def predict_step(self, batch: Any, index: int) -> Tensor:
            outputs: Tensor = self.net(batch)
            return outputs

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.optimizer

    return Module()


def fabric(work: Work, folder: Path) -> None:
    """Lightning Fabric in a hand-written loop."""
    tool = _fabric()
    net, optimizer = tool.setup(*work.start())
    for batch in itertools.islice(tool.setup_dataloaders(work.loader()), work.total_steps):
        optimizer.zero_grad()
        tool.backward(work.loss(net(batch), batch))
        optimizer.step()


def fabric_evaluate(work: Work, folder: Path) -> None:
    """Lightning Fabric in a hand-written evaluation."""
    tool = _fabric()
    loader = tool.setup_dataloaders(work.loader(shuffle=False))
    evaluate_net(tool.setup_module(work.net()), loader, work)


def fabric_predict(work: Work, folder: Path) -> None:
    """Lightning Fabric in a hand-written prediction."""
    tool = _fabric()
    loader = tool.setup_dataloaders(work.loader(shuffle=False))
    predict_with(tool.setup_module(work.net()), loader)


def _fabric() -> Any:
    from lightning.fabric import Fabric

    tool = Fabric(
        accelerator="cpu", devices=world_size(), strategy="ddp" if world_size() > 1 else "auto"
    )
    tool.launch()
    return tool


def accelerate(work: Work, folder: Path) -> None:
    """Accelerate in a hand-written loop."""
    from accelerate import Accelerator  # type: ignore[import-not-found]

    tool = Accelerator(cpu=True)
    net, optimizer, loader = tool.prepare(*work.start(), work.loader(shared=True))
    for batch in itertools.islice(loader, work.total_steps):
        optimizer.zero_grad()
        tool.backward(work.loss(net(batch), batch))
        optimizer.step()


def accelerate_evaluate(work: Work, folder: Path) -> None:
    """Accelerate in a hand-written evaluation."""
    from accelerate import Accelerator

    net, loader = Accelerator(cpu=True).prepare(work.net(), work.loader(shuffle=False))
    evaluate_net(net, loader, work)


def accelerate_predict(work: Work, folder: Path) -> None:
    """Accelerate in a hand-written prediction."""
    from accelerate import Accelerator

    net, loader = Accelerator(cpu=True).prepare(work.net(), work.loader(shuffle=False))
    predict_with(net, loader)


def ignite(work: Work, folder: Path) -> None:
    """Ignite's Engine around a hand-written step."""
    from ignite.engine import Engine  # type: ignore[import-not-found]

    net, optimizer = work.start()

    def step(engine: Any, batch: Any) -> None:
        optimizer.zero_grad()
        work.loss(net(batch), batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    Engine(step).run(work.loader(), max_epochs=1, epoch_length=work.total_steps)


def ignite_evaluate(work: Work, folder: Path) -> None:
    """Ignite's Engine around a hand-written evaluation step, with Ignite's metrics."""
    from ignite.engine import Engine
    from ignite.metrics import Accuracy, Loss  # type: ignore[import-not-found]

    net = work.net().eval()

    def step(engine: Any, batch: Any) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            return net(batch), batch[1]

    engine = Engine(step)
    Loss(torch.nn.functional.cross_entropy).attach(engine, "loss")
    Accuracy().attach(engine, "accuracy")
    engine.run(work.loader(shuffle=False))
