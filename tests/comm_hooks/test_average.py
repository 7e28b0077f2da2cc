"""Compressed gradients on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    Regression,
    TokenRegression,
    assert_equal_bits,
    assert_same,
    fit,
    on_ranks,
    samples,
    train_by_hand,
    weighted_samples,
    weights,
)

from trainer import distributed
from trainer.comm_hooks import average, average_hook, overflow_in
from trainer.logbook import Logbook, NotFiniteError
from trainer.precision import DTYPES
from trainer.state import TrainState
from trainer.step import StepModule
from trainer.strategies import DDPStrategy

pytestmark = pytest.mark.timeout(60)

# No weight of the two ranks, and not their sum, can be written in bf16 or fp16.
TOKENS = [4097.0, 1.0, 65537.0, 2.0]


def fits(run_dir: Path) -> dict[str, Any]:
    found = {}
    for name in (None, *DTYPES):
        for cap in (None, 1e-5):
            task = Regression().float()
            options = {"comm_hook": name, "bucket_cap_mb": cap, "micro_batch_size": 2}
            data = samples(19, torch.float32)
            folder = run_dir / f"{name} {cap}"
            fit(task, folder, train=data, global_batch_size=6, max_epochs=2, **options)
            found[f"{name} {cap}"] = weights(task)
    return found


def test_compressed_gradients_train_like_uncompressed_ones(tmp_path: Path) -> None:
    expected = Regression().float()
    train_by_hand(expected, samples(19, torch.float32), global_batch_size=6, epochs=2)
    tolerance = {"None": 1e-5, "fp16": 2e-3, "bf16": 2e-2}
    ranks = on_ranks(2, fits, tmp_path)
    for found in ranks:
        for name, final in found.items():
            assert_same(final, expected, tolerance[name.split()[0]])
            assert_equal_bits(final, ranks[0][name])
        for name in DTYPES:
            plain, compressed = found["None None"], found[f"{name} None"]
            assert any(not torch.equal(plain[k], compressed[k]) for k in plain), "not compressed"


def weight_and_gradient() -> dict[str, tuple[float, torch.Tensor]]:
    """Of one backward with one sample per rank and half the gradient in small numbers."""
    found = {}
    device = torch.device("cpu")
    for name in DTYPES:
        for cap in (None, 1e-5):
            step = StepModule(
                TokenRegression().float(),
                Logbook(),
                {},
                TrainState(sample_weights={"loss": 1.0}),
                seed=0,
                averaged_over=distributed.world_size(),
                needs_every_parameter=True,
            )
            strategy = DDPStrategy(bucket_cap_mb=cap, comm_hook=name)
            module = strategy.setup(step, device)
            data = weighted_samples(TOKENS).tensors
            mine = slice(2 * distributed.rank(), 2 * distributed.rank() + 2)
            for _ in range(3):  # DDP builds its buckets anew after the first time
                step.zero_grad()
                module(tuple(t[mine].float() for t in data), 2, 4).backward()
            assert step.extra_weight.grad is not None
            found[f"{name} {cap}"] = float(step.extra_weight.grad), step.task.net[2].weight.grad
            strategy.teardown()
    return found


def test_the_weight_of_the_batch_arrives_uncompressed() -> None:
    planned, true = len(TOKENS), sum(TOKENS)
    for found in on_ranks(2, weight_and_gradient):
        for extra, gradient in found.values():
            assert extra == true / planned - 1
            assert gradient.abs().sum() > 0


def overflows(run_dir: Path) -> dict[str, str]:
    found = {}
    for hook in ("fp16", "bf16", "powersgd+fp16"):
        options: dict[str, Any] = {"comm_hook": hook, "global_batch_size": 2, "max_steps": 4}
        options |= {"powersgd_start_step": 0} if hook.startswith("powersgd") else {}
        for every in (1, None):  # the weights are looked at first, or the loss
            task = Regression(lambda params: torch.optim.SGD(params, lr=1e-9)).float()
            x, y = samples(8, torch.float32).tensors
            data = torch.utils.data.TensorDataset(x, y * 1e7)
            folder = run_dir / f"{hook} {every}"
            try:
                fit(task, folder, train=data, checkpoint={"every_n_steps": every}, **options)
            except NotFiniteError as error:
                found[f"{hook} {every}"] = str(error)
    return found


def test_a_gradient_beyond_the_range_of_fp16_is_named_as_a_cause(tmp_path: Path) -> None:
    found, _ = on_ranks(2, overflows, tmp_path)
    assert "though the loss did not" in found["fp16 1"]
    assert "became NaN or infinite first" in found["fp16 None"]
    for hook, other in (("fp16", "bf16"), ("powersgd+fp16", "powersgd+bf16")):
        for every in (1, None):
            words = (
                f"a gradient beyond 65504, the range of what comm_hook={hook} sends (use {other})"
            )
            assert f"{words}, " in found[f"{hook} {every}"]
    assert len(found) == 4


def test_a_scaled_loss_and_one_rank_have_no_such_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    assert overflow_in("fp16", is_scaled=False) is None
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    assert overflow_in("fp16", is_scaled=False)
    assert overflow_in("fp16", is_scaled=True) is None


class Bucket:
    """A bucket with two gradients."""

    def __init__(self) -> None:
        self.given = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(()))]
        self.flat = torch.tensor([1.0, 2.0, 4097.0])

    def buffer(self) -> torch.Tensor:
        return self.flat

    def parameters(self) -> list[torch.nn.Parameter]:
        return self.given

    def gradients(self) -> list[torch.Tensor]:
        return [self.flat[:2], self.flat[2]]


class Sent:
    """What NCCL does: the result is in the future, and what was sent may be overwritten."""

    def __init__(self, tensor: torch.Tensor, **_: Any) -> None:
        self.result = tensor.clone()
        tensor.fill_(torch.nan)

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result([self.result])
        return future

    def wait(self) -> None:
        """Not enough: it keeps nothing in memory."""


def test_only_what_a_future_holds_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(average.dist, "all_reduce", Sent)
    monkeypatch.setattr(average.dist, "get_world_size", lambda: 1)
    bucket: Any = Bucket()
    hook = average_hook(torch.bfloat16, exact=bucket.given[1])
    assert hook(None, bucket).wait().tolist() == [1.0, 2.0, 4097.0]


class WithSparseEmbedding(Regression):
    """Has a layer whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(4, 3, sparse=True)


class WithComplexWeight(Regression):
    """Has gradients with an imaginary part."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))


@pytest.mark.parametrize("task", [WithSparseEmbedding(), WithComplexWeight()])
def test_gradients_that_are_no_plain_numbers_are_refused(task: Regression, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"comm_hook=bf16 cannot compress.*(words|turn), which"):
        fit(task, tmp_path, train=samples(4), max_epochs=1, comm_hook="bf16")
