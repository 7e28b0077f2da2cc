"""On GPUs: the same as on the CPU, and over NCCL the same as on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import Regression, assert_equal_bits, assert_same, fit, measured, samples, weights
from torchmetrics.regression import MeanAbsoluteError

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
OPTIONS: dict[str, Any] = {"global_batch_size": 6, "max_epochs": 3}


class Measured(Regression):
    """Has a metric and knows where its batches are."""

    def loss(self, outputs: Any, batch: Any) -> Any:
        assert outputs.device == batch[1].device == self.run.device
        self.log("mean", outputs.mean())
        return super().loss(outputs, batch)

    def build_metrics(self, split: str) -> Any:
        return {"mae": MeanAbsoluteError()}

    def update_metrics(self, metrics: Any, outputs: Any, batch: Any) -> None:
        metrics["mae"].update(outputs, batch[1])


def fitted(run_dir: Path, **options: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    task = Measured()
    result = fit(task, run_dir, train=samples(20), val=samples(7), **{**OPTIONS, **options})
    return {name: value.cpu() for name, value in weights(task).items()}, measured(result.metrics)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return fitted(tmp_path_factory.mktemp("cpu"), accelerator="cpu")


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 2}, {"num_workers": 1}])
def test_one_gpu_trains_like_the_cpu(options: dict[str, Any], on_cpu: Any, tmp_path: Path) -> None:
    found, metrics = fitted(tmp_path, accelerator="cuda", **options)
    assert_same(found, on_cpu[0], tolerance=1e-7)
    assert metrics == pytest.approx(on_cpu[1], rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_close(precision: str, on_cpu: Any, tmp_path: Path) -> None:
    found, _ = fitted(tmp_path, accelerator="cuda", precision=precision)
    assert_same(found, on_cpu[0], tolerance=0.1)


def test_ranks_start_beside_a_parent_that_uses_cuda(on_cpu: Any, tmp_path: Path) -> None:
    torch.ones(1, device="cuda")
    found, _ = fitted(tmp_path, accelerator="cpu", devices=2)
    assert_same(found, on_cpu[0])


@TWO_GPUS
@pytest.mark.parametrize("options", [{}, {"comm_hook": "bf16"}, {"micro_batch_size": 1}])
def test_two_gpus_train_like_one(options: dict[str, Any], on_cpu: Any, tmp_path: Path) -> None:
    found, metrics = fitted(tmp_path, accelerator="cuda", devices=2, **options)
    exact = "comm_hook" not in options
    assert_same(found, on_cpu[0], tolerance=1e-7 if exact else 0.05)
    assert metrics == pytest.approx(on_cpu[1], rel=1e-5 if exact else 0.2)


REPRODUCIBLE: dict[str, Any] = {"reproducible": True, "micro_batch_size": 1}


def test_one_gpu_gives_the_same_bits_twice_and_in_other_buckets(tmp_path: Path) -> None:
    once, events = fitted(tmp_path / "once", accelerator="cuda", **REPRODUCIBLE)
    again, same = fitted(tmp_path / "again", accelerator="cuda", bucket_cap_mb=1, **REPRODUCIBLE)
    assert_equal_bits(again, once)
    assert same == events


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(n, marks=pytest.mark.skipif(torch.cuda.device_count() < n, reason="few GPUs"))
        for n in (2, 4)
    ],
)
def test_several_gpus_give_the_bits_of_one(ranks: int, tmp_path: Path) -> None:
    alone, events = fitted(tmp_path / "one", accelerator="cuda", **REPRODUCIBLE)
    options: dict[str, Any] = {**REPRODUCIBLE, "bucket_cap_mb": 1e-4}
    found, same = fitted(tmp_path / "several", accelerator="cuda", devices=ranks, **options)
    assert_equal_bits(found, alone)
    assert same == events
