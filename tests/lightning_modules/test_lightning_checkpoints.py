"""Checkpoints from Lightning to us and back, and a task of ours under Lightning's Trainer."""

import argparse
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from side_by_side import run_theirs, trainer
from support import Regression, adamw, assert_equal_bits, samples, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanAbsoluteError

from trainer import OptimizerSetup, as_lightning, load_weights
from trainer.convert import main


class Net(LightningModule):
    """Has hyperparameters of all kinds, a schedule, and something of its own in checkpoints."""

    def __init__(self, width: int = 4, rate: float = 0.1, extra: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1)).double()
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        x, y = batch
        return nn.functional.mse_loss(self.net(x).squeeze(1), y)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["calls"] = self.calls

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.calls = checkpoint["calls"]


def loader() -> DataLoader[Any]:
    return DataLoader(samples(12), batch_size=4)


def test_ours_goes_on_under_lightning_as_if_it_had_always_been_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(1)
    module = Net(width=5)
    twin = copy.deepcopy(module)
    result = trainer(tmp_path / "run", max_epochs=2).fit(module, train_dataloaders=loader())
    out = tmp_path / "ours.ckpt"
    main([str(result.run_dir), str(out)])
    assert "step 6, epoch 2" in capsys.readouterr().out

    loaded = Net.load_from_checkpoint(out, weights_only=True)
    assert loaded.hparams.width == 5
    assert loaded.calls == 6
    assert_equal_bits(loaded, module)

    fresh = Net(width=5)
    theirs = run_theirs("fit", fresh, max_epochs=4, train_dataloaders=loader(), ckpt_path=out)
    assert (theirs.current_epoch, theirs.global_step) == (4, 12)
    run_theirs("fit", twin, max_epochs=4, train_dataloaders=loader())
    assert_equal_bits(fresh, twin)
    assert fresh.calls == 12
    with pytest.raises(SystemExit, match="there already"):
        main([str(result.run_dir), str(out)])


def test_hyperparameters_that_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = Net(extra=argparse.Namespace(path="x"))
    result = trainer(tmp_path / "run", max_steps=1).fit(module, train_dataloaders=loader())
    assert capsys.readouterr().out.count("hyperparameters extra: only plain values") == 1
    main([str(result.run_dir), str(tmp_path / "ours.ckpt")])
    assert "note: it has no hyperparameters extra, " in capsys.readouterr().out


def test_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = trainer(tmp_path / "run", max_steps=1).fit(Net(), train_dataloaders=loader())
    with pytest.raises(SystemExit, match=r"error: there is no folder .*nowhere"):
        main([str(result.run_dir), str(tmp_path / "nowhere" / "ours.ckpt")])

    def half(converted: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(SystemExit, match="error: no space left"):
        main([str(result.run_dir), str(tmp_path / "ours.ckpt")])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


class Slim(Net):
    """Would leave weights out of its checkpoints, as far as that goes."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        del checkpoint["state_dict"]["net.0.bias"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        checkpoint["epoch"] = 7


def test_changes_of_a_checkpoint_that_have_no_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(tmp_path, max_epochs=2).fit(Slim(), train_dataloaders=loader())
    note = "Slim.on_save_checkpoint changed state_dict of the checkpoint, which has no effect"
    assert capsys.readouterr().out.count(note) == 1
    module = Slim()
    trainer(tmp_path, max_epochs=3, resume="auto").fit(module, train_dataloaders=loader())
    assert "Slim.on_load_checkpoint changed epoch of" in capsys.readouterr().out
    assert module.calls == 9
    trainer(tmp_path / "other", max_epochs=1).fit(Net(), train_dataloaders=loader())
    assert "changed" not in capsys.readouterr().out


def test_what_a_module_cannot_save(tmp_path: Path) -> None:
    class Saves(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["x"] = [{"y": argparse.Namespace(a=1)}]

    message = r"Saves.on_save_checkpoint set checkpoint\['x'\], .* argparse.Namespace"
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, max_epochs=1).fit(Saves(), train_dataloaders=loader())


def test_the_middle_of_an_epoch(tmp_path: Path) -> None:
    result = trainer(tmp_path / "run", max_steps=2).fit(Net(), train_dataloaders=loader())
    out = tmp_path / "ours.ckpt"
    main([str(result.last_checkpoint), str(out)])
    fresh = Net()
    theirs = run_theirs("fit", fresh, max_epochs=1, train_dataloaders=loader(), ckpt_path=out)
    assert theirs.global_step == 3


def test_a_resumed_run_has_what_the_module_saves(tmp_path: Path) -> None:
    trainer(tmp_path, max_epochs=1).fit(Net(), train_dataloaders=loader())
    module = Net()
    trainer(tmp_path, max_epochs=2, resume="auto").fit(module, train_dataloaders=loader())
    assert module.calls == 6


def test_a_checkpoint_of_lightning_starts_a_run(tmp_path: Path) -> None:
    torch.manual_seed(1)
    theirs = Net(extra=argparse.Namespace(path=Path("x")))  # what torch would not load
    fit = run_theirs("fit", theirs, max_epochs=1, train_dataloaders=loader())
    path = tmp_path / "theirs.ckpt"
    fit.save_checkpoint(path)
    with pytest.raises(Exception, match="Namespace"):
        torch.load(path, weights_only=True)

    assert not any(load_weights(Net(), path))
    module = Net()
    options: dict[str, Any] = {"max_steps": 1, "limit_train_batches": 1}
    run = trainer(tmp_path / "run", init_from=str(path), **options)
    seen: list[dict[str, Tensor]] = []
    module.on_train_start = lambda: seen.append(weights(module))  # type: ignore[method-assign]
    run.fit(module, train_dataloaders=loader())
    assert_equal_bits(seen[0], weights(theirs))


def test_a_run_does_not_go_on_from_one(tmp_path: Path) -> None:
    (tmp_path / "theirs.ckpt").touch()
    run = trainer(tmp_path / "run", max_epochs=1, resume=str(tmp_path / "theirs.ckpt"))
    with pytest.raises(ValueError, match=r"start a new run from them with init_from=.*theirs.ckpt"):
        run.fit(Net(), train_dataloaders=loader())


@pytest.mark.parametrize("content", [b"no zip", None, {"weights": 1}])
def test_what_is_no_checkpoint_of_lightning(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "other.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ValueError, match=r"other.ckpt"):
        load_weights(Net(), path)


def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    torch.save(
        {"state_dict": Net().state_dict(), "hyper_parameters": _Trap(trap)}, tmp_path / "t.ckpt"
    )
    load_weights(Net(), tmp_path / "t.ckpt")
    assert not trap.exists()


class _Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return _execute, (self.path,)


def _execute(path: Path) -> None:
    path.touch()


class Scheduled(Regression):
    """Logs, and has a schedule and hooks."""

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        self.log("magnitude", outputs.abs().mean())
        return super().loss(outputs, batch)

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self.parameters())
        return OptimizerSetup(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2))

    def on_epoch_start(self) -> None:
        self.epochs = [*getattr(self, "epochs", []), (self.run.step, self.run.epoch)]

    def build_metrics(self, split: str) -> dict[str, Any]:
        return {"error": MeanAbsoluteError()}

    def update_metrics(self, metrics: Any, outputs: Tensor, batch: Any) -> None:
        metrics["error"].update(outputs, batch[1])


def test_a_task_under_lightning(tmp_path: Path) -> None:
    ours, theirs = Scheduled(), Scheduled()
    data = DataLoader(samples(10), batch_size=4)
    result = trainer(tmp_path / "run", max_epochs=2).fit(ours, train=data, val=data)
    module = as_lightning(theirs)
    fit = run_theirs("fit", module, max_epochs=2, train_dataloaders=data, val_dataloaders=data)
    assert_equal_bits(ours, theirs)
    for name in ("val/loss", "val/magnitude", "val/error", "train/error"):
        assert float(fit.callback_metrics[name]) == pytest.approx(result.metrics[name])
    assert theirs.epochs == ours.epochs == [(0, 0), (3, 1)]
    predicted = run_theirs("predict", module, dataloaders=data).results
    assert torch.equal(torch.cat(predicted), trainer(tmp_path).predict(ours, predict=data))

    fit.save_checkpoint(tmp_path / "theirs.ckpt")
    fresh = Scheduled()
    load_weights(fresh, tmp_path / "theirs.ckpt")  # plain names
    assert_equal_bits(fresh, ours)


class Clocked(Regression):
    """Notes where the run is, in each of its methods."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def note(self, method: str) -> None:
        run = self.run
        self.seen.append((method, run.step, run.epoch, run.step_in_epoch, run.samples))

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        self.note(f"loss of {self.run.split}")
        return super().loss(outputs, batch)

    def on_epoch_start(self) -> None:
        self.note(f"on_epoch_start, {self.run.steps_per_epoch} steps")

    def before_optimizer_step(self) -> None:
        self.note("before_optimizer_step")

    def after_optimizer_step(self) -> None:
        self.note("after_optimizer_step")

    def on_validation_end(self, metrics: Any) -> None:
        self.note("on_validation_end")

    def on_epoch_end(self) -> dict[str, float]:
        self.note("on_epoch_end")
        return {"own": 1.0}

    def on_fit_end(self) -> dict[str, float]:
        return {"final": 3.0}


def test_what_a_task_knows_of_the_run_under_lightning(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    ours, theirs, accumulating = Clocked(), Clocked(), Clocked()
    data = DataLoader(samples(10), batch_size=4)
    trainer(tmp_path / "run", max_epochs=2).fit(ours, train=data, val=data)
    run_theirs(
        "fit",
        as_lightning(theirs),
        max_epochs=2,
        train_dataloaders=data,
        val_dataloaders=data,
        logger=CSVLogger(tmp_path),
    )
    assert theirs.seen == ours.seen
    assert "final" in next(tmp_path.rglob("metrics.csv")).read_text()

    run_theirs(
        "fit",
        as_lightning(accumulating),
        max_epochs=1,
        train_dataloaders=data,
        accumulate_grad_batches=2,
    )
    found = [method for method, *_ in accumulating.seen]
    assert found.count("before_optimizer_step") == found.count("after_optimizer_step") == 2
    assert accumulating.seen[-1] == ("on_epoch_end", 2, 1, 0, 10)
    assert "on_epoch_start, 2 steps" in found


def test_a_resumed_run_of_lightning_knows_where_it_is(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import LambdaCallback

    def save(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(path)

    path, data = tmp_path / "cut.ckpt", DataLoader(samples(12), batch_size=4)
    options: dict[str, Any] = {"max_epochs": 1, "train_dataloaders": data}
    saving = [LambdaCallback(on_train_batch_end=save)]
    run_theirs("fit", as_lightning(Clocked()), callbacks=saving, **options)
    task = Clocked()
    run_theirs("fit", as_lightning(task), ckpt_path=path, **options)
    assert ("loss of train", 2, 0, 2, 8) in task.seen
    assert task.seen[-1] == ("on_epoch_end", 3, 1, 0, 12)


def test_a_task_goes_on_under_lightning_from_its_own_checkpoint(tmp_path: Path) -> None:
    data = DataLoader(samples(12), batch_size=4)
    result = trainer(tmp_path / "run", max_epochs=1).fit(Regression(), train=data)
    main([str(result.run_dir), str(tmp_path / "ours.ckpt")])
    task = Clocked()
    options: dict[str, Any] = {"max_epochs": 2, "train_dataloaders": data}
    run_theirs("fit", as_lightning(task), ckpt_path=tmp_path / "ours.ckpt", **options)
    assert ("loss of train", 3, 1, 0, 12) in task.seen
    assert task.seen[-1] == ("on_epoch_end", 6, 2, 0, 24)


@pytest.mark.parametrize("name", ["global_loss", "optimizes_itself"])
def test_a_task_that_lightning_cannot_train(name: str) -> None:
    task = type("Other", (Regression,), {name: True})()
    with pytest.raises(ValueError, match=f"Other has {name}=True"):
        as_lightning(task)
