"""A learning rate that follows the global batch, against the same training written by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Regression, adamw, assert_same, fit, on_ranks, samples, sgd, weights
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from trainer import OptimizerSetup
from trainer.callbacks import LearningRate
from trainer.config import TrainerConfig
from trainer.optimizing.lr_scaling import LRScaling
from trainer.optimizing.optimization import Schedule, configure_optimizers
from trainer.run import Run
from trainer.state import OnTheClock, TrainState

Scheduling = Callable[[Optimizer], Any]


class Clock(OnTheClock):
    def __init__(self) -> None:
        self._state = TrainState()


def values(optimizer: Optimizer) -> dict[str, Any]:
    group = optimizer.param_groups[0]  # a rate may be a tensor, which changes in place
    return {**group, "lr": float(group["lr"])}


def used_in_steps(
    optimizer: Optimizer, scheduler: Any, scaling: LRScaling, steps: int
) -> list[dict[str, Any]]:
    """What the optimizer has in its group in each of some steps, as the loop makes them."""
    clock, used = Clock(), []
    optimizer.register_step_pre_hook(lambda o, *_: used.append(values(o)))
    monitor = "val/loss" if isinstance(scheduler, ReduceLROnPlateau) else None
    schedule = Schedule(OptimizerSetup(optimizer, scheduler, monitor=monitor), scaling, clock)
    for _ in range(steps):
        with schedule.scaled():
            optimizer.step()
        schedule.after_step()
        assert schedule.named_rates("train/lr")["train/lr"] == pytest.approx(used[-1]["lr"])
        clock._state.step += 1
        schedule.after_validation({"val/loss": 1.0})
    return used


SCHEDULES: dict[str, Scheduling] = {
    "none": lambda _: None,
    "lambda": lambda o: LambdaLR(o, lambda count: 1 / (1 + count)),
    "exponential": lambda o: ExponentialLR(o, 0.9),
    "cosine": lambda o: CosineAnnealingLR(o, 6),
    "one cycle": lambda o: OneCycleLR(o, 0.1, total_steps=12, base_momentum=0.85),
    "cyclic": lambda o: CyclicLR(o, 0.01, 0.1, 3, base_momentum=0.8, max_momentum=0.9),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=1, factor=0.5, min_lr=0.01),
    "chained": lambda o: ChainedScheduler([ConstantLR(o, 0.5, 4), ExponentialLR(o, 0.9)], o),
    "sequence": lambda o: SequentialLR(o, [LinearLR(o, 0.1), ExponentialLR(o, 0.9)], [5]),
}


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scheduler_of_any_kind_sees_nothing_of_it(name: str, is_tensor: bool, rule: str) -> None:
    def build() -> tuple[Optimizer, Any]:
        lr: Any = torch.tensor(0.08, dtype=torch.float64) if is_tensor else 0.08
        optimizer = AdamW([nn.Parameter(torch.ones(1))], lr=lr, foreach=False)
        return optimizer, SCHEDULES[name](optimizer)

    plain = used_in_steps(*build(), LRScaling(), 12)
    optimizer, scheduler = build()
    found = used_in_steps(optimizer, scheduler, LRScaling(rule, 12, 4, warmup_steps=4), 12)
    full = 3 if rule == "linear" else math.sqrt(3)
    for step, (unscaled, scaled) in enumerate(zip(plain, found, strict=True)):
        rise = min(1, step / 4)
        expected = unscaled["lr"] * (1 + (full - 1) * rise)
        assert scaled["lr"] == pytest.approx(expected, rel=1e-12), step
        if rule == "sqrt":
            assert scaled["betas"] == pytest.approx([1 - 3 * (1 - b) for b in unscaled["betas"]])
            assert scaled["eps"] == pytest.approx(unscaled["eps"] / full)
        else:
            assert (scaled["betas"], scaled["eps"]) == (unscaled["betas"], unscaled["eps"])
    assert optimizer.param_groups[0]["eps"] == 1e-8, "not as it was"
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor) == is_tensor


@pytest.mark.parametrize(
    ("kind", "scaled"),
    [
        (RMSprop, {"alpha": 0.96, "eps": 5e-9}),
        (partial(Adam, eps=0), {"betas": (0.6, 0.996)}),
        (Adagrad, {}),
        (SGD, {}),
    ],
)
def test_sqrt_scales_what_the_rule_is_about(kind: Any, scaled: dict[str, Any]) -> None:
    optimizer = kind([nn.Parameter(torch.ones(1))], lr=0.1)
    before = dict(optimizer.param_groups[0])
    (used,) = used_in_steps(optimizer, None, LRScaling("sqrt", 8, 2), 1)
    assert used["lr"] == 0.2
    changed = {name: used[name] for name in used if used[name] != before[name] and name != "lr"}
    assert changed.keys() == scaled.keys()
    for name, value in scaled.items():
        assert changed[name] == pytest.approx(value)
    assert optimizer.param_groups[0] == before


def test_a_smaller_batch_than_the_reference_has_no_warm_up() -> None:
    assert LRScaling("linear", 2, 8, warmup_steps=5).factor(0) == 0.25
    assert LRScaling("sqrt", 2, 8, warmup_steps=5).factor(3) == 0.5


def test_the_groups_are_as_before_if_the_step_fails() -> None:
    optimizer = sgd([nn.Parameter(torch.ones(1))])

    def step() -> None:
        with LRScaling("linear", 4, 2).applied(optimizer, 0):
            raise ZeroDivisionError(optimizer.param_groups[0]["lr"])

    with pytest.raises(ZeroDivisionError, match=r"0\.2"):
        step()
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_the_reference_batch_itself_changes_nothing() -> None:
    optimizer = AdamW([nn.Parameter(torch.ones(1))], betas=(0.0, 0.9))
    scaling = LRScaling("sqrt", 32, 32, warmup_steps=3)
    scaling.check(optimizer)
    (used,) = used_in_steps(optimizer, None, scaling, 1)
    assert (used["lr"], used["betas"], used["eps"]) == (1e-3, (0.0, 0.9), 1e-8)


def two_groups(params: Iterable[nn.Parameter]) -> Optimizer:
    first, *rest = params
    return SGD([{"params": [first], "lr": 0.5}, {"params": rest}], lr=0.1)


def one_cycle(params: Iterable[nn.Parameter]) -> OptimizerSetup:
    optimizer = adamw(params)
    return OptimizerSetup(optimizer, OneCycleLR(optimizer, 0.5, total_steps=9))


def warmed_up(params: Iterable[nn.Parameter]) -> OptimizerSetup:
    optimizer = sgd(params)
    return OptimizerSetup(optimizer, LambdaLR(optimizer, lambda count: count / 10))


@pytest.mark.parametrize(
    ("build", "scaling", "line"),
    [
        (
            sgd,
            LRScaling("linear", 1024, 128, 500),
            "learning rate: 0.1 x 8 = 0.8 (linear: global_batch_size 1024 / reference 128), "
            "rising from 0.1 over the first 500 steps",
        ),
        (
            adamw,
            LRScaling("sqrt", 512, 128),
            "learning rate: 0.02 x 2 = 0.04 (sqrt: global_batch_size 512 / reference 128); "
            "betas (0.9, 0.999) -> (0.6, 0.996); eps 1e-08 -> 5e-09",
        ),
        (
            two_groups,
            LRScaling("linear", 64, 128, 500),
            "learning rate: 0.5 x 0.5 = 0.25, 0.1 x 0.5 = 0.05 "
            "(linear: global_batch_size 64 / reference 128)",
        ),
        (
            warmed_up,
            LRScaling("linear", 256, 128),
            "learning rate and its schedule: 0.1 x 2 = 0.2 "
            "(linear: global_batch_size 256 / reference 128)",
        ),
        (
            one_cycle,
            LRScaling("linear", 256, 128, 9),
            "learning rate and its schedule: 0.5 x 2 = 1 (linear: global_batch_size 256 / "
            "reference 128), rising from the unscaled one over the first 9 steps",
        ),
    ],
)
def test_the_start_says_what_is_used(
    build: Any, scaling: LRScaling, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_optimizers(Regression(build), scaling)
    assert capsys.readouterr().out == line + "\n"


def without_lr(params: Iterable[nn.Parameter]) -> Optimizer:
    optimizer = sgd(params)
    optimizer.param_groups[0]["lr"] = None
    return optimizer


@pytest.mark.parametrize(
    ("build", "rule", "words"),
    [
        (
            adamw,
            "sqrt",
            r"k = 16, and a beta of 0.9 would become 1 - k \(1 - beta\) = -0.6, .*Keep k below 10: "
            "a global batch below 640, ",
        ),
        (one_cycle, "sqrt", r"beta of 0.85 would become .* = -1.4"),
        (lambda p: AdamW(p, betas=(0.95, 0.9)), "sqrt", "beta of 0.9 would become"),
    ],
)
def test_betas_that_cannot_be_scaled_are_refused(build: Any, rule: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        configure_optimizers(Regression(build), LRScaling(rule, 1024, 64))
    configure_optimizers(Regression(build), LRScaling("linear", 1024, 64))


def test_a_beta_that_a_schedule_moves_too_far_ends_the_run() -> None:
    optimizer = adamw([nn.Parameter(torch.ones(1))])
    optimizer.param_groups[0]["betas"] = (0.5, 0.9)
    with (
        pytest.raises(ValueError, match=r"beta of 0\.5"),
        LRScaling("sqrt", 4, 2).applied(optimizer, 0),
    ):
        pass
    assert optimizer.param_groups[0]["lr"] == 0.02


def test_a_group_without_a_rate_is_refused() -> None:
    optimizer = without_lr([nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="parameter group 0 of the SGD has no lr to scale"):
        LRScaling("linear", 4, 2).check(optimizer)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr_scaling": "linear"}, "linear without lr_reference_batch_size; give the global"),
        ({"lr_scaling": "quadratic", "lr_reference_batch_size": 1}, "must be none, linear or sqrt"),
        ({"lr_reference_batch_size": 8}, "lr_scaling=none has no effect; set lr_scaling=linear"),
        ({"lr_warmup_steps": 8}, "lr_scaling=none has no effect.*configure_optimizers"),
        ({"scale_lr": True}, "set lr_scaling=linear .*and lr_reference_batch_size"),
    ],
)
def test_options_without_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainerConfig.from_options(options)


def scheduled_sgd(params: Iterable[nn.Parameter]) -> OptimizerSetup:
    optimizer = sgd(params)
    return OptimizerSetup(optimizer, ExponentialLR(optimizer, 0.9))


def scheduled_adamw(params: Iterable[nn.Parameter]) -> OptimizerSetup:
    optimizer = AdamW(params, lr=0.02)
    return OptimizerSetup(
        optimizer, OneCycleLR(optimizer, 0.05, total_steps=8, base_momentum=0.8, max_momentum=0.9)
    )


class Rates(LearningRate):
    """Keeps what the log says, too."""

    def __init__(self, rates: list[float]) -> None:
        self.rates = rates

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        super().on_log(run, metrics)
        self.rates.append(metrics["train/lr"])


BATCH, REFERENCE, WARMUP, STEPS = 6, 2, 4, 8
RULES = {"linear": scheduled_sgd, "sqrt": scheduled_adamw}
DATA = samples(24)


def by_hand(rule: str, until: int = STEPS) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights and rates of a plain loop: an unscaled twin has the schedule, and nothing else."""
    task = Regression()
    twin = RULES[rule](nn.Linear(1, 1).parameters())
    optimizer = RULES[rule](task.parameters()).optimizer
    k = BATCH / REFERENCE
    full = k if rule == "linear" else math.sqrt(k)
    rates = []
    batches = list(DataLoader(DATA, batch_size=BATCH)) * 2
    for step, batch in enumerate(batches[:until]):
        group, planned = optimizer.param_groups[0], twin.optimizer.param_groups[0]
        group["lr"] = planned["lr"] * (1 + (full - 1) * min(1, step / WARMUP))
        rates.append(group["lr"])
        if rule == "sqrt":
            group["betas"] = tuple(1 - k * (1 - beta) for beta in planned["betas"])
            group["eps"] = planned["eps"] / math.sqrt(k)
        optimizer.zero_grad()
        task.loss(task(batch), batch).backward()
        optimizer.step()
        twin.optimizer.step()
        twin.scheduler.step()
    return weights(task), rates


def scaled_fits(folder: Path) -> list[tuple[str, dict[str, torch.Tensor], list[float]]]:
    """Fit by each rule, in one go and resumed in the middle of the warm-up."""
    found = []
    for rule, build in RULES.items():
        options: dict[str, Any] = {
            "train": DATA,
            "lr_scaling": rule,
            "lr_reference_batch_size": REFERENCE,
            "lr_warmup_steps": WARMUP,
            "log_every_n_steps": 1,
            "global_batch_size": BATCH,
        }
        for stops in ([STEPS], [2, STEPS]):
            rates: list[float] = []
            for stop in stops:
                task = Regression(build)
                fit(
                    task,
                    folder / f"{rule}-{len(stops)}",
                    max_steps=stop,
                    resume="auto",
                    callbacks=[Rates(rates)],
                    **options,
                )
            found.append((rule, weights(task), rates))
    return found


def test_a_fit_is_the_loop_with_the_scaled_rate(tmp_path: Path) -> None:
    expected = {rule: by_hand(rule) for rule in RULES}
    fits = [scaled_fits(tmp_path / "1"), on_ranks(2, scaled_fits, tmp_path / "2")[0]]
    for found in fits:
        for rule, trained, rates in found:
            assert_same(trained, expected[rule][0])
            assert rates == pytest.approx(expected[rule][1])


def test_a_loader_has_a_batch_size_to_go_by_or_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"lr_scaling": "linear", "lr_reference_batch_size": 3, "max_steps": 1}
    result = fit(
        Regression(),
        tmp_path,
        train=DataLoader(DATA, batch_size=6),
        callbacks=[Rates([])],
        **options,
    )
    assert result.metrics["train/lr"] == pytest.approx(0.2)
    varying = DataLoader(DATA, batch_sampler=list(BatchSampler(SequentialSampler(DATA), 5, False)))
    with pytest.raises(ValueError, match=r"batches have no fixed size.*set lr_scaling=none"):
        fit(Regression(), tmp_path, train=varying, **options)
