"""The step module: what a loss may return, and how it is scaled."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import Regression, TokenRegression, samples, weighted_samples
from torch import Tensor

from trainer import WeightedLoss
from trainer.contract import weigh
from trainer.logbook import Logbook
from trainer.state import TrainState
from trainer.step import StepModule

PARAMETER = torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (PARAMETER.expand(3), r"tensor of shape \(3,\).*take the mean"),
        (PARAMETER.reshape(1), r"tensor of shape \(1,\)"),
        (1.5, r"a float \(1.5\).*must return a scalar tensor"),
        ({"loss": PARAMETER}, "a dict"),
        (torch.ones(()), "needs no gradient.*detach"),
        (WeightedLoss(torch.ones(()), 2), "needs no gradient"),
        (WeightedLoss(PARAMETER, -1), "weight -1.0; a weight is finite and at least 0"),
        (WeightedLoss(PARAMETER, math.inf), "weight inf; a weight is finite"),
        (WeightedLoss(PARAMETER, torch.tensor(math.nan)), "weight nan; a weight is finite"),
        (WeightedLoss(PARAMETER, torch.tensor(-0.5)), "weight -0.5"),
        (WeightedLoss(PARAMETER, torch.ones(2)), r"weight has shape \(2,\)"),
        (WeightedLoss(2.0, 1), r"a float \(2.0\)"),  # type: ignore[arg-type]
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weigh(loss, 4, needs_grad=True)


def test_a_mean_weighs_its_samples_and_a_weighted_loss_its_weight() -> None:
    assert weigh(PARAMETER, 4, needs_grad=True) == (PARAMETER, 4)
    assert weigh(WeightedLoss(PARAMETER, 7.5), 4, needs_grad=True) == (PARAMETER, 7.5)
    assert weigh(torch.ones(()), 4, needs_grad=False) == (torch.ones(()), 4)


@pytest.mark.parametrize(
    "loss",
    [None, WeightedLoss(PARAMETER * torch.nan, 0), WeightedLoss(PARAMETER, torch.tensor(0))],
)
def test_a_loss_of_weight_0_is_ignored(loss: Any) -> None:
    assert weigh(loss, 4, needs_grad=True) == (None, 0)


class Given(Regression):
    """Its loss is what it is given."""

    kind = "mean"

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        if self.kind == "none":
            return None
        mean = super().loss(outputs, batch)
        return mean if self.kind == "mean" else WeightedLoss(mean * 10, 10)


def step_module(kind: str, needs_every_parameter: bool = True) -> StepModule:
    task = Given()
    task.kind = kind
    return StepModule(
        task,
        Logbook(),
        {},
        TrainState(),
        seed=0,
        averaged_over=1,
        needs_every_parameter=needs_every_parameter,
    )


def test_the_whole_batch_in_one_goes_through_as_it_is() -> None:
    batch = samples(4).tensors
    step = step_module("mean")
    assert step(batch, 4, 4) == step.task.loss(step.task(batch), batch)
    step(batch, 4, 4).backward()
    assert step.extra_weight.grad is None


@pytest.mark.parametrize(
    # A sample weighs 2.5, for which 2 is planned: 32 in all, and 8 of them here.
    ("kind", "share", "extra"),
    [("mean", 4 / 16, 0), ("sum", 10 / 32, (10 - 8) / 32)],
)
def test_a_micro_batch_counts_by_its_share_of_the_planned_weight(
    kind: str, share: float, extra: float
) -> None:
    batch = samples(4).tensors
    step = step_module(kind)
    scaled = step(batch, 4, 16)
    mean = torch.nn.functional.mse_loss(step.task(batch), batch[1])
    assert scaled.item() == pytest.approx(mean.item() * share, rel=1e-6)
    scaled.backward()
    assert (0 if extra == 0 else float(step.extra_weight.grad)) == pytest.approx(extra)
    assert step.has_weight


def test_a_micro_batch_without_weight_gives_zeros_and_takes_its_weight_away() -> None:
    for batch, kind in ((None, "mean"), (samples(4).tensors, "none")):
        step = step_module(kind)
        step(batch, 4 if batch else 0, 16).backward()
        assert all(p.grad is not None and not p.grad.any() for p in step.task.parameters())
        assert step.extra_weight.grad == (-0.25 if batch else None)
        assert not step.has_weight


def test_where_parameters_may_be_unused_a_micro_batch_without_weight_uses_none() -> None:
    step = step_module("none", needs_every_parameter=False)
    step(samples(4).tensors, 4, 16).backward()
    assert all(p.grad is None for p in step.task.parameters())
    assert float(step.extra_weight.grad) == -0.25


class InHalf(Regression):
    """Sums its loss up in half precision, over a weight that half precision cannot express."""

    dtype = torch.bfloat16

    def loss(self, outputs: Tensor, batch: Any) -> WeightedLoss:
        return WeightedLoss(outputs.to(self.dtype).sum(), torch.tensor(4097.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_weight_is_not_rounded_to_the_format_of_the_loss(dtype: torch.dtype) -> None:
    task = InHalf()
    task.dtype = dtype
    step = StepModule(
        task, Logbook(), {}, TrainState(), seed=0, averaged_over=1, needs_every_parameter=True
    )
    step(samples(4).tensors, 4, 16).backward()
    assert step.extra_weight.grad == (4097 - 4096) / 16384  # planned: 1024 per sample


def test_the_first_micro_batch_decides_what_a_sample_is_planned_to_weigh() -> None:
    for kind, weight in (("mean", 1.0), ("sum", 2.0), ("none", 1.0)):
        step = step_module(kind)
        step(samples(4).tensors, 4, 16)
        assert step._state.sample_weights == {"loss": weight}
        step.task.kind = "sum"
        step(samples(1).tensors, 1, 16)
        assert step._state.sample_weights == {"loss": weight}
    extra, gradients = [], []
    for planned in (0.25, 1.0, 8.0):
        step = StepModule(
            TokenRegression(),
            Logbook(),
            {},
            TrainState(sample_weights={"loss": planned}),
            seed=0,
            averaged_over=1,
            needs_every_parameter=True,
        )
        step(weighted_samples([2.0, 1.0]).tensors, 2, 3).backward()
        step(weighted_samples([0.5]).tensors, 1, 3).backward()
        true = 1 + float(step.extra_weight.grad)
        extra.append(true)
        gradients.append([p.grad / true for p in step.task.parameters()])
    assert extra == pytest.approx([3.5 / 0.75, 3.5 / 3, 3.5 / 24])
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0])
