"""Lightning's own demo models train here as under Lightning, to the last bit."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.demos import boring_classes as boring
from lightning.pytorch.demos import lstm, mnist_datamodule, transformer
from side_by_side import assert_trains_alike
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Logging(boring.BoringModel):
    """Logs what it computes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        self.log("train_loss", outputs["loss"], on_step=True, on_epoch=True)
        return outputs

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().validation_step(batch, batch_idx)
        self.log("val_loss", outputs["x"])
        return outputs


def test_the_boring_model_with_its_datamodule(tmp_path: Path) -> None:
    data = {"datamodule": boring.BoringDataModule()}
    ours, theirs = assert_trains_alike(Logging(), data, tmp_path, max_epochs=2)
    assert ours.metrics["val_loss"] == pytest.approx(theirs.metrics["val_loss"], rel=1e-6)


def test_the_boring_model_with_its_own_loaders(tmp_path: Path) -> None:
    assert_trains_alike(boring.BoringModel(), {}, tmp_path, max_epochs=1)


def test_a_datamodule_without_length(tmp_path: Path) -> None:
    class Fixed(boring.BoringDataModuleNoLen):
        def setup(self, stage: str) -> None:
            super().setup(stage)
            for split in ("train", "val"):
                rows = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
                getattr(self, f"random_{split}").__class__ = _FixedStream
                getattr(self, f"random_{split}").rows = rows

    ours, _ = assert_trains_alike(
        boring.BoringModel(), {"datamodule": Fixed()}, tmp_path, max_epochs=2
    )
    assert len(ours.losses) == 12


class _FixedStream(boring.RandomIterableDataset):
    rows: Tensor

    def __iter__(self) -> Any:
        return iter(self.rows)


def test_several_validation_sets(tmp_path: Path) -> None:
    class Four(Logging):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
            self.log("val_loss", self.step(batch) * (dataloader_idx + 1))

    module = boring.IterableBoringDataModule()
    module.setup("fit")
    module.val_datasets[1] = module.train_datasets[0]  # the other one is drawn anew each time
    data = {
        "train_dataloaders": DataLoader(module.train_datasets[0]),
        "val_dataloaders": module.val_dataloader(),
    }
    ours, theirs = assert_trains_alike(Four(), data, tmp_path, max_epochs=1)
    for number in (0, 1):
        name = f"val_loss/dataloader_idx_{number}"
        assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-6)


def test_several_training_loaders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"list of loaders.*StackDataset"):
        assert_trains_alike(
            boring.BoringModel(),
            {"datamodule": boring.IterableBoringDataModule()},
            tmp_path,
            max_epochs=1,
        )


def test_the_demo_model(tmp_path: Path) -> None:
    data = {"train_dataloaders": DataLoader(boring.RandomDataset(32, 20), batch_size=8)}
    assert_trains_alike(boring.DemoModel(out_dim=3), data, tmp_path, max_epochs=2)


def test_the_manually_optimized_model(tmp_path: Path) -> None:
    data = {"datamodule": boring.BoringDataModule()}
    assert_trains_alike(boring.ManualOptimBoringModel(), data, tmp_path, max_epochs=1)


@pytest.fixture
def text(tmp_path: Path) -> transformer.WikiText2:
    words = "the quick brown fox jumps over the lazy dog and does it again"
    (tmp_path / "wikitext-2.txt").write_text(f"{words} \n" * 12)
    return transformer.WikiText2(tmp_path, block_size=5, download=False)


def test_the_transformer(tmp_path: Path, text: transformer.WikiText2) -> None:
    module = transformer.LightningTransformer(vocab_size=text.vocab_size)
    module.model = transformer.Transformer(text.vocab_size, ninp=8, nhid=8)
    module.prepare_data = lambda: None  # it would download
    data = {"train_dataloaders": DataLoader(text, batch_size=4)}
    assert_trains_alike(module, data, tmp_path / "run", max_epochs=1)


def test_the_lstm_which_carries_its_state_over(tmp_path: Path, text: transformer.WikiText2) -> None:
    module = lstm.LightningLSTM(vocab_size=text.vocab_size)
    module.model = lstm.SimpleLSTM(text.vocab_size, ninp=8, nhid=8, nlayers=2)
    module.prepare_data = lambda: None
    loader = DataLoader(text, batch_sampler=lstm.SequenceSampler(text, batch_size=4))
    ours, theirs = assert_trains_alike(
        module, {"train_dataloaders": loader}, tmp_path / "run", max_epochs=2
    )
    assert ours.module.hidden is theirs.module.hidden is None  # on_train_epoch_end forgets it
    assert "train_loss" in ours.metrics


class Classifier(LightningModule):
    """The demos' convolutional net, as in their MNIST examples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = boring.Net()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.nll_loss(self.net(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_acc", (self.net(x).argmax(dim=1) == y).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adadelta(self.net.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)]


def test_mnist_with_the_demo_datamodule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "MNIST" / "complete"
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for name, count in (("training", 12), ("test", 4)):
        images = torch.randint(256, (count, 28, 28), generator=generator, dtype=torch.uint8)
        torch.save((images, torch.arange(count) % 10), folder / f"{name}.pt")
    monkeypatch.setitem(os.environ, "PL_USE_MOCKED_MNIST", "1")
    data = mnist_datamodule.MNISTDataModule(
        str(tmp_path), val_split=4, num_workers=0, batch_size=4, normalize=True
    )
    # Theirs pins memory, of which torch warns, and shuffles.
    data.train_dataloader = lambda: DataLoader(data.dataset_train, batch_size=4)
    data.val_dataloader = lambda: DataLoader(data.dataset_val, batch_size=4)
    ours, theirs = assert_trains_alike(
        Classifier(), {"datamodule": data}, tmp_path / "run", max_epochs=2
    )
    assert ours.metrics["val_acc"] == pytest.approx(theirs.metrics["val_acc"])
