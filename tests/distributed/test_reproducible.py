"""``reproducible=true``: the same bits at every power-of-two world size, whatever else changes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from support import (
    Regression,
    TokenRegression,
    adamw,
    assert_equal_bits,
    fit,
    measured,
    on_ranks,
    samples,
    sgd,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from trainer import Callback, OptimizerSetup, TaskModule, distributed
from trainer.checkpoint.writer import read_state

pytestmark = pytest.mark.timeout(120)

WORLD_SIZES = (1, 2, 4, 8)


class Kept(Callback):
    """Keeps what is logged and validated."""

    def __init__(self) -> None:
        self.events: list[dict[str, float]] = []

    def on_log(self, run: Any, metrics: Mapping[str, float]) -> None:
        self.events.append(measured(metrics))

    def on_validation_end(self, run: Any, metrics: Mapping[str, float]) -> None:
        self.events.append(measured(metrics))


class Images(TaskModule):
    """Convolutions, dropout and linear layers, on a schedule that moves the momentum too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(4 * 16, 16),
            nn.Tanh(),
            nn.Linear(16, 3),
        )
        self.turned = nn.Parameter(torch.eye(3, 4).t())  # like the channels: not in rows

    def forward(self, batch: Any) -> Tensor:
        logits: Tensor = self.net(batch[0])
        return (logits @ self.turned.t()) @ self.turned

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        self.log("confidence", outputs.softmax(1).amax(1).mean())
        return nn.functional.cross_entropy(outputs, batch[1])

    def configure_optimizers(self) -> OptimizerSetup:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return OptimizerSetup(optimizer, OneCycleLR(optimizer, 0.02, self.run.total_steps or 1))

    def build_metrics(self, split: str) -> dict[str, Any]:
        from torchmetrics import MeanSquaredError

        return {"mse": MeanSquaredError()}

    def update_metrics(self, metrics: Any, outputs: Tensor, batch: Any) -> None:
        metrics["mse"].update(outputs[:, 0], batch[1].float())


class Gated(Regression):
    """Uses one layer in some micro-batches, another in the rest, and a third never."""

    def __init__(self) -> None:
        super().__init__(adamw)
        torch.manual_seed(2)
        self.even, self.odd, self.never = (nn.Linear(1, 1).double() for _ in range(3))

    def forward(self, batch: Any) -> Tensor:
        hidden = super().forward(batch).unsqueeze(1)
        gate = self.even if float(batch[0].sum()) > 0 else self.odd
        result: Tensor = gate(hidden).squeeze(1)
        return result


class InHalf(Regression):
    """Has its parameters, and so its gradients, in bfloat16."""

    def __init__(self) -> None:
        super().__init__(sgd)
        self.bfloat16()


class Zeros(Regression):
    """Has a parameter whose gradient is -0 in every micro-batch; notes the sign of their sum."""

    def __init__(self) -> None:
        super().__init__(sgd)
        self.idle = nn.Parameter(torch.full((3,), -0.0, dtype=torch.float64))

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        return super().loss(outputs, batch) + (self.idle * -0.0).sum()

    def before_optimizer_step(self) -> None:
        assert self.idle.grad is not None
        self.log("sign", torch.ones(()).copysign(self.idle.grad[0]), weight=1)


class Noisy(Dataset[Any]):
    """Draws from all three generators; torch's in numbers that differ from sample to sample."""

    def __init__(self, count: int) -> None:
        self.x, self.y = samples(count).tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(3 + index % 2)[:3].double() + random.random()
        return self.x[index] + noise / 10, self.y[index]


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.x, self.y = samples(count).tensors

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(self.x, self.y, strict=True))


def images(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randn(count, 1, 8, 8, generator=generator)
    return TensorDataset(pixels, torch.randint(3, (count,), generator=generator))


def tokens(count: int) -> TensorDataset:
    """Samples of which whole micro-batches weigh nothing."""
    x, y = samples(count).tensors
    weight = torch.arange(count, dtype=torch.float64) % 5
    weight[6:12] = weight[count - 3 :] = 0
    return TensorDataset(x, y, weight)


def small(task: TaskModule, **options: Any) -> dict[str, Any]:
    return {"task": task, "train": samples(53), "val": samples(7), **options}


def experiments() -> dict[str, dict[str, Any]]:
    """53 samples in global batches of 24: the last one has 5, in two micro-batches of 8."""
    picture = {"task": Images(), "train": images(53), "val": images(11), "shuffle": True}
    clipped = {"gradient_clip_norm": 0.1}
    return {
        "images": {**picture, **clipped},
        "images in small buckets": {**picture, **clipped, "bucket_cap_mb": 1e-4},
        "images in grads of their own": {**picture, **clipped, "gradient_as_bucket_view": False},
        "images, all searched": {**picture, **clipped, "find_unused_parameters": True},
        "images in bf16": {**picture, "precision": "bf16"},
        "images in fp16": {**picture, "precision": "fp16"},
        "seven micro-batches": {**picture, "global_batch_size": 7 * 3 + 1, "max_epochs": 1},
        "tokens": {"task": TokenRegression(), "train": tokens(53), "val": tokens(7)},
        "unused": small(Gated(), find_unused_parameters=True),
        "unused in small buckets": small(Gated(), find_unused_parameters=True, bucket_cap_mb=1e-4),
        "half": small(InHalf(), train=TensorDataset(*(t.bfloat16() for t in samples(53).tensors)))
        | {"val": None},
        "zeros": small(Zeros()),
        "noise": small(Regression(adamw), train=Noisy(53), shuffle=True),
        "stream": small(Regression(), train=Stream(53)),
        "loader": small(Regression(), train=DataLoader(samples(53), 24))
        | {"global_batch_size": None},
    }


SAME = [
    ("images", "images in small buckets"),
    ("images", "images in grads of their own"),
    ("images", "images, all searched"),
    ("unused", "unused in small buckets"),
]


COMMON: dict[str, Any] = {
    "reproducible": True,
    "micro_batch_size": 3,
    "global_batch_size": 24,
    "max_epochs": 2,
    "log_every_n_steps": 2,
}
STEPS = 6  # of two epochs


def kept_state(checkpoint: Path | None) -> dict[str, Any]:
    """What of a checkpoint, beside the weights, is no matter of time or of ranks."""
    assert checkpoint is not None
    state = read_state(checkpoint)
    del state["train_state"]["time_s"]
    return {k: state[k] for k in ("optimizer", "schedule", "scaler", "train_state", "run")}


def train_all() -> dict[str, Any]:
    found = {}
    for name, options in experiments().items():
        task, kept = options.pop("task"), Kept()
        result = fit(task, Path(mkdtemp()), callbacks=[kept], **{**COMMON, **options})
        found[name] = {"weights": task.state_dict(), "events": kept.events}
        if distributed.rank() == 0:
            found[name]["state"] = kept_state(result.last_checkpoint)
    return found


@cache
def trained(world_size: int) -> Any:
    first, *others = on_ranks(world_size, train_all)
    for other in others:
        for name in other:
            assert_equal_bits(other[name]["weights"], first[name]["weights"])
    return first


@pytest.mark.parametrize("name", experiments())
@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_everything_has_the_same_bits(world_size: int, name: str) -> None:
    found, expected = trained(world_size)[name], trained(1)[name]
    assert_equal_bits(found["weights"], expected["weights"])
    assert_equal_bits(found["events"], expected["events"])
    assert len(found["events"]) >= 2
    assert_equal_bits(found["state"]["optimizer"], expected["state"]["optimizer"])


@pytest.mark.parametrize(("one", "other"), SAME)
def test_buckets_and_the_search_for_unused_parameters_change_nothing(one: str, other: str) -> None:
    for world_size in WORLD_SIZES:
        found = trained(world_size)
        assert_equal_bits(found[other]["weights"], found[one]["weights"])


def test_the_comparison_tells_zeros_apart_and_knows_nan() -> None:
    zero, nan = torch.zeros(2), torch.tensor(torch.nan)
    assert_equal_bits({"x": [nan, float("nan")]}, {"x": [nan, float("nan")]})
    for one, other in ((zero, -zero), (0.0, -0.0), (zero, zero.double())):
        with pytest.raises(AssertionError):
            assert_equal_bits([one], [other])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_sum_of_zeros_is_positive_whatever_is_missing(world_size: int) -> None:
    signs = [e["train/sign"] for e in trained(world_size)["zeros"]["events"] if "train/sign" in e]
    assert signs
    assert set(signs) == {1.0}


def test_in_the_default_mode_bits_do_depend_on_the_world_size() -> None:
    """The tests above see a difference where there is one."""

    def train() -> Any:
        options = experiments()["images"]
        task = options.pop("task")
        fit(task, Path(mkdtemp()), **{**COMMON, **options, "reproducible": False})
        return task.state_dict()

    (alone,), (first, *_) = on_ranks(1, train), on_ranks(4, train)
    assert any(not torch.equal(first[name], alone[name]) for name in alone)


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"method": "fresh"}])
def test_workers_and_the_start_method_change_nothing(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "method" in options:
        monkeypatch.setenv("TRAINER_START_METHOD", options["method"])
    task = Regression(adamw)
    workers = options.get("num_workers", 0)
    experiment = {**experiments()["noise"], "task": task, "num_workers": workers}
    del experiment["task"]
    fit(task, tmp_path, **{**COMMON, **experiment, "devices": 2})
    assert_equal_bits(task.state_dict(), trained(1)["noise"]["weights"])


def train_on(run_dir: Path, upto: int, resume: str | None) -> Any:
    """Train the images to some step, with a checkpoint at each; return weights, events, state."""
    options, kept = experiments()["images"], Kept()
    task = options.pop("task")
    checkpoint = {"every_n_steps": 1, "keep": None}
    stop = Stop(upto)
    common = {**COMMON, "log_every_n_steps": 1, "resume": resume, "checkpoint": checkpoint}
    result = fit(task, run_dir, callbacks=[kept, stop], **{**common, **options})
    state = kept_state(result.last_checkpoint) if distributed.rank() == 0 else None
    return task.state_dict(), kept.events, state


class Stop(Callback):
    """Stops a run at a step, as a preemption does: the length of the run stays the same."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_log(self, run: Any, metrics: Mapping[str, float]) -> None:
        if run.step == self.step:
            run.request_stop("enough")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Where a run of one process is that was never stopped, and what it gave."""
    run_dir = tmp_path_factory.mktemp("whole")
    (found,) = on_ranks(1, train_on, run_dir, STEPS, None)
    return run_dir, found


def resumed_everywhere(folder: Path, whole: Path) -> list[Any]:
    """Resume from every step of a run."""
    return [
        train_on(folder / str(step), STEPS, str(whole / "checkpoints" / f"step-{step:08d}"))
        for step in range(1, STEPS)
    ]


@pytest.mark.parametrize("world_size", WORLD_SIZES[:3])
def test_resuming_at_any_step_on_any_world_size_is_never_having_stopped(
    world_size: int, whole: tuple[Path, Any], tmp_path: Path
) -> None:
    run_dir, (weights, events, state) = whole
    assert len(events) > STEPS
    found = on_ranks(world_size, resumed_everywhere, tmp_path, run_dir)[0]
    for resumed, later, after in found:
        assert_equal_bits(resumed, weights)
        assert later == events[len(events) - len(later) :]
        assert_equal_bits(after, state)


def test_a_run_may_change_its_world_size_again_and_again(
    whole: tuple[Path, Any], tmp_path: Path
) -> None:
    weights, events, state = whole[1]
    seen = []
    for world_size, upto in ((4, 2), (2, 3), (1, 5), (4, STEPS)):
        resumed, more, after = on_ranks(world_size, train_on, tmp_path / "run", upto, "auto")[0]
        seen += more
    assert_equal_bits(resumed, weights)
    assert_equal_bits(after, state)
    losses = [e["train/loss"] for e in seen if "train/loss" in e]
    assert losses == [e["train/loss"] for e in events if "train/loss" in e]
