"""Training over real ranks, compared with plain loops in one process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import (
    Regression,
    TokenRegression,
    adamw,
    assert_equal_bits,
    assert_same,
    fit,
    fit_on,
    on_ranks,
    samples,
    sgd,
    train_by_hand,
    weighted_samples,
    weights,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from trainer import Callback, DataModule, OptimizerSetup, Trainer, WeightedLoss, distributed

pytestmark = pytest.mark.timeout(60)

EVEN = {"global_batch_size": 5, "max_epochs": 2}
WORLD_SIZES = (1, 3, 4)  # 2 is that of most other tests


class WithTemperature(Regression):
    """Has a parameter that only the loss uses."""

    def __init__(self, optimizer: Any = sgd) -> None:
        super().__init__(optimizer)
        self.temperature = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return super().loss(outputs / self.temperature.exp(), batch)


class Skipping(TokenRegression):
    """Gives up on micro-batches without weight in two ways: None, and a NaN total of weight 0."""

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        total, weight = super().loss(outputs, batch)
        if weight > 0:
            return WeightedLoss(total, weight)
        return None if batch[0][0, 0] > 0 else WeightedLoss(total * torch.nan, 0)


# Micro-batches of 2, global batches of 8; the second global batch has no weight at all, and the
# last one has three samples.
TOKENS = [5, 1, 0, 0, 0, 0, 9, 2] + [0] * 8 + [1, 0, 0, 3, 0, 0, 50, 1] + [7, 0, 1]


def fits_of_every_shape(run_dir: Path) -> dict[str, Any]:
    """Train in many ways on the ranks that are there; return the weights by name."""
    found = {}

    def train(name: str, task: Any, data: Any, **options: Any) -> None:
        result = fit(task, run_dir / name, train=data, max_epochs=2, **options)
        clock = result.step, result.epoch, result.samples
        found[name] = clock, result.metrics["train/loss"], weights(task)

    for size in range(1, 18):
        optimizer = sgd if size % 2 else adamw
        train(f"size {size}", Regression(optimizer), samples(size), global_batch_size=5)
    for micro in (1, 2, 3):
        data = samples(13)
        options = {"global_batch_size": 7, "micro_batch_size": micro}
        train(f"micro {micro}", Regression(adamw), data, **options)
        train(f"clipped {micro}", Regression(), data, gradient_clip_norm=0.5, **options)
        train(f"temperature {micro}", WithTemperature(), data, **options)
        tokens = weighted_samples(TOKENS)
        options["global_batch_size"] = 8
        train(f"tokens {micro}", Skipping(adamw), tokens, **options)
    train("tokens", Skipping(), weighted_samples(TOKENS), global_batch_size=8)
    return found


@pytest.fixture(scope="module")
def by_hand() -> dict[str, Any]:
    """The same trainings, written out."""
    found = {}

    def train(name: str, task: Any, data: Any, size: int, clip: float | None = None) -> None:
        loss = train_by_hand(task, data, global_batch_size=size, epochs=2, clip=clip)
        found[name] = (2 * -(-len(data) // size), 2, 2 * len(data)), loss, weights(task)

    for size in range(1, 18):
        train(f"size {size}", Regression(sgd if size % 2 else adamw), samples(size), 5)
    for micro in (1, 2, 3):
        train(f"micro {micro}", Regression(adamw), samples(13), 7)
        train(f"clipped {micro}", Regression(), samples(13), 7, clip=0.5)
        train(f"temperature {micro}", WithTemperature(), samples(13), 7)
        train(f"tokens {micro}", TokenRegression(adamw), weighted_samples(TOKENS), 8)
    train("tokens", TokenRegression(), weighted_samples(TOKENS), 8)
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_weights_are_those_of_a_plain_loop_on_the_whole_global_batch(
    world_size: int, by_hand: dict[str, Any], tmp_path: Path
) -> None:
    ranks = on_ranks(world_size, fits_of_every_shape, tmp_path)
    for found in ranks:
        assert found.keys() == by_hand.keys()
        for name, (clock, loss, final) in found.items():
            expected_clock, expected_loss, expected = by_hand[name]
            tolerance = 1e-6 if "tokens" in name else 1e-9  # the true weight travels in float32
            assert clock == expected_clock, name
            assert loss == pytest.approx(expected_loss, rel=tolerance), name
            assert_same(final, expected, tolerance)
            assert_equal_bits(final, ranks[0][name][-1])


class Normalized(Regression):
    """Has BatchNorm, which refuses a batch without samples or with one."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(5).double())


def normalized(run_dir: Path) -> tuple[int, dict[str, Tensor]]:
    task = Normalized()
    options = {"global_batch_size": 6, "micro_batch_size": 3, "max_epochs": 1}
    result = fit(task, run_dir, train=samples(8), **options)
    return result.step, weights(task)


def test_a_rank_without_samples_runs_no_forward(tmp_path: Path) -> None:
    (step, first), (_, second) = on_ranks(2, normalized, tmp_path)
    assert step == 2
    assert int(first["net.1.num_batches_tracked"]) == 2
    assert_equal_bits(first, second)


class CollectiveCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Marking(Regression):
    """Notes after each step which collectives there were since the one before."""

    def on_fit_start(self) -> None:
        self.counter = CollectiveCounter()
        self.counter.__enter__()
        self.per_step: list[list[str]] = []

    def after_optimizer_step(self) -> None:
        self.per_step.append(self.counter.names)
        self.counter.names = []


def collectives_per_step(run_dir: Path) -> list[list[str]]:
    task = Marking().float()
    options = {"global_batch_size": 12, "micro_batch_size": 2, "max_steps": 8}
    try:
        data = samples(200, torch.float32)
        fit(task, run_dir, train=data, log_every_n_steps=6, **options)
    finally:
        task.counter.__exit__(None, None, None)
    return task.per_step


def test_a_step_with_accumulation_costs_one_all_reduce_and_nothing_else(tmp_path: Path) -> None:
    for per_step in on_ranks(2, collectives_per_step, tmp_path):
        assert len(per_step) == 8
        one = ["allreduce_.default"]
        # DDP settles its buckets in the first two steps; after step 6 comes a log event.
        assert per_step[2:6] == [one] * 4
        assert len(per_step[6]) > 1, "the counter does not count"
        assert per_step[7] == one


class Masks(Regression):
    """Notes the dropout mask of every sample."""

    def on_fit_start(self) -> None:
        self.masks: dict[tuple[int, float], tuple[float, ...]] = {}

    def forward(self, batch: Any) -> Tensor:
        mask = nn.functional.dropout(torch.ones(len(batch[0]), 64), training=self.training)
        for target, row in zip(batch[1].tolist(), mask.tolist(), strict=True):
            self.masks[self.run.step, target] = tuple(row)
        return super().forward(batch)


def dropout_masks(run_dir: Path) -> dict[Any, Any]:
    task = Masks()
    options = {"global_batch_size": 8, "micro_batch_size": 2, "max_epochs": 2}
    fit(task, run_dir, train=samples(13), **options)
    return task.masks


def test_dropout_masks_depend_on_the_sample_and_not_on_the_rank(tmp_path: Path) -> None:
    found = []
    for world_size in (1, 2, 3):
        ranks = on_ranks(world_size, dropout_masks, tmp_path / str(world_size))
        masks = {key: mask for rank in ranks for key, mask in rank.items()}
        assert len(masks) == sum(len(rank) for rank in ranks) == 26
        found.append(masks)
    assert len(set(found[0].values())) == 26, "a mask is drawn twice"
    assert found[0] == found[1] == found[2]


class Drawing(Regression):
    """Its hooks draw: noise on gradients and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def on_epoch_start(self) -> None:
        self.drawn.append(random.random() + float(np.random.rand()))

    def before_optimizer_step(self) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad += torch.randn_like(parameter) / 10

    def on_validation_end(self, metrics: Any) -> None:
        self.drawn.append(float(torch.rand(())))


def noisy_fit(run_dir: Path) -> Any:
    task = Drawing()
    options: dict[str, Any] = {"global_batch_size": 6, "micro_batch_size": 2, "max_epochs": 2}
    fit(task, run_dir, train=samples(13), val=samples(3), **options)
    return weights(task), task.drawn


def test_hooks_draw_the_same_on_every_rank_and_at_every_world_size(tmp_path: Path) -> None:
    ((alone, drawn),) = on_ranks(1, noisy_fit, tmp_path)
    assert len(set(drawn)) == 4, "a number is drawn twice"
    first, *others = on_ranks(3, noisy_fit, tmp_path)
    assert_same(first[0], alone)
    assert first[1] == drawn
    for other in others:
        assert_equal_bits(other[0], first[0])
        assert other[1] == drawn


class Faint(Regression):
    """Its gradients are small enough for fp16 from the first step on."""

    def __init__(self) -> None:
        super().__init__(lambda params: torch.optim.SGD(params, lr=10, momentum=0.9))
        self.float()

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return super().loss(outputs, batch) / 100


def half_precision(run_dir: Path) -> dict[str, Any]:
    data = samples(16, torch.float32)
    found = {}
    options = {"global_batch_size": 6, "micro_batch_size": 2, "max_epochs": 2}
    for name in ("fp32", "fp16", "bf16"):
        task = Faint()
        fit(task, run_dir / name, train=data, precision=name, gradient_clip_norm=0.005, **options)
        found[name] = weights(task)
    return found


def test_half_precision_over_ranks_is_close_to_full_precision(tmp_path: Path) -> None:
    expected = Faint()
    train_by_hand(expected, samples(16, torch.float32), global_batch_size=6, epochs=2, clip=0.005)
    ranks = on_ranks(2, half_precision, tmp_path)
    for found in ranks:
        assert_same(found["fp32"], expected, 1e-5)
        assert_same(found["fp16"], expected, 5e-3)
        assert_same(found["bf16"], expected, 5e-2)
        for name in ("fp16", "bf16"):
            assert_equal_bits(found[name], ranks[0][name])
            different = [not torch.equal(found[name][k], found["fp32"][k]) for k in found[name]]
            assert any(different), f"{name} computes in fp32"


class Overflowing(Regression):
    """Its loss is far too large for fp16 in one step, on one rank."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        loss = super().loss(outputs.float(), batch)
        return loss * 1e38 if self.run.step == 2 and self.run.rank == 1 else loss


def overflow(run_dir: Path) -> tuple[int, Any, Any]:
    task = Overflowing(adamw).float()
    options = {"global_batch_size": 4, "max_steps": 3, "precision": "fp16"}
    result = fit(task, run_dir, train=samples(12, torch.float32), **options)
    shorter = Overflowing(adamw).float()
    options["max_steps"] = 2
    fit(shorter, run_dir / "shorter", train=samples(12, torch.float32), **options)
    return result.step, weights(task), weights(shorter)


def test_an_overflow_on_one_rank_skips_the_update_on_all_and_counts_the_step(
    tmp_path: Path,
) -> None:
    for step, final, before in on_ranks(2, overflow, tmp_path):
        assert step == 3
        assert_equal_bits(final, before)


def caught(run_dir: Path, error: type[Exception], **options: Any) -> tuple[str, list[str]]:
    """Fit until ``error``; return its message and the names of the checkpoints."""
    with pytest.raises(error) as info:
        fit(run_dir=run_dir, **options)
    distributed.barrier()
    return str(info.value), sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))


def broken_samples(run_dir: Path) -> list[Any]:
    x, y = samples(16).tensors
    y[13] = torch.nan  # in the second step, of a micro-batch of rank 1
    options: dict[str, Any] = {
        "train": TensorDataset(x, y),
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "max_epochs": 3,
    }
    never = {"every_n_epochs": None}
    return [
        caught(
            run_dir / "log",
            FloatingPointError,
            task=Regression(),
            log_every_n_steps=3,
            checkpoint=never,
            **options,
        ),
        caught(
            run_dir / "save",
            FloatingPointError,
            task=Regression(),
            limit_train_batches=None,
            checkpoint={"every_n_steps": 1, **never},
            **{**options, "train": TensorDataset(torch.cat([x, x]), torch.cat([y, y]))},
        ),
    ]


def test_a_nan_on_one_rank_stops_all_before_anything_is_saved(tmp_path: Path) -> None:
    for at_log, at_save in on_ranks(2, broken_samples, tmp_path):
        message, checkpoints = at_log
        assert "first at step 2, on rank 1, for the samples at positions 12 to 13" in message
        assert checkpoints == []
        message, checkpoints = at_save
        assert "first at step 2, on rank 1, for the samples at positions 12 to 13" in message
        assert checkpoints == ["step-00000001"], "a save after the NaN, or none before it"


class Requests(Callback):
    """Asks for a save at the first log event and for a stop at the second."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    def on_log(self, run: Any, metrics: dict[str, float]) -> None:
        if run.step == 2:
            run.request_save()
        if run.step == 4:
            run.request_stop("enough")

    def on_save(self, run: Any, path: Path) -> None:
        self.saved.append(int(path.name.removeprefix("step-")))


class Naming(Regression):
    """Logs a name that the other ranks do not have, and one that all have."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        self.log(f"only_{self.run.rank}", self.run.rank + 1.0)
        self.log("sum", batch[1].sum(), weight=1)
        return super().loss(outputs, batch)


def requests(run_dir: Path) -> Any:
    options = {"global_batch_size": 4, "max_epochs": 9, "log_every_n_steps": 2}
    callback = Requests()
    result = fit(Naming(), run_dir, train=samples(20), callbacks=[callback], **options)
    return result, callback.saved


def test_requests_of_callbacks_take_effect_on_all_ranks_at_once(tmp_path: Path) -> None:
    ranks = on_ranks(2, requests, tmp_path)
    assert [result.step for result, _ in ranks] == [4, 4]
    assert [result.stop_reason for result, _ in ranks] == ["enough", "enough"]
    assert ranks[0][1] == [2, 4]
    assert ranks[1][1] == [], "a callback ran on rank 1"


def test_ranks_may_log_different_names(tmp_path: Path) -> None:
    metrics = on_ranks(2, requests, tmp_path)[0][0].metrics
    assert metrics["train/only_0"] == 1
    assert metrics["train/only_1"] == 2
    sums = samples(20).tensors[1][8:16].reshape(4, 2).sum(dim=1)
    assert metrics["train/sum"] == pytest.approx(float(sums.mean()), rel=1e-12)


def warm_up(params: Any) -> OptimizerSetup:
    optimizer = adamw(params)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 10)
    return OptimizerSetup(optimizer, schedule)


def interrupted(run_dir: Path) -> dict[str, Any]:
    found = {}
    options: dict[str, Any] = {"train": samples(17), "global_batch_size": 4, "shuffle": True}
    options["micro_batch_size"] = 1
    for name, resume in (("through", None), ("auto", "auto"), ("path", "last")):
        task = Regression(warm_up)
        folder = run_dir / name
        if resume is not None:  # stop in the middle of the second epoch
            fit(Regression(warm_up), folder, max_steps=7, **options)
        if resume == "last":
            resume = str(folder / "checkpoints" / "step-00000007")
        distributed.barrier()
        result = fit(task, folder, max_epochs=3, resume=resume, **options)
        found[name] = (result.step, result.epoch, result.samples, weights(task))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_run_ends_with_the_same_bits(world_size: int, tmp_path: Path) -> None:
    for found in on_ranks(world_size, interrupted, tmp_path):
        for name in ("auto", "path"):
            assert found[name][:3] == found["through"][:3] == (15, 3, 51)
            assert_equal_bits(found[name][3], found["through"][3])


def test_the_calling_process_gets_weights_and_result(tmp_path: Path) -> None:
    task, expected = Regression(adamw), Regression(adamw)
    train_by_hand(expected, samples(9), global_batch_size=4, epochs=2)
    result = fit_on(2, task, tmp_path, train=samples(9), global_batch_size=4, max_epochs=2)
    assert_same(task, expected)
    assert (result.step, result.epoch, result.samples) == (6, 2, 18)
    assert task.run.world_size == 1, "the task still thinks that it is in the run"


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


class DrawingData(DataModule):
    """Notes what the global generators give where the training set is built."""

    def __init__(self) -> None:
        self.drawn: tuple[float, float, float] | None = None

    def train_dataset(self) -> Any:
        self.drawn = draws()
        return samples(4)


def fit_drawing(run_dir: Path) -> Any:
    random.seed(distributed.rank() + 100)
    data = DrawingData()
    options: dict[str, Any] = {"max_steps": 1, "callbacks": False, "logger": False}
    Trainer(accelerator="cpu", run_dir=str(run_dir), **options).fit(Regression(), data)
    return data.drawn


def test_every_rank_builds_its_data_from_the_same_random_numbers(tmp_path: Path) -> None:
    alone = fit_drawing(tmp_path / "alone")
    assert on_ranks(2, fit_drawing, tmp_path / "two") == [alone, alone]


class FreezesOnOneRank(Regression):
    def on_epoch_start(self) -> None:
        self.net[0].bias.requires_grad_(self.run.rank == 0 or self.run.epoch == 0)


def test_freezing_on_one_rank_only_is_an_error_and_no_hang(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"differ between ranks.*net\.0\.bias"):
        fit_on(2, FreezesOnOneRank(), tmp_path, train=samples(4), max_epochs=2)
