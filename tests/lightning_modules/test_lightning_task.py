"""A LightningModule under our Trainer: optimizers, logging, facts, and what is refused."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.demos.boring_classes import BoringDataModule
from side_by_side import assert_trains_alike, ours, run_theirs, trainer
from support import assert_equal_bits, on_ranks, weights
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)
from torch.utils.data import DataLoader, TensorDataset

from trainer import DataModule, Trainer
from trainer.lightning.optimizers import Optimization


def samples(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 3, generator=generator)
    return TensorDataset(x, x.sum(dim=1, keepdim=True).sin())


def loaders(count: int = 20, **options: Any) -> dict[str, Any]:
    return {
        "train_dataloaders": DataLoader(samples(count), batch_size=4, **options),
        "val_dataloaders": DataLoader(samples(6), batch_size=4),
    }


class Regression(LightningModule):
    def __init__(self, optimizers: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        self.make = optimizers
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        return optimizer if self.make is None else self.make(optimizer)


FORMS: dict[str, Callable[[Any], Any]] = {
    "two lists": lambda o: ([o], [StepLR(o, 1)]),
    "a list of two lists": lambda o: [[o], [{"scheduler": StepLR(o, 2), "interval": "step"}]],
    "a dict with a scheduler": lambda o: {"optimizer": o, "lr_scheduler": StepLR(o, 1)},
    "a list of a dict": lambda o: [{"optimizer": o, "lr_scheduler": StepLR(o, 1)}],
    "by step": lambda o: {
        "optimizer": o,
        "lr_scheduler": {"scheduler": OneCycleLR(o, 1.0, total_steps=15), "interval": "step"},
    },
    "every third step": lambda o: {
        "optimizer": o,
        "lr_scheduler": {"scheduler": StepLR(o, 1), "interval": "step", "frequency": 3},
    },
    "every second epoch": lambda o: {
        "optimizer": o,
        "lr_scheduler": {"scheduler": StepLR(o, 1), "frequency": 2},
    },
    "on a plateau": lambda o: {
        "optimizer": o,
        "lr_scheduler": ReduceLROnPlateau(o, patience=0, threshold=10.0),
        "monitor": "val_loss",
    },
    "a plateau of a dict": lambda o: (
        [o],
        [{"scheduler": ReduceLROnPlateau(o, patience=0, threshold=10.0), "monitor": "val_loss"}],
    ),
    "two schedulers": lambda o: (
        [o],
        [
            {"scheduler": LambdaLR(o, lambda step: 1 / (step + 1)), "interval": "step"},
            {"scheduler": ReduceLROnPlateau(o, patience=0, threshold=9.0), "monitor": "val_loss"},
        ],
    ),
}


@pytest.mark.parametrize(
    "make", [lambda o: o, lambda o: [o], lambda o: (o,), lambda o: {"optimizer": o}]
)
def test_every_form_of_an_optimizer_alone(make: Any) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    found = Optimization(None, make(optimizer))  # type: ignore[arg-type]
    assert (found.optimizers, found.schedulers) == ([optimizer], [])


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_optimizers_and_schedulers(form: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    left, right = assert_trains_alike(Regression(FORMS[form]), loaders(), tmp_path, max_epochs=3)
    assert left.module.rates == pytest.approx(right.module.rates)
    assert len(left.module.rates) == 15


def test_a_scheduler_that_the_module_steps_itself(tmp_path: Path) -> None:
    class Stepping(Regression):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step()
            scheduler.step()

    module = Stepping(FORMS["a dict with a scheduler"])
    left, right = assert_trains_alike(module, loaders(), tmp_path, max_epochs=2)
    assert left.module.rates == right.module.rates
    assert left.module.rates[-1] == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: None, "returned a NoneType; it must return an optimizer"),
        (lambda o: [o, o], r"2 optimizers.*automatic_optimization = False"),
        (lambda o: {"optimizer": o, "scheduler": 1}, "scheduler; the keys are optimizer"),
        (lambda o: ([o], [{"scheduler": StepLR(o, 1), "interval": "batch"}]), "'batch'"),
        (lambda o: ([o], [ReduceLROnPlateau(o)]), "without 'monitor'"),
        (lambda o: ([o], [{"interval": "step"}]), "without 'scheduler'"),
        (lambda o: {"monitor": "val_loss"}, "a dict without 'optimizer'"),
        (lambda o: {"optimizer": None}, "returned a NoneType in place of an optimizer"),
        (lambda o: [{"lr_scheduler": StepLR(o, 1)}], "a dict without 'optimizer'"),
        (
            lambda o: {"optimizer": o, "lr_scheduler": ReduceLROnPlateau(o), "monitor": "val_acc"},
            "follows 'val_acc'.*val_loss",
        ),
    ],
)
def test_forms_that_cannot_be(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        ours(Regression(make), loaders(), tmp_path, max_epochs=2)


class Gan(LightningModule):
    """A generator and a critic that are stepped by hand, each with a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Linear(2, 3)
        self.critic = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0]
        first, second = self.optimizers()
        noise = real.new_ones(len(real), 2)

        with first.toggle_model():
            loss = -self.critic(self.generator(noise)).mean()
            self.manual_backward(loss)
            self.clip_gradients(first, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            first.step()
            first.zero_grad()

        self.toggle_optimizer(second)
        fake = self.generator(noise).detach()
        loss = self.critic(fake).mean() - self.critic(real).mean()
        self.log("critic_loss", loss)
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.untoggle_optimizer(second)
        if batch_idx % 2:
            for scheduler in self.lr_schedulers():
                scheduler.step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.generator.parameters(), lr=0.01)
        second = torch.optim.SGD(self.critic.parameters(), lr=0.01)
        return [first, second], [StepLR(first, 2), StepLR(second, 1, gamma=0.5)]


def test_several_optimizers_by_hand(tmp_path: Path) -> None:
    torch.manual_seed(2)
    module = Gan()
    twin = copy.deepcopy(module)
    result = trainer(tmp_path, max_epochs=2).fit(
        module, train_dataloaders=DataLoader(samples(12), batch_size=4)
    )
    run_theirs("fit", twin, train_dataloaders=DataLoader(samples(12), batch_size=4), max_epochs=2)
    assert_equal_bits(module, twin)
    assert "critic_loss" in result.metrics

    assert all(p.requires_grad for p in module.parameters())


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    """A batch of the loader is a global batch, also where the module optimizes itself."""
    generator = torch.Generator().manual_seed(6)

    def modules() -> list[LightningModule]:
        made: list[LightningModule] = [Regression(FORMS["by step"]).double(), Gan().double()]
        for module in made:
            for parameter in module.parameters():
                with torch.no_grad():
                    parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
        return made

    x, y = samples(20).tensors
    exact = TensorDataset(x.double(), y.double())
    data = {"train_dataloaders": DataLoader(exact, batch_size=4, drop_last=True)}
    alone = modules()
    for number, module in enumerate(alone):
        trainer(tmp_path / f"{number}", max_epochs=2).fit(module, **data)
    generator.manual_seed(6)

    def fit() -> Any:
        found = []
        for number, module in enumerate(modules()):
            run = trainer(tmp_path / f"two-{number}", max_epochs=2, devices=2)
            result = run.fit(module, **data)
            found.append((weights(module), None if result is None else result.metrics))
        return found

    first, second = on_ranks(2, fit)
    for module, (mine, metrics), (other, _) in zip(alone, first, second, strict=True):
        assert_equal_bits(mine, other)
        torch.testing.assert_close(mine, weights(module), rtol=1e-9, atol=1e-9)
        assert metrics is not None


def test_gradients_that_would_differ_on_the_ranks(tmp_path: Path) -> None:
    class Plain(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.critic(batch[0]).mean().backward()

    def fit() -> str:
        with pytest.raises(ValueError, match="manual_backward") as error:
            trainer(tmp_path, max_epochs=1, devices=2).fit(Plain(), **loaders(drop_last=True))
        return str(error.value)

    assert on_ranks(2, fit)
    trainer(tmp_path, max_epochs=1).fit(Plain(), **loaders())  # alone it makes no difference


class Logs(Regression):
    """Logs with every argument."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("by_step", loss, prog_bar=True, logger=True)
        self.log("by_epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("both", loss, on_step=True, on_epoch=True, batch_size=batch_idx + 1)
        for how in ("sum", "max", "min", torch.mean):
            name = getattr(how, "__name__", how)
            self.log(f"train_{name}", loss, on_step=False, on_epoch=True, reduce_fx=how)
        self.log_dict({"one": 1, "two": torch.tensor([2.0])}, on_epoch=True)
        return {"loss": loss, "size": len(batch[0])}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert set(outputs) == {"loss", "size"}
        assert not outputs["loss"].requires_grad
        self.log("steps_done", float(self.global_step), on_step=False, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        seen = {"by_epoch", "both_epoch", "train_sum", "val_loss"} & set(
            self.trainer.callback_metrics
        )
        self.log("seen", float(len(seen)))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        loss = batch[1].sum()
        self.log("val_sum", loss, reduce_fx="sum")
        self.log("val_max", loss, reduce_fx=max)
        self.log("val_sized", loss, batch_size=batch_idx + 1)

    def on_validation_epoch_end(self) -> None:
        self.log("val_twice", 2 * self.trainer.callback_metrics["val_loss"])


def test_what_is_logged_is_what_lightning_logs(tmp_path: Path) -> None:
    left, right = assert_trains_alike(Logs(), loaders(18), tmp_path, max_epochs=2)
    by_step = {"by_step", "both", "both_step", "one_step", "two_step", "one", "two"}
    for name in right.metrics.keys() - by_step:
        assert left.metrics[name] == pytest.approx(right.metrics[name], rel=1e-5), name
    mean = sum(map(float, left.losses[5:])) / 5  # of the last epoch, with one log event
    assert left.metrics["by_step"] == pytest.approx(mean, rel=0.2)
    assert {"both_step", "one_step", "train/loss"} <= left.metrics.keys()
    assert left.metrics["seen"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"value": "text"}, "got a str"),
        ({"value": torch.ones(2)}, r"shape \(2,\)"),
        ({"value": 1.0, "reduce_fx": "median"}, "reduce_fx=median"),
        ({"value": 1.0, "enable_graph": True}, "enable_graph"),
        ({"value": 1.0, "on_step": False}, "logs nothing"),
        ({"name": 3, "value": 1.0}, r"self.log\(3, ...\): the name must be a string"),
    ],
)
def test_what_cannot_be_logged(tmp_path: Path, arguments: Any, message: str) -> None:
    class Wrong(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log(**{"name": "x", **arguments})
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match=message):
        ours(Wrong(), loaders(), tmp_path, max_epochs=1)


def test_logging_where_there_is_nothing_to_log(tmp_path: Path) -> None:
    class Early(Regression):
        def on_fit_start(self) -> None:
            self.log("x", 1.0)

    with pytest.raises(ValueError, match="in on_fit_start, where nothing can be logged"):
        ours(Early(), loaders(), tmp_path, max_epochs=1)


class Facts(Regression):
    """Reads what there is to know of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[str, Any] = {}

    def note(self, when: str, *names: str) -> None:
        for name in names:
            self.known[f"{when}.{name}"] = getattr(self.trainer, name)

    def setup(self, stage: str) -> None:
        assert stage == "fit"
        self.note("setup", "world_size", "global_rank", "is_global_zero", "datamodule")

    def configure_optimizers(self) -> Any:
        self.note("configure", "estimated_stepping_batches", "num_training_batches", "max_epochs")
        self.note("configure", "max_steps", "accumulate_grad_batches", "precision")
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        self.print("a line of the module")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note(f"step{self.global_step}", "current_epoch", "global_step", "training")
        self.note(f"step{self.global_step}", "validating", "sanity_checking", "is_last_batch")
        assert self.device == batch[0].device == torch.device("cpu")
        assert (self.current_epoch, self.global_rank, self.local_rank) == (
            self.trainer.current_epoch,
            0,
            0,
        )
        assert torch.equal(self.all_gather(torch.ones(2)), torch.ones(2))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note(f"val{self.global_step}", "validating", "sanity_checking", "current_epoch")
        super().validation_step(batch, batch_idx)


def test_the_facts_that_a_module_reads(tmp_path: Path) -> None:
    left, right = Facts(), Facts()
    options: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 1}
    trainer(tmp_path, **options).fit(left, **loaders(8))
    run_theirs("fit", right, **loaders(8), **options)
    assert left.known == right.known
    assert len(left.known) > 40
    with pytest.raises(RuntimeError, match="not attached"):
        _ = left.trainer


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("self.trainer.callbacks", r"self.trainer.callbacks is not known here.*global_step"),
        ("self.trainer.fit_loop.epoch_loop", "fit_loop is not known"),
        ("self.trainer.estimated_stepping_batches", "configure_optimizers or later"),
        ("setattr(self.trainer, 'should_stop', True)", "EarlyStopping"),
        ("self.trainer.default_root_dir", "configure_optimizers or later"),
    ],
)
def test_facts_that_are_not_there(tmp_path: Path, statement: str, message: str) -> None:
    class Asking(Regression):
        def setup(self, stage: str) -> None:
            exec(statement)

    with pytest.raises(ValueError, match=message):
        ours(Asking(), loaders(), tmp_path, max_epochs=1)


@pytest.mark.parametrize("hook", [None, "on_after_backward", "on_train_batch_end"])
def test_only_a_module_with_hooks_acts_in_an_update(tmp_path: Path, hook: str | None) -> None:
    class Asking(Regression):
        def on_train_start(self) -> None:
            self.acts = self.trainer._task._acts_in_update

    kind = Asking if hook is None else type("Hooked", (Asking,), {hook: lambda self, *args: None})
    module = kind()
    trainer(tmp_path, max_steps=1).fit(module, **loaders())
    assert module.acts == (hook is not None)


def test_the_folder_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Writing(Regression):
        def on_train_start(self) -> None:
            self.folders = {self.trainer.default_root_dir, self.trainer.log_dir}

    monkeypatch.chdir(tmp_path)
    module = Writing()
    run = Trainer(max_steps=1, callbacks=False, logger=False, accelerator="cpu")
    result = run.fit(module, **loaders())
    assert module.folders == {str(result.run_dir)}
    assert result.run_dir != tmp_path


def test_test_validate_and_predict(tmp_path: Path) -> None:
    class Evaluated(Logs):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_index", float(batch_idx))

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0])

    module = Evaluated()
    loader = loaders()["val_dataloaders"]
    for what in ("validate", "test"):
        found = getattr(trainer(tmp_path), what)(module, dataloaders=loader)
        (expected,) = run_theirs(what, module, dataloaders=loader).results
        assert found == pytest.approx(expected, rel=1e-5)
    predicted = trainer(tmp_path).predict(module, dataloaders=loader)
    assert torch.equal(
        predicted, torch.cat(run_theirs("predict", module, dataloaders=loader).results)
    )


class Counted(LightningDataModule):
    """Keeps something of its own in checkpoints, and notes what happens to it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.epochs = 0

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")

    def on_exception(self, exception: BaseException) -> None:
        self.calls.append(type(exception).__name__)

    def train_dataloader(self) -> Any:
        return DataLoader(samples(8), batch_size=4)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.epochs += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


def test_a_datamodule_and_its_state(tmp_path: Path) -> None:
    first, second = Counted(), Counted()
    trainer(tmp_path, max_epochs=1).fit(Regression(), datamodule=first)
    trainer(tmp_path, max_epochs=2, resume="auto").fit(Regression(), second)
    assert (first.epochs, second.epochs) == (2, 4)
    assert first.calls == ["prepare_data", "setup fit", "teardown fit"]
    with pytest.raises(ValueError, match="returned a NoneType"):
        trainer(tmp_path / "2", max_epochs=1).fit(Regression(lambda _: None), first)
    assert first.calls[3:] == ["prepare_data", "setup fit", "ValueError"]


def test_a_task_of_ours_with_a_datamodule_of_lightning(tmp_path: Path) -> None:
    from support import Regression as Task

    class Doubles(Counted):
        def train_dataloader(self) -> Any:
            from support import samples

            return DataLoader(samples(8), batch_size=4)

    data = Doubles()
    result = trainer(tmp_path, max_epochs=1).fit(Task(), datamodule=data)
    assert result.step == 2
    assert data.calls == ["prepare_data", "setup fit", "teardown fit"]


def test_a_module_of_the_other_package(tmp_path: Path) -> None:
    from pytorch_lightning.demos.boring_classes import BoringDataModule, BoringModel

    result = trainer(tmp_path, max_epochs=1).fit(BoringModel(), datamodule=BoringDataModule())
    assert result.step == 64


def test_from_a_config(tmp_path: Path) -> None:
    from trainer import load_task, run

    here = "lightning.pytorch.demos.boring_classes"
    config = {
        "task": {"_target_": f"{here}.DemoModel", "out_dim": 2},
        "data": {"_target_": f"{here}.BoringDataModule"},
        "trainer": {"max_epochs": 1, "accelerator": "cpu", "run_dir": str(tmp_path)},
        "callbacks": {},
        "logger": {},
    }
    result = run(config)
    task = load_task(result.last_checkpoint)
    assert task.l1.out_features == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("optimizer_step", "interval 'step'"),
        ("optimizer_zero_grad", "leave it out"),
        ("backward", "automatic_optimization = False"),
        ("configure_callbacks", "EarlyStopping"),
        ("on_validation_model_eval", "eval mode"),
        ("validation_epoch_end", "on_validation_epoch_end"),
        ("log", "another name"),
    ],
)
def test_hooks_that_are_not_called(tmp_path: Path, name: str, message: str) -> None:
    module = type("Mine", (Regression,), {name: lambda self, *args: None})()
    with pytest.raises(ValueError, match=f"Mine defines {name}, .*{message}"):
        ours(module, loaders(), tmp_path, max_epochs=1)


class Undecided(Regression):
    def on_fit_start(self) -> None:
        self.automatic_optimization = False


def test_the_kind_of_optimization_stays(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="automatic_optimization of Undecided has changed"):
        trainer(tmp_path, max_epochs=1).fit(Undecided(), **loaders())


def test_what_is_missing_or_given_twice(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_epochs=1)
    with pytest.raises(ValueError, match="defines no training_step, which fit needs"):
        run.fit(LightningModule())
    with pytest.raises(ValueError, match="there is no training data"):
        run.fit(Regression())
    with pytest.raises(ValueError, match="given twice"):
        run.fit(Regression(), BoringDataModule(), datamodule=BoringDataModule())
    with pytest.raises(ValueError, match="given twice"):
        run.fit(Regression(), BoringDataModule(), **loaders())
    with pytest.raises(ValueError, match="train_dataloaders= and train="):
        run.fit(Regression(), train=samples(4), **loaders())
    with pytest.raises(ValueError, match="init_from"):
        run.fit(Regression(), ckpt_path="last", **loaders())
    with pytest.raises(TypeError, match=r"'train_loader'.*train_dataloaders"):
        run.fit(Regression(), train_loader=samples(4))
    module = Regression()
    module.configure_gradient_clipping = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="would clip twice"):
        trainer(tmp_path, max_epochs=1, gradient_clip_norm=1.0).fit(module, **loaders())
    with pytest.raises(ValueError, match=r"precision='fp16' with Gan, which optimizes itself"):
        trainer(tmp_path, max_epochs=1, precision="fp16").fit(Gan(), **loaders())


def test_loaders_by_position(tmp_path: Path) -> None:
    class Own(Regression):
        def val_dataloader(self) -> Any:
            return val

    run = trainer(tmp_path, max_epochs=1)
    train, val = loaders().values()
    assert "val_loss" in run.fit(Own(), train).metrics  # what is not given may be the module's
    assert "val_loss" in run.fit(Regression(), train, val).metrics
    assert "val_loss" in run.validate(Regression(), val)
    with pytest.raises(ValueError, match="by position and as train="):
        run.fit(Regression(), train, train=train)


def test_a_datamodule_of_ours(tmp_path: Path) -> None:
    class Data(DataModule):
        def train_dataset(self) -> Any:
            return samples(8)

    result = trainer(tmp_path, max_epochs=1, global_batch_size=4).fit(Regression(), Data())
    assert result.step == 2


def test_the_loggers_that_a_module_finds(tmp_path: Path) -> None:
    from trainer.loggers.tensorboard import TensorBoardLogger

    class Drawing(Regression):
        def on_train_epoch_end(self) -> None:
            self.logger.experiment.add_text("note", "text", self.global_step)

    def fit(logger: Any) -> None:
        run = trainer(tmp_path, max_epochs=1, devices=2, logger=logger)
        run.fit(Drawing(), **loaders())

    on_ranks(2, fit, {"tensorboard": TensorBoardLogger()})
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"note/text_summary" in file.read_bytes()


@pytest.mark.parametrize("make", [Gan, lambda: Logs(), lambda: Regression(FORMS["two schedulers"])])
def test_a_run_that_resumes_in_mid_epoch(tmp_path: Path, make: Any) -> None:
    def fit(module: Any, name: str, **options: Any) -> Any:
        return trainer(tmp_path / name, max_epochs=2, **options).fit(module, **loaders())

    torch.manual_seed(4)
    whole, module = make(), make()
    module.load_state_dict(whole.state_dict())
    result = fit(whole, "whole")
    fit(module, "cut", max_steps=7)
    fresh = make()
    resumed = fit(fresh, "cut", resume="auto")
    assert_equal_bits(fresh, whole)
    # What is not the mean since the last log event, for the one that was cut has one more.
    compared = [n for n in result.metrics if n.startswith("val") or n.endswith("epoch")]
    compared += [n for n in result.metrics if n.startswith("train_")]
    assert [resumed.metrics[n] for n in compared] == [result.metrics[n] for n in compared]


def test_what_the_progress_line_tells(tmp_path: Path) -> None:
    from trainer.callbacks.progress import ProgressBar

    lines: list[str] = []

    class Telling(ProgressBar):
        def on_fit_end(self, run: Any) -> None:
            lines.append(self._line())
            super().on_fit_end(run)

    run = trainer(tmp_path, max_epochs=1, callbacks={"progress": Telling()})
    run.fit(Logs(), **loaders())
    assert "by_step 0." in lines[0]


def test_the_module_in_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "lightning.md"
    program = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)[0]
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(program, found)
    assert {"train_loss_step", "train_loss_epoch", "val_loss"} <= found["result"].metrics.keys()


class Worse(Regression):
    """Logs a value of validation that rises from epoch to epoch."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log(self.name, float(self.current_epoch))


@pytest.mark.parametrize(
    ("name", "best", "note"),
    [
        ("val_loss", "step-00000005", ""),
        (
            "val_error",
            "step-00000010",
            "note: no val/loss was measured, so the last checkpoint is the best; "
            "checkpoint.monitor=<name> chooses by val_error\n",
        ),
    ],
)
def test_the_best_checkpoint_is_that_of_val_loss(
    name: str, best: str, note: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = trainer(tmp_path, max_epochs=2).fit(Worse(name), **loaders())
    assert result.best_checkpoint.name == best
    told = capsys.readouterr().out
    assert note in told
    assert ("note: no val/loss" in told) == bool(note)
