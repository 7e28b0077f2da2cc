"""Which bucket size is found, and that looking for it changes nothing else."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from support import Regression, adamw, assert_equal_bits, fit, on_ranks, samples, weights
from torch import nn

from trainer import distributed
from trainer.config import TrainerConfig
from trainer.strategies import DDPStrategy, bucket_size
from trainer.strategies.bucket_size import BucketSizeSearch

pytestmark = pytest.mark.timeout(120)

StepTime = Callable[[float], float]  # seconds by MiB per bucket
CPU = torch.device("cpu")


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def search(mib: float, seconds: StepTime, spikes: bool = False) -> tuple[float | None, list[float]]:
    """Search with steps that take as long as given.

    Returns:
        What was found, and the size of each step (25: torch's own).
    """
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(round(mib * 2**18), device="meta"))
    module.frozen = nn.Parameter(torch.empty(2**24, device="meta"), requires_grad=False)
    clock, sizes = Clock(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket_size, "time", clock)
        found = BucketSizeSearch(module, CPU)
        settled = 0
        while not found.is_over:
            sizes.append(25.0 if found.cap_mb is None else found.cap_mb)
            took = seconds(sizes[-1])
            took *= 5 if settled < 2 or len(sizes) < 5 else 1  # DDP builds its buckets
            took *= 3 if spikes and len(sizes) % 4 == 0 else 1  # a validation, say
            clock.now += took
            settled = 0 if found.after_backward() else settled + 1
        assert not found.after_backward()
    return found.cap_mb, sizes


def best_at(best: float) -> StepTime:
    return lambda size: 1 + abs(size - best) / (size + best)


@pytest.mark.parametrize("spikes", [False, True])
@pytest.mark.parametrize(
    ("mib", "best", "expected", "tried"),
    [
        (40, 0.1, 0.5, [25, 1, 4, 16, 64, 0.5, 2]),
        (40, 1.9, 2, [25, 1, 4, 16, 64, 0.5, 2]),
        (40, 9, 8, [25, 1, 4, 16, 64, 8, 32]),
        (40, 25, None, [25, 1, 4, 16, 64, 12.5]),
        (40, 999, 64, [25, 1, 4, 16, 64, 32]),
        (999, 150, 128, [25, 1, 4, 16, 64, 256, 128]),
        (99999, 999, 256, [25, 1, 4, 16, 64, 256, 128]),
        (1.1, 9, 4, [25, 1, 4]),
    ],
)
def test_the_best_of_some_sizes_is_found(
    mib: float, best: float, expected: float | None, tried: list[float], spikes: bool
) -> None:
    found, sizes = search(mib, best_at(best), spikes)
    assert found == expected
    assert list(dict.fromkeys(sizes)) == tried
    assert len(sizes) <= 4 + 6 * len(tried)


def test_a_gain_of_nothing_leaves_torchs_own() -> None:
    assert search(40, lambda size: 1 if size == 25 else 0.99)[0] is None
    assert search(40, lambda size: 1 if size == 25 else 0.97)[0] == 1


def test_small_gradients_are_not_searched(capsys: pytest.CaptureFixture[str]) -> None:
    assert search(0.99, best_at(1)) == (None, [])
    assert "bucket_cap_mb=auto: 0.99 MiB of gradients are one bucket" in capsys.readouterr().out


def as_slow_as_the_slowest() -> float | None:
    """Search where small buckets are the best for all ranks but the slowest."""
    best = 16 if distributed.rank() == 1 else 1
    scale = 3 if distributed.rank() == 1 else 1
    return search(40, lambda size: scale * best_at(best)(size))[0]


TINY: dict[str, Any] = {  # for some 700 bytes of gradients, in at most 19 steps
    "_SMALLEST": 4e-5,
    "_LARGEST": 1e-3,
    "TORCHS_FIRST_MB": 0.0,
    "_AT_FIRST": 1,
    "_COUNTED": 1,
}
SIZES = [None, 4e-5, 1.6e-4, 6.4e-4]
STEPS = 24
OPTIONS: dict[str, dict[str, Any]] = {
    "static graph": {"static_graph": True, "gradient_as_bucket_view": False},
    "accumulated": {"micro_batch_size": 1, "find_unused_parameters": True},
    "bf16": {"comm_hook": "bf16"},
    "powersgd": {"comm_hook": "powersgd", "powersgd_rank": 1, "powersgd_start_step": 3},
    "reproducible": {"reproducible": True, "micro_batch_size": 1},
}


wrappers: WeakSet[nn.Module] = WeakSet()


class Noting(Regression):
    """May have a layer that nothing uses, and statistics that differ between the ranks."""

    def __init__(self, norm: bool, spare: bool) -> None:
        super().__init__(adamw)
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)).double()
        for number, parameter in enumerate(self.parameters()):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
        self.norm = nn.BatchNorm1d(3).double() if norm else nn.Identity()
        self.spare = nn.Linear(2, 2).double().requires_grad_(spare)
        for parameter in self.spare.parameters():
            nn.init.ones_(parameter)
        self.seen: list[torch.Tensor] = []

    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward((self.norm(batch[0]),))

    def after_optimizer_step(self) -> None:
        self.seen += [buffer.clone() for buffer in self.buffers()]


class Freezing(Noting):
    """Trains one layer in every other epoch only."""

    def on_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.run.epoch % 2 == 0)


def trained(folder: Path, cap: float | str | None, **options: Any) -> Any:
    """Return weights and statistics. With micro-batches of one sample there is no BatchNorm."""
    task = Noting("micro_batch_size" not in options, "find_unused_parameters" in options)
    options = {"global_batch_size": 6, "max_steps": STEPS, **options}
    fit(task, folder, train=samples(18), bucket_cap_mb=cap, **options)
    return weights(task), task.seen


def on_two_ranks(folder: Path) -> dict[str, Any]:
    for name, value in TINY.items():
        setattr(bucket_size, name, value)
    setups: list[float | None] = []
    starts: list[int] = []
    searches: dict[frozenset[str], BucketSizeSearch] = {}
    setup = DDPStrategy.setup

    def noted(self: DDPStrategy, *args: Any) -> Any:
        assert not wrappers, "the old wrapper is still there, with its buckets"
        wrapped = setup(self, *args)
        wrappers.add(wrapped)
        if self._bucket_cap_mb is None:
            assert wrapped.bucket_bytes_cap == bucket_size.TORCHS_OWN_MB * 2**20
        starts.append(args[0].task.run.step)
        searches.update(self._searches)
        setups.append(self._bucket_search.cap_mb if self._bucket_search else None)
        return wrapped

    DDPStrategy.setup = noted  # type: ignore[method-assign]
    gathers: list[torch.Tensor] = []
    gather = distributed.all_gather_tensor
    distributed.all_gather_tensor = lambda table: [gathers.append(table), gather(table)][1]  # type: ignore[func-returns-value]
    found: dict[str, Any] = {}
    gc.disable()
    for name, options in OPTIONS.items():
        expected = trained(folder / name / "null", None, **options)
        setups.clear()
        starts.clear()
        gathers.clear()
        assert_equal_bits(trained(folder / name / "auto", "auto", **options), expected)
        found[name] = setups.copy(), len(gathers), starts[1]
    gc.enable()
    searches.clear()
    options = {"train": samples(24), "global_batch_size": 6, "max_epochs": 18}
    fit(Freezing(True, False), folder / "freezing", bucket_cap_mb="auto", **options)
    assert [search.is_over for search in searches.values()] == [True, True]
    trained(folder / "resumed", "auto", max_steps=10)
    resumed, _ = trained(folder / "resumed", "auto", resume="auto")
    assert_equal_bits(resumed, trained(folder / "whole", None)[0])
    return found


def test_between_two_ranks_looking_for_it_changes_no_bit(tmp_path: Path) -> None:
    found, other = on_ranks(2, on_two_ranks, tmp_path)
    assert found == other
    assert found.keys() == OPTIONS.keys()
    for name, (setups, gathers, first) in found.items():
        assert first == 4 + OPTIONS[name].get("powersgd_start_step", 0)
        assert setups[: len(SIZES)] == SIZES
        assert gathers in (1, 2)  # of far sizes, and of those beside the best of them


def on_four_ranks(folder: Path) -> float | None:
    found = as_slow_as_the_slowest()
    for name, value in TINY.items():
        setattr(bucket_size, name, value)
    options = {"reproducible": True, "micro_batch_size": 1}
    auto, expected = (trained(folder / str(cap), cap, **options) for cap in ("auto", None))
    assert_equal_bits(auto, expected)
    return found


def test_it_never_changes_a_bit_of_a_reproducible_run_and_ranks_agree(tmp_path: Path) -> None:
    assert on_ranks(4, on_four_ranks, tmp_path) == [16, 16, 16, 16]


def test_one_rank_has_nothing_to_look_for(tmp_path: Path) -> None:
    found = trained(tmp_path / "auto", "auto", max_steps=3)
    assert_equal_bits(found, trained(tmp_path / "null", None, max_steps=3))


def test_other_words_are_refused() -> None:
    with pytest.raises(ValueError, match=r"bucket_cap_mb='best'.*number above 0, auto or null"):
        TrainerConfig(bucket_cap_mb="best")
