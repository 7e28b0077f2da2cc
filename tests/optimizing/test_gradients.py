"""Checks, correction and clipping of gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Regression, samples
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.logbook import Logbook
from trainer.optimizing import gradients as gradients_module
from trainer.optimizing.gradients import Gradients, trained_names
from trainer.state import TrainState
from trainer.step import StepModule


def after_backward(may_miss: bool = False) -> tuple[StepModule, Gradients]:
    step = StepModule(
        Regression(),
        Logbook(),
        {},
        TrainState(),
        seed=0,
        averaged_over=1,
        needs_every_parameter=True,
    )
    step(samples(4).tensors, 4, 4).backward()
    return step, gradients_of(step, may_miss)


def gradients_of(
    step: StepModule, may_miss: bool = False, clip_norm: float | None = None
) -> Gradients:
    return Gradients(step, step.task.configure_optimizers(), clip_norm, may_miss)


def correct(step: StepModule, gradients: Gradients, loss_scale: float | None = None) -> bool:
    scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale or 1, enabled=loss_scale is not None)
    return gradients.correct(scaler)


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
    step = StepModule(
        task, Logbook(), {}, TrainState(), seed=0, averaged_over=1, needs_every_parameter=True
    )
    gradients = gradients_of(step)
    step(samples(4).tensors, 4, 4).backward()
    with pytest.raises(ValueError, match=r"spare0, .*spare7 and 2 more:"):
        gradients.check()


def test_parameters_frozen_or_thawed_since_the_wrapping_are_refused() -> None:
    # Frozen after its gradient has come, as in a later micro-batch of the step, or before it.
    for has_gradient in (True, False):
        for may_miss in (True, False):
            step, gradients = after_backward(may_miss)
            if not has_gradient:
                gradients.clear()
            step.task.net[0].weight.requires_grad_(False)
            with pytest.raises(ValueError, match=r"net\.0\.weight changed from True to False"):
                gradients.check()
    assert trained_names(step.task) == ("net.0.bias", "net.2.weight", "net.2.bias")
    gradients = gradients_of(step, may_miss=True)
    gradients.check()
    step.task.net[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"net\.0\.weight changed from False to True.*on_epoch"):
        gradients.check()


@pytest.mark.parametrize("loss_scale", [None, 1024.0])
def test_gradients_over_the_planned_weight_become_those_over_the_true_weight(
    loss_scale: float | None,
) -> None:
    step, gradients = after_backward()
    before = grads(step)
    scale = loss_scale or 1.0
    step.extra_weight.grad = torch.tensor(3.0 * scale)
    assert correct(step, gradients, loss_scale)
    torch.testing.assert_close(grads(step), [grad / scale / 4 for grad in before])


@pytest.mark.parametrize("extra", [None, 0.0])
def test_the_planned_weight_leaves_gradients_to_the_last_bit(extra: float | None) -> None:
    step, gradients = after_backward()
    before = grads(step)
    step.extra_weight.grad = None if extra is None else torch.tensor(extra)
    assert correct(step, gradients)
    torch.testing.assert_close(grads(step), before, rtol=0, atol=0)


def test_without_any_weight_there_is_nothing_to_step_on() -> None:
    step, gradients = after_backward()
    assert step.has_weight
    gradients.clear()  # a step without a loss so far
    assert not step.has_weight
    step.extra_weight.grad = torch.tensor(-1.0)
    assert not correct(step, gradients)


def test_weights_too_small_for_their_sum_are_an_error_and_not_a_skipped_step() -> None:
    step, gradients = after_backward()
    step.extra_weight.grad = torch.tensor(-1.0 + 2**-23)
    with pytest.raises(ValueError, match="too small"):
        correct(step, gradients)


@pytest.mark.parametrize("loss_scale", [None, 1024.0])
def test_where_the_weight_is_not_read_a_sum_too_small_makes_the_weights_nan(
    loss_scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU: a rank without weight reads it and skips the step, so the others must not train.
    monkeypatch.setattr(gradients_module, "_is_slow_to_read", lambda number: True)
    scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale or 1, enabled=loss_scale is not None)
    for extra, is_finite in ((3.0, True), (-1.0 + 2**-23, False)):
        step, gradients = after_backward()
        step.extra_weight.grad = scaler.scale(torch.tensor(extra))
        assert gradients.correct(scaler)
        scaler.step(gradients._optimizer)  # must not take it for an overflow
        assert all(p.isfinite().all() == is_finite for p in step.task.parameters())


def updated(
    kind: type[torch.optim.Optimizer], fused: bool, hooked: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the gradients before an update that divides them by 4, and the weights after it."""
    step, _ = after_backward()
    optimizer = kind(step.task.parameters(), lr=0.1, fused=fused)
    if hooked:
        optimizer.register_step_pre_hook(lambda *_: None)
    gradients = Gradients(step, optimizer, None, False)
    step.extra_weight.grad = torch.tensor(3.0)
    assert gradients.correct(torch.amp.GradScaler("cpu", enabled=False))
    before = grads(step)
    optimizer.step()
    gradients.clear()
    assert getattr(optimizer, "grad_scale", None) is None, "the user's next step would divide too"
    return before, [p.detach() for p in step.task.parameters()]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_fused_optimizer_divides_by_the_weight_itself(kind: type[torch.optim.Optimizer]) -> None:
    whole = grads(after_backward()[0])
    quarter = [grad / 4 for grad in whole]
    found, weights = updated(kind, fused=True)
    torch.testing.assert_close(found, whole, rtol=0, atol=0)
    # Not where a hook of the optimizer reads them.
    found, expected = updated(kind, fused=True, hooked=True)
    torch.testing.assert_close(found, quarter, rtol=0, atol=0)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    found, expected = updated(kind, fused=False)
    torch.testing.assert_close(found, quarter, rtol=0, atol=0)
    torch.testing.assert_close(weights, expected)


class Watching(Regression):
    def before_optimizer_step(self) -> None:
        """Look at the gradients."""


def test_who_reads_gradients_reads_them_divided() -> None:
    for task, clip_norm, plain in (
        (Regression(), None, True),
        (Watching(), None, False),
        (Regression(), 1.0, True),
    ):
        step = StepModule(
            task, Logbook(), {}, TrainState(), seed=0, averaged_over=1, needs_every_parameter=True
        )
        optimizer = torch.optim.SGD(task.parameters(), lr=0.1, fused=True)
        gradients = Gradients(step, optimizer, clip_norm, False)
        assert gradients.update_is_plain == plain
        step(samples(4).tensors, 4, 4).backward()
        whole = grads(step)
        step.extra_weight.grad = torch.tensor(3.0)
        gradients.correct(torch.amp.GradScaler("cpu", enabled=False))
        divisor = 1 if plain and clip_norm is None else 4
        torch.testing.assert_close(grads(step), [grad / divisor for grad in whole])


class Calls(TorchDispatchMode):
    """Notes what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made.append(func)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("loss_scale", [None, 1024.0])
def test_a_rank_with_weight_reads_no_number_from_an_accelerator(
    loss_scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, gradients = after_backward()
    step.extra_weight.grad = torch.tensor(3.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale or 1, enabled=loss_scale is not None)
    scaler.scale(torch.ones(()))
    monkeypatch.setattr(gradients_module, "_is_slow_to_read", lambda number: True)
    with Calls() as calls:
        assert gradients.correct(scaler)
    assert torch.ops.aten._foreach_div_.Tensor in calls.made
    assert torch.ops.aten._local_scalar_dense.default not in calls.made, "a number is read"


def test_clipping_is_by_the_global_norm() -> None:
    step, _ = after_backward()
    before = grads(step)
    norm = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in before]))
    for clip_norm in (None, float(norm) * 2):
        gradients_of(step, clip_norm=clip_norm).clip()
        torch.testing.assert_close(grads(step), before, rtol=0, atol=0)
    gradients_of(step, clip_norm=0.5).clip()
    torch.testing.assert_close(
        grads(step), [grad * 0.5 / norm for grad in before], rtol=1e-5, atol=0
    )


def test_clear_forgets_everything() -> None:
    step, gradients = after_backward()
    step.extra_weight.grad = torch.tensor(0.0)
    gradients.clear()
    assert grads(step) == []
    assert step.extra_weight.grad is None
