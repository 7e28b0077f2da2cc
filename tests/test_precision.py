"""Autocast and loss scaling in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import Regression, adamw, assert_equal_bits, assert_same, fit, samples, weights
from torch import Tensor

from trainer import WeightedLoss
from trainer.precision import LossScaler, Precision

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_matrix_products_run_in_the_named_format(name: str, dtype: torch.dtype) -> None:
    precision = Precision(name, CPU)
    with precision.autocast():
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype
    assert LossScaler(precision, averaged_over=1).is_enabled() == (name == "fp16")


class Watching(Regression):
    """Notes the norms of the gradients that reach the hooks; its loss overflows at one step."""

    def __init__(self, overflow_at: int | None = None) -> None:
        super().__init__(adamw)
        self.float()
        self.overflow_at = overflow_at
        self.norms: list[tuple[float, float]] = []
        self.stepped: list[bool] = []

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        factor = 1e38 if self.run.step == self.overflow_at else 1e-2
        return super().loss(outputs.float(), batch) * factor

    def before_optimizer_step(self) -> None:
        self.before = (self.norm(), weights(self))

    def after_optimizer_step(self) -> None:
        norm, old = self.before
        self.norms.append((norm, self.norm()))
        self.stepped.append(any(not torch.equal(old[k], v) for k, v in weights(self).items()))

    def norm(self) -> float:
        grads = [p.grad.flatten() for p in self.parameters() if p.grad is not None]
        return float(torch.cat(grads).norm())


def watch(run_dir: Path, overflow_at: int | None = None, **options: Any) -> Watching:
    task = Watching(overflow_at)
    options = {"global_batch_size": 4, "max_steps": 3, "gradient_clip_norm": 1e-3, **options}
    result = fit(task, run_dir, train=samples(12, torch.float32), **options)
    assert result.step == options["max_steps"]
    return task


def test_gradients_are_clipped_after_unscaling_to_the_global_norm(tmp_path: Path) -> None:
    for name in ("fp32", "fp16", "bf16"):
        task = watch(tmp_path / name, precision=name)
        for before, after in task.norms:
            assert 1e-3 < before < 1, "scaled or clipped already"
            assert after == pytest.approx(1e-3, rel=1e-3)


def test_an_overflow_skips_the_update_counts_the_step_and_spoils_nothing(tmp_path: Path) -> None:
    task = watch(tmp_path / "overflow", precision="fp16", overflow_at=1)
    assert task.stepped == [True, False, True]
    assert all(value.isfinite().all() for value in weights(task).values())


class Heavy(Watching):
    """Weighs a sample by as much as a picture has pixels."""

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        weight = 250_000.0 * len(outputs)
        return WeightedLoss(super().loss(outputs, batch) * weight, weight)


def test_heavy_samples_overflow_no_gradient(tmp_path: Path) -> None:
    task = Heavy()
    options: dict[str, Any] = {"global_batch_size": 4, "max_steps": 3, "precision": "fp16"}
    fit(task, tmp_path, train=samples(12, torch.float32), **options)
    assert task.stepped == [True, True, True]


class Pausing(Watching):
    """Has no loss at one step."""

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        return None if self.run.step == 1 else super().loss(outputs, batch)


@pytest.mark.parametrize("unused", [False, True])
def test_a_step_without_weight_counts_and_updates_nothing(unused: bool, tmp_path: Path) -> None:
    found, expected = Pausing(), Watching()
    x, y = samples(12, torch.float32).tensors
    optimizer = expected.configure_optimizers()
    for batch in ((x[:4], y[:4]), (x[8:], y[8:])):
        optimizer.zero_grad()
        expected.loss(expected(batch), batch).backward()
        optimizer.step()
    options: dict[str, Any] = {"precision": "fp16", "find_unused_parameters": unused}
    options |= {"global_batch_size": 4, "max_epochs": 1}
    result = fit(found, tmp_path, train=samples(12, torch.float32), **options)
    assert result.step == 3
    assert found.stepped == [True, True]
    assert_same(found, expected, 2e-3)


@pytest.mark.parametrize(("before", "after"), [("fp32", "fp16"), ("fp16", "fp32"), ("fp16",) * 2])
def test_a_run_may_go_on_in_another_precision(
    before: str, after: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watch(tmp_path, precision=before, max_steps=2)
    options: dict[str, Any] = {"precision": after, "resume": "auto"}
    if before != after:
        with pytest.raises(ValueError, match=f"optimizer: precision {before} -> {after}\n"):
            watch(tmp_path, **options)
        options["accept_changes"] = ["optimizer"]
    result = watch(tmp_path, **options)
    starts_anew = "not trained in fp16; its loss scale starts anew" in capsys.readouterr().out
    assert starts_anew == (before == "fp32")
    assert result.stepped == [True]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_loss_scale_means_the_same_on_any_number_of_ranks(ranks: int) -> None:
    one, several = (LossScaler(Precision("fp16", CPU), count) for count in (1, ranks))
    for scaler in (one, several):
        scaler.scale(torch.ones(()))
    assert several.get_scale() * ranks == pytest.approx(one.get_scale())
    one.update(512.0)
    several.load_state_dict(one.state_dict())
    assert several.get_scale() * ranks == pytest.approx(512)
    one.load_state_dict(several.state_dict())
    assert one.get_scale() == 512


def test_half_precision_keeps_its_weights_in_full_precision(tmp_path: Path) -> None:
    full = watch(tmp_path / "fp32")
    half = watch(tmp_path / "bf16", precision="bf16")
    assert all(p.dtype == torch.float32 for p in half.parameters())
    with pytest.raises(AssertionError):
        assert_equal_bits(half, full)


def test_lightnings_spellings_mean_the_same(tmp_path: Path) -> None:
    found = [watch(tmp_path / name, precision=name) for name in ("bf16", "bf16-mixed")]
    assert_equal_bits(*found)
