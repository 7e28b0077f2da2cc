"""What configure_optimizers may return, and when a schedule advances."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Regression, adamw, sgd
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from trainer import OptimizerSetup
from trainer.optimizing.lr_scaling import LRScaling
from trainer.optimizing.optimization import configure_optimizers


def halving(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda count: 0.5**count)


def only(task: Any) -> Any:
    [(name, schedule)] = configure_optimizers(task, LRScaling()).items()
    assert name is None
    return schedule.setup.optimizer, schedule


def configured(scheduler: Any = None, **setup: Any) -> Any:
    def build(params: Any) -> OptimizerSetup:
        optimizer = sgd(params)
        return OptimizerSetup(optimizer, scheduler and scheduler(optimizer), **setup)

    return only(Regression(build))


def test_an_optimizer_alone_has_one_constant_rate() -> None:
    optimizer, schedule = only(Regression())
    schedule.after_step()
    schedule.after_epoch()
    schedule.after_validation({})
    assert isinstance(optimizer, SGD)
    assert schedule.named_rates("train/lr") == {"train/lr": 0.1}
    assert schedule.state_dict() == {"rates": [0.1], "scheduler": {}}


@pytest.mark.parametrize(("interval", "rate"), [(None, 0.025), ("step", 0.025), ("epoch", 0.05)])
def test_a_schedule_advances_by_its_interval(interval: str | None, rate: float) -> None:
    optimizer, schedule = configured(halving, interval=interval)
    schedule.after_step()
    assert schedule.named_rates("train/lr") == {"train/lr": 0.1}, "not the rate that was used"
    schedule.after_step()
    schedule.after_validation({"val/loss": 1.0})
    schedule.after_epoch()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)


def test_a_schedule_that_follows_a_metric_advances_after_validation() -> None:
    optimizer, schedule = configured(
        lambda optimizer: ReduceLROnPlateau(optimizer, patience=0), monitor="val/loss"
    )
    for loss, rate in ((2.0, 0.1), (1.0, 0.1), (1.5, 0.01)):
        schedule.after_step()
        schedule.after_epoch()
        schedule.after_validation({"val/loss": loss})
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    with pytest.raises(ValueError, match=r"monitors 'val/loss'.*it measures: val/accuracy, val/f1"):
        schedule.after_validation({"val/f1": 1.0, "val/accuracy": 1.0})


def test_each_group_has_its_rate_by_name() -> None:
    def build(params: Any) -> SGD:
        first, *rest = params
        return SGD([{"params": [first], "name": "head", "lr": 0.5}, {"params": rest}], lr=0.1)

    _, schedule = only(Regression(build))
    assert schedule.named_rates("train/lr") == {"train/lr/head": 0.5, "train/lr/1": 0.1}


def test_a_schedule_goes_on_from_its_state() -> None:
    optimizer, schedule = configured(halving)
    for _ in range(3):
        schedule.after_step()
    other, resumed = configured(halving)
    resumed.load_state_dict(schedule.state_dict())
    other.load_state_dict(optimizer.state_dict())
    resumed.after_step()
    assert other.param_groups[0]["lr"] == pytest.approx(0.1 / 16)


@pytest.mark.parametrize(("interval", "rate"), [("step", 0.1 / 8), ("epoch", 0.1 / 2)])
def test_a_new_schedule_is_brought_to_where_a_run_stands(interval: str, rate: float) -> None:
    optimizer, schedule = configured(halving, interval=interval)
    schedule.advance_to(step=3, epoch=1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)


def of_another_optimizer(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return halving(SGD(optimizer.param_groups[0]["params"], lr=1.0))


@pytest.mark.parametrize(
    ("scheduler", "setup", "message"),
    [
        (halving, {"interval": "batch"}, "interval='batch'.*'step' or 'epoch'"),
        (ReduceLROnPlateau, {}, "ReduceLROnPlateau needs a metric.*monitor='val/loss'"),
        (None, {"monitor": "val/loss"}, "monitor='val/loss'.* without a scheduler"),
        (halving, {"monitor": "val/loss"}, "LambdaLR follows no metric.*leave monitor out"),
        (ReduceLROnPlateau, {"monitor": "a", "interval": "epoch"}, "leave interval out"),
        (of_another_optimizer, {}, "another optimizer"),
    ],
)
def test_an_inconsistent_setup_is_refused(scheduler: Any, setup: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configured(scheduler, **setup)


def test_an_optimizer_that_computes_the_loss_itself_is_refused() -> None:
    with pytest.raises(ValueError, match=r"LBFGS, whose step needs a closure.*AdamW, SGD"):
        only(Regression(torch.optim.LBFGS))


def test_several_optimizers_are_known_by_name() -> None:
    def build(params: Any) -> dict[str, Any]:
        first, *rest = params
        return {"generator": adamw([first]), "critic": OptimizerSetup(sgd(rest))}

    found = configure_optimizers(Regression(build), LRScaling())
    assert list(found) == ["generator", "critic"]
    assert found["generator"].named_rates("train/lr/generator") == {"train/lr/generator": 0.02}


def test_mappings_that_name_no_optimizers_are_refused() -> None:
    def twice(params: Any) -> dict[str, Any]:
        optimizer = sgd(params)
        return {"generator": optimizer, "critic": optimizer}

    with pytest.raises(
        ValueError, match=r"the same optimizer under several names \(generator, cri"
    ):
        configure_optimizers(Regression(twice), LRScaling())
    with pytest.raises(ValueError, match=r"keys \[0\].*give at least one, each as text"):
        configure_optimizers(Regression(lambda params: {0: sgd(params)}), LRScaling())
    with pytest.raises(ValueError, match=r"keys \[\]"):
        configure_optimizers(Regression(lambda params: {}), LRScaling())


def test_what_is_no_optimizer_is_refused() -> None:
    for returned in (None, [torch.optim.SGD], "adam"):
        with pytest.raises(ValueError, match=rf"returned a {type(returned).__name__}; it must"):
            only(Regression(lambda params, it=returned: it))


def test_parameters_of_something_else_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 parameters of the optimizer are not.*Regression"):
        only(Regression(lambda params: sgd(torch.nn.Linear(2, 2).parameters())))
