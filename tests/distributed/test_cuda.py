"""On GPUs: the same as on the CPU, and over NCCL the same as on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import Regression, assert_equal_bits, assert_same, fit, measured, samples, weights
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.regression import MeanAbsoluteError

from trainer.comm_hooks.beside import Beside
from trainer.speed.step_times import DeviceMarks
from trainer.watch import watch

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


PARTS = ("data", "forward", "backward", "optimizer")
LOGGED: dict[str, Any] = {"train": samples(24), "val": samples(7), "log_every_n_steps": 1}


def test_a_step_is_timed_beside_validations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_events, take = [], DeviceMarks.take

    def noting(marks: DeviceMarks, parts: Any) -> Any:
        num_events.append(len(marks._events))
        return take(marks, parts)

    monkeypatch.setattr(DeviceMarks, "take", noting)
    options: dict[str, Any] = {**OPTIONS, **LOGGED, "validate_every_n_steps": 1}
    found = fit(Measured(), tmp_path, accelerator="cuda", **options).metrics
    # The four phases of a step and its end; an epoch's first step looks for one more batch before.
    assert num_events[0] == 0
    assert set(num_events[1:]) <= {5, 6}
    assert not watch.listeners
    parts = sum(found[f"perf/{name}_ms"] for name in PARTS)
    assert parts == pytest.approx(found["perf/step_ms"], rel=0.3, abs=1)


@TWO_GPUS
def test_communication_is_timed(tmp_path: Path) -> None:
    options: dict[str, Any] = {**OPTIONS, **LOGGED, "accelerator": "cuda", "devices": 2}
    found = fit(Measured(), tmp_path, **options).metrics
    assert 0 <= found["perf/comm_hidden_ms"] <= found["perf/comm_ms"]
    parts = sum(found[f"perf/{name}_ms"] for name in (*PARTS, "comm", "wait"))
    parts -= found["perf/comm_hidden_ms"]
    assert parts == pytest.approx(found["perf/step_ms"], rel=0.3, abs=1)


def test_rows_are_taken_out_of_tensors_on_the_device(on_cpu: Any, tmp_path: Path) -> None:
    there = TensorDataset(*(tensor.cuda() for tensor in samples(20).tensors))
    task = Measured()
    fit(task, tmp_path, train=there, accelerator="cuda", pin_memory=False, **OPTIONS)
    assert_same({name: value.cpu() for name, value in weights(task).items()}, on_cpu[0], 1e-7)


def test_the_rest_of_a_hook_runs_in_a_stream_of_its_own() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    own, beside = torch.cuda.current_stream(device), Beside(device)
    gradient = torch.zeros(1 << 20, device=device)
    torch.cuda._sleep(100_000_000)
    gradient.add_(1)  # the backward, which is not done yet
    streams = []

    def finish(begun: torch.Tensor, group: Any) -> torch.Tensor:
        assert group is None
        streams.append(torch.cuda.current_stream(device))
        torch.cuda._sleep(100_000_000)
        return begun.mul_(2).add_(1)

    found = beside.run(lambda: gradient.mul_(3), finish).wait()
    beside.close()
    assert own not in streams
    assert torch.cuda.current_stream(device) == own
    assert bool((found == (1 * 3) * 2 + 1).all())  # this stream has waited for the other


class Wide(Regression):
    """Has a matrix that is worth compressing."""

    def __init__(self) -> None:
        super().__init__()
        middle = nn.Linear(8, 8).double()
        with torch.no_grad():
            middle.weight.copy_(torch.eye(8).flip(0) + torch.arange(64).view(8, 8) / 100)
            middle.bias.zero_()
        first, last = self.net[0], self.net[2]
        self.net = nn.Sequential(
            first, nn.ZeroPad1d((0, 3)), middle, nn.Tanh(), nn.ZeroPad1d((0, -3)), last
        )


def compressed(run_dir: Path, **options: Any) -> dict[str, torch.Tensor]:
    task = Wide()
    fit(task, run_dir, train=samples(20), devices=2, **OPTIONS, **options)
    return {name: value.cpu() for name, value in weights(task).items()}


@TWO_GPUS
def test_powersgd_compresses_as_on_the_cpu(tmp_path: Path) -> None:
    powersgd = {"comm_hook": "powersgd", "powersgd_rank": 1, "powersgd_start_step": 0}
    there = compressed(tmp_path / "there", accelerator="cuda", **powersgd)
    here = compressed(tmp_path / "here", accelerator="cpu", **powersgd)
    assert_same(there, here, tolerance=1e-6)
    exact = compressed(tmp_path / "exact", accelerator="cpu")
    assert not torch.allclose(here["net.2.weight"], exact["net.2.weight"], atol=1e-4)


class Normed(Regression):
    """Has a layer whose statistics are those of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(5).double())


@TWO_GPUS
def test_sync_batchnorm_sees_the_whole_batch(tmp_path: Path) -> None:
    found: list[dict[str, torch.Tensor]] = []
    for devices in (1, 2):
        task = Normed()
        own: dict[str, Any] = {**OPTIONS, "drop_last": True, "sync_batchnorm": devices > 1}
        fit(
            task,
            tmp_path / str(devices),
            train=samples(20),
            accelerator="cuda",
            devices=devices,
            **own,
        )
        found.append({name: value.cpu() for name, value in weights(task).items()})
    assert "net.1.running_var" in found[0]
    assert_same(found[1], found[0], tolerance=1e-6)


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
