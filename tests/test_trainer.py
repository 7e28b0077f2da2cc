"""The loop in one process: its order, its clock, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    Regression,
    adamw,
    assert_equal_bits,
    assert_same,
    fit,
    measured,
    samples,
    sgd,
    train_by_hand,
    weights,
)
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import TensorDataset

from trainer import Callback, OptimizerSetup, Trainer
from trainer.callbacks import LearningRate
from trainer.trainer import Training


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_one_process_trains_like_a_plain_loop_to_the_last_bit(
    optimizer: Any, dtype: torch.dtype, clip: float | None, tmp_path: Path
) -> None:
    found, expected = Regression(optimizer).to(dtype), Regression(optimizer).to(dtype)
    data = samples(23, dtype)
    train_by_hand(expected, data, global_batch_size=5, epochs=3, clip=clip)
    options = {"global_batch_size": 5, "max_epochs": 3, "gradient_clip_norm": clip}
    fit(found, tmp_path, train=data, **options)
    assert_equal_bits(found, expected)


class Told(Regression):
    """Writes down when it is called."""

    def __init__(self, told: list[str]) -> None:
        super().__init__()
        self.told = told

    def note(self, name: str) -> None:
        if self.run.split == "train":
            self.told.append(name)

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self.parameters())
        optimizer.register_step_pre_hook(lambda *_: self.note("optimizer.step"))
        return optimizer

    def forward(self, batch: Any) -> Tensor:
        self.note("forward")
        return super().forward(batch)

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        self.note("loss")
        return super().loss(outputs, batch)

    def on_fit_start(self) -> None:
        self.note("TaskModule.on_fit_start")

    def on_epoch_start(self) -> None:
        self.note("TaskModule.on_epoch_start")

    def before_optimizer_step(self) -> None:
        self.note("TaskModule.before_optimizer_step")

    def after_optimizer_step(self) -> None:
        self.note("TaskModule.after_optimizer_step")

    def on_validation_end(self, metrics: Mapping[str, float]) -> None:
        self.note("TaskModule.on_validation_end")

    def on_epoch_end(self) -> None:
        self.note("TaskModule.on_epoch_end")

    def on_fit_end(self) -> None:
        self.note("TaskModule.on_fit_end")


class Telling(Callback):
    """Writes down when it is called, and that it sees the task in eval mode without gradients."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def note(self, run: Any, name: str) -> None:
        assert not run.task.training
        assert not torch.is_grad_enabled()
        self.told.append(f"Callback.{name}")

    def on_fit_start(self, run: Any) -> None:
        self.note(run, "on_fit_start")

    def on_log(self, run: Any, metrics: dict[str, float]) -> None:
        self.note(run, "on_log")

    def on_validation_end(self, run: Any, metrics: Mapping[str, float]) -> None:
        self.note(run, "on_validation_end")

    def on_save(self, run: Any, path: Path) -> None:
        self.note(run, "on_save")

    def on_fit_end(self, run: Any) -> None:
        self.note(run, "on_fit_end")


def told_by(run_dir: Path, **options: Any) -> list[str]:
    told: list[str] = []
    task = Told(told)
    task.net[1].eval()
    options["checkpoint"] = {"asynchronous": False, **options.get("checkpoint", {})}
    options = {"train": samples(4), "val": samples(3), "global_batch_size": 4, **options}
    fit(task, run_dir, callbacks=[Telling(told)], **options)
    assert (task.training, task.net[0].training, task.net[1].training) == (True, True, False)
    return told


def test_the_order_of_hooks_is_the_one_in_the_docstring(tmp_path: Path) -> None:
    hooks = r"\b(?:TaskModule\.\w+|Callback\.\w+|forward|loss|optimizer\.step)\b"
    documented = re.findall(hooks, Training.run.__doc__ or "")
    assert len(documented) == 15
    assert told_by(tmp_path, max_epochs=1) == documented


def test_the_order_of_hooks_over_micro_batches_steps_and_epochs(tmp_path: Path) -> None:
    start = ["TaskModule.on_fit_start", "Callback.on_fit_start"]
    micro = ["forward", "loss"]
    update = ["TaskModule.before_optimizer_step", "optimizer.step"]
    step = [*micro * 2, *update, "TaskModule.after_optimizer_step"]
    validate = ["TaskModule.on_validation_end", "Callback.on_validation_end"]
    epoch = ["TaskModule.on_epoch_start", *step, *step, "Callback.on_log"]
    ended = ["TaskModule.on_epoch_end"]
    last = ["Callback.on_save", "TaskModule.on_fit_end", "Callback.on_fit_end"]
    expected = [*start, *epoch, *ended, *epoch, *validate, *ended, *last]
    options = {"train": samples(7), "micro_batch_size": 2, "validate_every_n_epochs": 2}
    checkpoint = {"every_n_epochs": 2}
    assert told_by(tmp_path, max_epochs=2, checkpoint=checkpoint, **options) == expected


class Events(Callback):
    """Notes the step of every event."""

    def __init__(self) -> None:
        self.logged: dict[int, dict[str, float]] = {}
        self.validated: list[int] = []
        self.saved: list[int] = []

    def on_log(self, run: Any, metrics: dict[str, float]) -> None:
        self.logged[run.step] = metrics

    def on_validation_end(self, run: Any, metrics: Mapping[str, float]) -> None:
        self.validated.append(run.step)

    def on_save(self, run: Any, path: Path) -> None:
        self.saved.append(int(path.name.removeprefix("step-")))


def test_events_are_on_the_clock_of_steps_and_epochs(tmp_path: Path) -> None:
    events = Events()
    options: dict[str, Any] = {"log_every_n_steps": 2, "validate_every_n_steps": 4}
    options |= {"validate_every_n_epochs": None, "max_epochs": 3, "global_batch_size": 4}
    options["checkpoint"] = {"every_n_steps": 5, "every_n_epochs": 2}
    result = fit(
        Regression(), tmp_path, train=samples(10), val=samples(3), callbacks=[events], **options
    )
    assert list(events.logged) == [2, 3, 4, 6, 8, 9]
    assert events.validated == [4, 8, 9]
    assert events.saved == [5, 6, 9]
    assert (result.step, result.epoch, result.samples) == (9, 3, 30)
    assert result.stop_reason == "max_epochs=3 reached"


@pytest.mark.parametrize(
    ("options", "clock"),
    [
        ({"max_steps": 4}, (4, 1, 14)),
        ({"max_steps": 6, "max_epochs": 3}, (6, 2, 20)),
        ({"max_steps": 7, "max_epochs": 2}, (6, 2, 20)),
        ({"max_epochs": 2, "limit_train_batches": 2}, (4, 2, 16)),
        ({"max_epochs": 2, "limit_train_batches": 9}, (6, 2, 20)),
        ({"max_epochs": 2, "drop_last": True}, (4, 2, 16)),
        ({"max_epochs": 3, "overfit_batches": 1}, (3, 3, 12)),
        ({"fast_dev_run": True, "max_epochs": 3}, (1, 0, 4)),
        ({"fast_dev_run": True}, (1, 0, 4)),
    ],
)
def test_the_clock(options: dict[str, Any], clock: tuple[int, int, int], tmp_path: Path) -> None:
    data = {"train": samples(10), "val": samples(3)}
    result = fit(Regression(), tmp_path, global_batch_size=4, **data, **options)
    assert (result.step, result.epoch, result.samples) == clock


def test_a_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    fit(Regression(), tmp_path / "run", train=samples(4), fast_dev_run=True, logger=None)
    assert not list(tmp_path.glob("run/*"))


def test_overfitting_repeats_the_same_batches(tmp_path: Path) -> None:
    found, expected = Regression(), Regression()
    data = samples(12)
    first = TensorDataset(*(tensor[:8] for tensor in data.tensors))
    train_by_hand(expected, first, global_batch_size=4, epochs=3)
    options = {"global_batch_size": 4, "max_epochs": 3, "overfit_batches": 2, "shuffle": True}
    fit(found, tmp_path, train=data, **options)
    assert_equal_bits(found, expected)


class Counting(Regression):
    """Counts the samples that it sees by split and step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[tuple[str, int], int] = {}

    def forward(self, batch: Any) -> Tensor:
        key = self.run.split, self.run.step
        self.seen[key] = self.seen.get(key, 0) + len(batch[0])
        return super().forward(batch)


def test_sanity_validation_comes_first_and_is_short(tmp_path: Path) -> None:
    task = Counting()
    options = {"global_batch_size": 4, "max_steps": 2, "num_sanity_val_steps": 2}
    fit(task, tmp_path, train=samples(8), val=samples(20), limit_val_batches=3, **options)
    assert list(task.seen.items()) == [
        (("val", 0), 8),
        (("train", 0), 4),
        (("train", 1), 4),
        (("val", 2), 12),
    ]


class Facts(Regression):
    """Notes what it can know of the run."""

    def on_epoch_start(self) -> None:
        run = self.run
        self.facts = (run.step, run.epoch, run.samples, run.total_steps, run.steps_per_epoch)


def test_a_task_knows_the_clock(tmp_path: Path) -> None:
    task = Facts()
    fit(task, tmp_path, train=samples(10), global_batch_size=4, max_epochs=2)
    assert task.facts == (3, 1, 10, 6, 3)


def test_logged_values_are_means_since_the_last_event(tmp_path: Path) -> None:
    events, plain = Events(), Regression()
    expected = []
    loader: Any = torch.utils.data.DataLoader(samples(10), batch_size=4)
    optimizer = plain.configure_optimizers()
    for batch in loader:
        loss = plain.loss(plain(batch), batch)
        expected.append((loss.item(), len(batch[0])))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    options = {"global_batch_size": 4, "max_epochs": 1, "log_every_n_steps": 1}
    fit(Regression(), tmp_path / "each", train=samples(10), callbacks=[events], **options)
    assert [m["train/loss"] for m in events.logged.values()] == [loss for loss, _ in expected]
    result = fit(Regression(), tmp_path, train=samples(10), global_batch_size=4, max_epochs=1)
    mean = sum(loss * size for loss, size in expected) / 10
    assert measured(result.metrics) == pytest.approx({"train/loss": mean})


def scheduled(interval: str) -> Any:
    def build(params: Any) -> OptimizerSetup:
        optimizer = sgd(params)
        return OptimizerSetup(optimizer, LambdaLR(optimizer, lambda n: 1 / (n + 1)), interval)

    return build


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_the_logged_rate_is_the_one_that_was_used(interval: str, tmp_path: Path) -> None:
    events = Events()
    task, expected = Regression(scheduled(interval)), Regression()
    optimizer = expected.configure_optimizers()
    used = []
    for epoch in range(2):
        for batch in torch.utils.data.DataLoader(samples(10), batch_size=4):
            count = epoch if interval == "epoch" else len(used)
            used.append(0.1 * (1 / (count + 1)))
            optimizer.param_groups[0]["lr"] = used[-1]
            optimizer.zero_grad()
            expected.loss(expected(batch), batch).backward()
            optimizer.step()
    options = {"global_batch_size": 4, "max_epochs": 2, "log_every_n_steps": 1}
    fit(task, tmp_path, train=samples(10), callbacks=[LearningRate(), events], **options)
    assert [metrics["train/lr"] for metrics in events.logged.values()] == used
    assert_same(task, expected)


def plateau(monitor: str) -> Any:
    def build(params: Any) -> OptimizerSetup:
        optimizer = sgd(params)
        scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)  # never good enough
        return OptimizerSetup(optimizer, scheduler, monitor=monitor)

    return build


def test_a_plateau_schedule_follows_its_metric(tmp_path: Path) -> None:
    events = Events()
    options = {"global_batch_size": 4, "max_epochs": 3, "callbacks": [LearningRate(), events]}
    data = {"train": samples(4), "val": samples(3)}
    fit(Regression(plateau("val/loss")), tmp_path, **data, **options)
    rates = [metrics["train/lr"] for metrics in events.logged.values()]
    assert rates == pytest.approx([0.1, 0.01, 0.001])


def test_a_metric_that_nobody_measures_is_an_error(tmp_path: Path) -> None:
    data: dict[str, Any] = {"train": samples(4), "val": samples(3), "max_epochs": 3}
    with pytest.raises(ValueError, match=r"scheduler monitors 'val/f1'.*val/loss"):
        fit(Regression(plateau("val/f1")), tmp_path / "a", **data)
    with pytest.raises(ValueError, match=r"checkpoint\.monitor=val/f1 is measured by nobody.*loss"):
        fit(Regression(), tmp_path / "b", checkpoint={"monitor": "val/f1"}, **data)


def test_a_checkpoint_before_the_first_validation_waits_for_the_metric(tmp_path: Path) -> None:
    data: dict[str, Any] = {"train": samples(4), "val": samples(3), "max_epochs": 4}
    options = {"validate_every_n_epochs": 2, "checkpoint": {"monitor": "val/loss"}}
    result = fit(Regression(), tmp_path, **data, **options)
    assert result.best_checkpoint is not None


class Bad(Regression):
    """Returns what it is given as its loss."""

    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.returned = returned

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        return self.returned(outputs)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda outputs: outputs, r"tensor of shape \(4,\); it must be a scalar"),
        (lambda outputs: outputs.sum().item(), "loss returned a float"),
        (lambda outputs: outputs.sum().detach(), "needs no gradient"),
        (lambda outputs: (outputs.sum(), {}), "loss returned a tuple"),
    ],
)
def test_a_bad_loss_is_an_error(returned: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        fit(Bad(returned), tmp_path, train=samples(4), max_epochs=1)


def test_a_nan_loss_is_an_error_at_the_next_log_step(tmp_path: Path) -> None:
    x, y = samples(16).tensors
    y[5] = torch.nan
    events = Events()
    options = {"log_every_n_steps": 3, "callbacks": [events], "max_epochs": 1}
    where = "step 2, on rank 0, for the samples at positions 4 to 7 of the epoch"
    with pytest.raises(FloatingPointError, match=where):
        fit(Regression(), tmp_path, train=TensorDataset(x, y), global_batch_size=4, **options)
    assert events.logged == {}
    assert not list(tmp_path.rglob("step-*"))


class Rooted(Regression):
    """Its loss is finite, and its gradient is not."""

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        return (outputs * 0).sqrt().mean()


def test_anomaly_detection_names_the_operation(tmp_path: Path) -> None:
    options = {"max_epochs": 1, "detect_anomaly": True}
    with (
        pytest.warns(UserWarning, match="Error detected in MulBackward0"),
        pytest.raises(RuntimeError, match="'MulBackward0' returned nan"),
    ):
        fit(Rooted(), tmp_path, train=samples(4), **options)
    assert not torch.is_anomaly_enabled()


def test_a_run_needs_a_limit_and_data(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither max_epochs nor max_steps is given"):
        fit(Regression(), tmp_path, train=samples(4))
    with pytest.raises(ValueError, match="training set is empty"):
        fit(Regression(), tmp_path, train=samples(0), max_epochs=1)


class LogsVector(Regression):
    def loss(self, outputs: Tensor, batch: Any) -> Any:
        self.log("outputs", outputs)
        return super().loss(outputs, batch)


def test_only_scalars_can_be_logged(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"log\('outputs', ...\) got a tensor of shape \(4,\)"):
        fit(LogsVector(), tmp_path, train=samples(4), max_epochs=1)


def test_a_trainer_fits_again_from_the_start(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu", max_epochs=2, run_dir=str(tmp_path), callbacks=False, logger=False
    )
    first, second = Regression(), Regression()
    results = [trainer.fit(task, train=samples(9)) for task in (first, second)]
    assert [result.step for result in results] == [2, 2]
    assert_equal_bits(first, second)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("limit", [{"max_steps": 4}, {"max_epochs": 2}])
def test_a_finished_run_that_is_resumed_does_no_further_step(
    limit: dict[str, int], tmp_path: Path
) -> None:
    task = Regression()
    options = {"train": samples(8), "global_batch_size": 4, **limit}
    fit(task, tmp_path, **options)
    resumed = Regression()
    result = fit(resumed, tmp_path, resume="auto", **options)
    assert (result.step, result.epoch) == (4, 2)
    assert_equal_bits(resumed, task)


def test_the_best_weights_are_tested_and_the_last_ones_kept(tmp_path: Path) -> None:
    task = Regression(lambda params: torch.optim.SGD(params, lr=0.5))
    data = {"train": samples(8), "val": samples(8), "test": samples(8)}
    options = {"global_batch_size": 4, "max_epochs": 6, "test_best": True}
    result = fit(task, tmp_path, **data, **options)
    assert result.best_checkpoint is not None
    best = Trainer(accelerator="cpu", callbacks=False, logger=False).test(
        Regression(), test=samples(8), ckpt_path=result.best_checkpoint
    )
    assert result.metrics["test/loss"] == best["test/loss"]
    last = Regression()
    last.load_state_dict(weights(task))
    assert result.metrics["val/loss"] == pytest.approx(
        float(
            torch.nn.functional.mse_loss(last(samples(8).tensors).detach(), samples(8).tensors[1])
        )
    )


@pytest.mark.parametrize("validation", [{}, {"val": samples(4), "validate_every_n_epochs": None}])
def test_a_schedule_that_no_validation_feeds_is_an_error(
    validation: dict[str, Any], tmp_path: Path
) -> None:
    task = Regression(
        lambda params: OptimizerSetup(
            (optimizer := sgd(params)), ReduceLROnPlateau(optimizer), monitor="val/loss"
        )
    )
    with pytest.raises(ValueError, match=r"monitors 'val/loss', but this fit has no validation"):
        fit(task, tmp_path, train=samples(4), max_epochs=1, **validation)


class RootAtZero(Regression):
    """Its loss is finite and its gradient is not."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return (outputs * 0).square().sum().sqrt()


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"at step 1 net\.0\.weight.* became NaN .*gradient"):
        fit(RootAtZero(), tmp_path, train=samples(4), max_steps=1)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_matmul_precision_holds_for_the_fit_only(tmp_path: Path) -> None:
    seen: list[str] = []

    class Asking(Regression):
        def on_fit_start(self) -> None:
            seen.append(torch.get_float32_matmul_precision())

    fit(Asking(), tmp_path, train=samples(4), max_steps=1, matmul_precision="medium")
    assert (seen, torch.get_float32_matmul_precision()) == (["medium"], "highest")


def test_a_misspelt_monitor_is_an_error_in_a_run_shorter_than_an_epoch(tmp_path: Path) -> None:
    options = {"max_steps": 2, "global_batch_size": 2, "checkpoint": {"monitor": "val/f1"}}
    data = {"train": samples(20), "val": samples(3)}
    with pytest.raises(ValueError, match=r"checkpoint\.monitor=val/f1 is measured by nobody"):
        fit(Regression(), tmp_path, **data, **options)


def test_a_test_without_data_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    told: list[str] = []
    with pytest.raises(ValueError, match="there is no test data"):
        fit(Told(told), tmp_path, train=samples(4), max_steps=1, test_best=True)
    assert told == []


def test_a_task_without_parameters_to_train_is_an_error(tmp_path: Path) -> None:
    task = Regression()
    task.requires_grad_(False)
    with pytest.raises(ValueError, match=r"no parameter of Regression requires a gradient"):
        fit(task, tmp_path, train=samples(4), max_steps=1)


class Remembering(Regression):
    """Has state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = 0

    def after_optimizer_step(self) -> None:
        self.memory += 1

    def get_extra_state(self) -> Any:
        return {"memory": self.memory}

    def set_extra_state(self, state: Any) -> None:
        self.memory = state["memory"]


def test_state_that_is_no_tensor_is_saved_tested_and_resumed(tmp_path: Path) -> None:
    data = {"train": samples(4), "val": samples(3), "test": samples(2)}
    task = Remembering()
    fit(task, tmp_path, max_epochs=3, test_best=True, **data)
    assert task.memory == 3
    resumed = Remembering()
    fit(resumed, tmp_path, max_epochs=5, resume="auto", **data)
    assert resumed.memory == 5


class Stopping(Callback):
    """Asks for a stop in one hook."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def on_fit_start(self, run: Any) -> None:
        self.ask(run, "on_fit_start")

    def on_save(self, run: Any, path: Path) -> None:
        self.ask(run, "on_save")

    def on_log(self, run: Any, metrics: dict[str, float]) -> None:
        self.ask(run, "on_log")

    def ask(self, run: Any, hook: str) -> None:
        if hook == self.hook:
            run.request_stop(f"asked in {hook}")


@pytest.mark.parametrize(("hook", "steps"), [("on_fit_start", 0), ("on_save", 2), ("on_log", 3)])
def test_a_stop_is_obeyed_right_after_the_event(hook: str, steps: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 8, "global_batch_size": 1, "log_every_n_steps": 3}
    options["checkpoint"] = {"every_n_steps": 2, "asynchronous": False}
    result = fit(Regression(), tmp_path, train=samples(9), callbacks=[Stopping(hook)], **options)
    assert (result.step, result.stop_reason) == (steps, f"asked in {hook}")


def test_a_callback_finds_its_state_beside_a_new_one(tmp_path: Path) -> None:
    class Counting(Callback):
        epochs = 0

        def on_validation_end(self, run: Any, metrics: Mapping[str, float]) -> None:
            self.epochs += 1

        def state_dict(self) -> dict[str, Any]:
            return {"epochs": self.epochs}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.epochs = state["epochs"]

    data = {"train": samples(4), "val": samples(3)}
    fit(Regression(), tmp_path, max_epochs=2, callbacks=[Counting()], **data)
    again = Counting()
    callbacks = [LearningRate(), again]
    fit(Regression(), tmp_path, max_epochs=3, callbacks=callbacks, resume="auto", **data)
    assert again.epochs == 3


def test_resuming_a_finished_run_measures_nothing_twice(tmp_path: Path) -> None:
    data: dict[str, Any] = {"train": samples(4), "val": samples(3), "logger": None}
    fit(Regression(plateau("val/loss")), tmp_path, max_epochs=2, **data)
    written = (tmp_path / "metrics.jsonl").read_text()
    fit(Regression(plateau("val/loss")), tmp_path, max_epochs=2, resume="auto", **data)
    assert (tmp_path / "metrics.jsonl").read_text() == written


@pytest.mark.parametrize("change", [{"global_batch_size": 4}, {"seed": 1}])
def test_resuming_with_another_order_of_samples_is_refused(
    change: dict[str, Any], tmp_path: Path
) -> None:
    options = {"max_steps": 1, "global_batch_size": 2, "seed": 0}
    fit(Regression(), tmp_path, train=samples(8), **options)
    name = next(iter(change))
    with pytest.raises(ValueError, match=rf"another experiment:\n  data: {name} "):
        fit(Regression(), tmp_path, train=samples(8), resume="auto", **{**options, **change})


def test_the_best_checkpoint_knows_the_metric_measured_after_it_was_written(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"max_steps": 4, "global_batch_size": 1}
    options["checkpoint"] = {"every_n_steps": 2, "monitor": "val/loss"}
    data = {"train": samples(9), "val": samples(3)}
    result = fit(Regression(), tmp_path, **data, **options)
    assert result.best_checkpoint == result.last_checkpoint


def test_a_loss_that_returns_nothing_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Forgetful(Regression):
        def loss(self, outputs: Tensor, batch: Any) -> Any:
            super().loss(outputs, batch)

    fit(Forgetful(), tmp_path, train=samples(4), max_epochs=2)
    said = capsys.readouterr().out
    assert said.count("nothing was trained in the first 1 steps: loss returned None") == 1
    assert said.count("nothing was trained") == 1


class Starting(Regression):
    """Sets its weights when a fit starts."""

    def on_fit_start(self) -> None:
        assert self.run.step == 0
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape))


def test_weights_that_are_set_at_the_start_are_those_of_the_checkpoint_later(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"train": samples(12), "global_batch_size": 4}
    whole, parts = Starting(), Starting()
    fit(whole, tmp_path / "whole", max_steps=5, **options)
    fit(parts, tmp_path / "parts", max_steps=2, **options)
    fit(parts, tmp_path / "parts", max_steps=5, resume="auto", **options)
    assert_equal_bits(parts, whole)
