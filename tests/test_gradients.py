"""Checks, correction and clipping of gradients."""

from __future__ import annotations

import pytest
import torch
from support import Regression, samples

from trainer.gradients import Gradients, trained_names
from trainer.logbook import Logbook
from trainer.step import StepModule


def after_backward(may_miss: bool = False) -> tuple[StepModule, Gradients]:
    step = StepModule(Regression(), Logbook(), {})
    gradients = Gradients(step, may_miss)
    step(samples(4).tensors, 4, 4).backward()
    return step, gradients


def grads(step: StepModule) -> list[torch.Tensor]:
    return [p.grad.clone() for p in step.task.parameters() if p.grad is not None]


def test_complete_gradients_pass() -> None:
    _, gradients = after_backward()
    gradients.check()


def test_a_missing_gradient_is_named_unless_it_may_miss() -> None:
    for may_miss in (False, True):
        step, gradients = after_backward(may_miss)
        step.task.net[2].bias.grad = None
        if may_miss:
            gradients.check()
        else:
            with pytest.raises(ValueError, match=r"no gradient for net\.2\.bias: .*unused"):
                gradients.check()


def test_of_many_missing_gradients_the_first_are_named() -> None:
    task = Regression()
    for number in range(10):
        task.register_parameter(f"spare{number}", torch.nn.Parameter(torch.zeros(1)))
    step = StepModule(task, Logbook(), {})
    gradients = Gradients(step, may_miss=False)
    step(samples(4).tensors, 4, 4).backward()
    with pytest.raises(ValueError, match=r"spare0, .*spare7 and 2 more parameters"):
        gradients.check()


def test_parameters_frozen_or_thawed_since_the_wrapping_are_refused() -> None:
    step, gradients = after_backward()
    gradients.clear()
    step.task.net[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"net\.0\.weight changed from True to False"):
        gradients.check()
    assert trained_names(step.task) == ("net.0.bias", "net.2.weight", "net.2.bias")
    gradients = Gradients(step, may_miss=True)
    gradients.check()
    step.task.net[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"changed from False to True.*on_epoch_start"):
        gradients.check()


@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
def test_gradients_over_the_planned_weight_become_those_over_the_true_weight(
    loss_scale: float,
) -> None:
    step, gradients = after_backward()
    before = grads(step)
    step.extra_weight.grad = torch.tensor(3.0 * loss_scale)
    assert gradients.correct(loss_scale)
    torch.testing.assert_close(grads(step), [grad / 4 for grad in before])


@pytest.mark.parametrize("extra", [None, 0.0])
def test_the_planned_weight_leaves_gradients_to_the_last_bit(extra: float | None) -> None:
    step, gradients = after_backward()
    before = grads(step)
    step.extra_weight.grad = None if extra is None else torch.tensor(extra)
    assert gradients.correct(1.0)
    torch.testing.assert_close(grads(step), before, rtol=0, atol=0)


def test_without_any_weight_there_is_nothing_to_step_on() -> None:
    step, gradients = after_backward()
    step._logbook.begin(step=2, position=0, num_samples=3)  # a step without a loss so far
    assert not step.has_weight
    step.extra_weight.grad = torch.tensor(-1.0)
    assert not gradients.correct(1.0)


def test_weights_too_small_for_their_sum_are_an_error_and_not_a_skipped_step() -> None:
    step, gradients = after_backward()
    step.extra_weight.grad = torch.tensor(-1.0 + 2**-23)
    with pytest.raises(ValueError, match="too small"):
        gradients.correct(1.0)


def test_clipping_is_by_the_global_norm() -> None:
    step, gradients = after_backward()
    before = grads(step)
    norm = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in before]))
    gradients.clip(None)
    gradients.clip(float(norm) * 2)
    torch.testing.assert_close(grads(step), before, rtol=0, atol=0)
    gradients.clip(0.5)
    torch.testing.assert_close(
        grads(step), [grad * 0.5 / norm for grad in before], rtol=1e-5, atol=0
    )


def test_clear_forgets_everything() -> None:
    step, gradients = after_backward()
    step.extra_weight.grad = torch.tensor(0.0)
    gradients.clear()
    assert grads(step) == []
    assert step.extra_weight.grad is None
