"""The DDP wrapper, its options, and what it refuses, on real ranks."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    Regression,
    adamw,
    assert_equal_bits,
    assert_same,
    fit,
    fit_on,
    on_ranks,
    samples,
    train_by_hand,
    weights,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer import distributed
from trainer.config import TrainerConfig
from trainer.data.plan import GlobalBatchPlan
from trainer.logbook import Logbook
from trainer.state import TrainState
from trainer.step import StepModule
from trainer.strategies import DDPStrategy, build_strategy
from trainer.strategies.fixed_order import FixedOrderDDP
from trainer.task import RunFacts

pytestmark = pytest.mark.timeout(60)

OPTIONS: dict[str, dict[str, Any]] = {
    "small buckets": {"bucket_cap_mb": 1e-5},
    "large buckets": {"bucket_cap_mb": 100},
    "static graph": {"static_graph": True},
    "gradients of their own": {"gradient_as_bucket_view": False},
    "accumulated in small buckets": {"bucket_cap_mb": 1e-5, "micro_batch_size": 1},
    "accumulated gradients of their own": {"gradient_as_bucket_view": False, "micro_batch_size": 1},
}


class WithSpare(Regression):
    """Has a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__(adamw)
        self.spare = nn.Linear(2, 2).double()
        with torch.no_grad():
            self.spare.weight.fill_(1.0)
            self.spare.bias.fill_(1.0)


def fits(run_dir: Path) -> dict[str, Any]:
    found = {}
    for name, options in OPTIONS.items():
        task = Regression(adamw)
        options = {"global_batch_size": 6, "max_epochs": 3, **options}
        fit(task, run_dir / name, train=samples(13), **options)
        found[name] = weights(task)
    return found


def test_every_option_gives_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    expected = Regression(adamw)
    train_by_hand(expected, samples(13), global_batch_size=6, epochs=3)
    ranks = on_ranks(3, fits, tmp_path)
    for found in ranks:
        assert found.keys() == OPTIONS.keys()
        for name, final in found.items():
            assert_same(final, expected)
            assert_equal_bits(final, ranks[0][name])


def fits_with_spare(run_dir: Path) -> dict[str, Any]:
    found = {}
    # Of the 13 samples the last global batch has one, which leaves two ranks without any.
    options = {"global_batch_size": 6, "max_epochs": 2}
    for name, own in {
        "whole": {"find_unused_parameters": True},
        "accumulated": {"find_unused_parameters": True, "micro_batch_size": 1},
    }.items():
        task = WithSpare()
        fit(task, run_dir / name, train=samples(13), **options, **own)
        found[name] = weights(task)
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_unused_parameters_are_left_alone_where_that_is_allowed(
    world_size: int, tmp_path: Path
) -> None:
    expected = WithSpare()
    train_by_hand(expected, samples(13), global_batch_size=6, epochs=2)
    for found in on_ranks(world_size, fits_with_spare, tmp_path):
        for final in found.values():
            assert_same(final, expected)


@pytest.mark.parametrize("world_size", [1, 2])
def test_unused_parameters_are_named_with_the_option(world_size: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"spare\.weight, spare\.bias.*find_unused_parameters"):
        fit_on(world_size, WithSpare(), tmp_path, train=samples(8), max_epochs=1)


class Lopsided(Regression):
    """Uses its spare layer on the first rank only."""

    def __init__(self) -> None:
        super().__init__(adamw)
        self.spare = nn.Linear(5, 1).double()

    def forward(self, batch: Any) -> torch.Tensor:
        hidden = self.net[1](self.net[0](batch[0]))
        outputs = self.net[2](hidden)
        if self.run.rank == 0:
            outputs = outputs + self.spare(hidden)
        return outputs.squeeze(1)


def test_a_parameter_that_one_rank_does_not_use(tmp_path: Path) -> None:
    data = {"train": samples(8), "global_batch_size": 4, "max_epochs": 2}
    with pytest.raises(ValueError, match=r"no gradient for spare\.weight.*find_unused"):
        fit_on(2, Lopsided(), tmp_path / "refused", **data)
    found, expected = Lopsided(), Lopsided()
    expected.load_state_dict(found.state_dict())
    fit_on(2, found, tmp_path / "allowed", find_unused_parameters=True, **data)
    optimizer = expected.configure_optimizers()
    x, y = samples(8).tensors
    for start in (0, 4) * 2:
        optimizer.zero_grad()
        for rank in (0, 1):  # each has half of the batch
            expected.run = RunFacts(rank=rank)
            mine = slice(start + 2 * rank, start + 2 * rank + 2)
            (expected.loss(expected((x[mine],)), (x[mine], y[mine])) / 2).backward()
        optimizer.step()
    assert_same(found, expected)


class Thawing(Regression):
    """Trains its last layer in the first epoch, everything in the second, the first layer then."""

    def on_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.run.epoch >= 1)
        self.net[2].requires_grad_(self.run.epoch <= 1)
        self.wrappers = count_wrappers()


def count_wrappers() -> int:
    return sum(type(thing) is DistributedDataParallel for thing in gc.get_objects())


def thaw(run_dir: Path) -> Any:
    gc.collect()
    gc.disable()
    try:
        task = Thawing()
        fit(task, run_dir, train=samples(13), global_batch_size=4, max_epochs=3)
        return weights(task), task.wrappers, count_wrappers()
    finally:
        gc.enable()


def test_requires_grad_may_change_between_epochs(tmp_path: Path) -> None:
    expected = Thawing()
    optimizer = expected.configure_optimizers()
    for epoch in range(3):
        expected.net[0].requires_grad_(epoch >= 1)
        expected.net[2].requires_grad_(epoch <= 1)
        for batch in torch.utils.data.DataLoader(samples(13), batch_size=4):
            optimizer.zero_grad()
            expected.loss(expected(batch), batch).backward()
            optimizer.step()
    for final, wrappers, left in on_ranks(2, thaw, tmp_path):
        assert_same(final, expected)
        assert (wrappers, left) == (1, 0), "wrappers pile up"


class Changing(Regression):
    """Freezes or thaws a layer in the middle of an epoch."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.trained = trained
        self.net[0].requires_grad_(not trained)

    def after_optimizer_step(self) -> None:
        self.net[0].requires_grad_(self.trained)


def change(run_dir: Path) -> list[str]:
    found = []
    for trained in (False, True):
        with pytest.raises(ValueError, match="requires_grad") as info:
            fit(Changing(trained), run_dir, train=samples(13), global_batch_size=4, max_epochs=3)
        found.append(str(info.value))
        distributed.barrier()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_requires_grad_may_not_change_within_an_epoch(world_size: int, tmp_path: Path) -> None:
    for frozen, thawed in on_ranks(world_size, change, tmp_path):
        assert "net.0.weight, net.0.bias changed from True to False in mid-run" in frozen
        assert "changed from False to True in mid-run" in thawed
        assert "on_epoch_start" in frozen
        assert "on_epoch_start" in thawed


def unequal_models(run_dir: Path) -> list[str]:
    found = []
    for number in range(5):
        task: Any = Regression()
        task.register_buffer("table", torch.zeros(3 + (number == 3 and distributed.rank())))
        if distributed.rank() == 1:
            if number == 0:
                task.net[2] = nn.Linear(5, 1, bias=False).double()
            elif number == 1:
                task.net[0] = nn.Linear(3, 5).float()
            elif number == 2:
                task.net[0].bias.requires_grad_(False)
            elif number == 4:
                task.register_buffer("own", torch.zeros(()), persistent=False)
        with pytest.raises(ValueError, match="differ between ranks") as info:
            fit(task, run_dir, train=samples(8), global_batch_size=4, max_epochs=1)
        found.append(str(info.value))
    return found


def test_models_that_differ_between_ranks_are_refused_with_the_difference(tmp_path: Path) -> None:
    for missing, dtype, frozen, buffer, unshared in on_ranks(2, unequal_models, tmp_path):
        assert "rank 0 has net.2.bias with shape (1,)" in missing
        assert "rank 1 has buffer table" in missing
        assert "net.0.weight with shape (5, 3) (torch.float64)" in dtype
        assert "rank 1 has net.0.weight with shape (5, 3) (torch.float32)" in dtype
        assert "rank 1 has net.0.bias with shape (5,) (torch.float64, frozen)" in frozen
        assert "rank 0 has buffer table with shape (3,) (torch.float32)" in buffer
        assert "rank 1 has buffer table with shape (4,) (torch.float32)" in buffer
        assert "rank 0 has 5 parameters and buffers, rank 1 has 6 parameters and" in unshared


def other_shape(run_dir: Path) -> str:
    task = Regression()
    task.net[0] = nn.Linear(3, 5 + distributed.rank()).double()
    with pytest.raises(ValueError, match="differ between ranks") as info:
        fit(task, run_dir, train=samples(8), global_batch_size=4, max_epochs=1)
    return str(info.value)


def test_shapes_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    for message in on_ranks(2, other_shape, tmp_path):
        assert "rank 0 has net.0.weight with shape (5, 3)" in message
        assert "rank 1 has net.0.weight with shape (6, 3)" in message


def other_values(run_dir: Path) -> dict[str, Any]:
    task = Regression()
    with torch.no_grad():
        task.net[0].weight.add_(distributed.rank())
    fit(task, run_dir, train=samples(8), global_batch_size=4, max_epochs=1)
    return weights(task)


def test_all_ranks_start_from_the_weights_of_rank_0(tmp_path: Path) -> None:
    expected = Regression()
    train_by_hand(expected, samples(8), global_batch_size=4)
    for final in on_ranks(2, other_values, tmp_path):
        assert_same(final, expected)


def test_one_rank_is_not_wrapped() -> None:
    step = StepModule(
        Regression(),
        Logbook(),
        {},
        TrainState(),
        seed=0,
        averaged_over=1,
        needs_every_parameter=True,
    )
    strategy = DDPStrategy()
    assert strategy.setup(step, torch.device("cpu")) is step
    with strategy.no_sync():
        pass
    strategy.teardown()


@pytest.mark.parametrize("kind", [DDPStrategy, FixedOrderDDP])
def test_what_is_not_set_up_is_torn_down_and_keeps_what_was_saved(kind: type[DDPStrategy]) -> None:
    strategy = kind()
    strategy.teardown()
    assert strategy.take_comm_times() is None
    assert strategy.state_dict() == {}
    compressing = DDPStrategy(comm_hook="powersgd")
    compressing.teardown()
    assert compressing.state_dict() == {}
    saved = {"errors": {"a": torch.ones(2, 3)}, "bases": {"a": torch.ones(1, 3)}}
    compressing.load_state_dict(saved)
    assert_equal_bits(compressing.state_dict(), saved)


GRAPH: dict[str, Any] = {"static_graph": True}
NORM: dict[str, Any] = {"sync_batchnorm": True}


@pytest.mark.parametrize(
    ("world_size", "options", "plan", "device", "always_full", "message"),
    [
        (2, GRAPH, (4, 1), "cpu", True, "static_graph=true with 2 micro-batches"),
        (2, GRAPH, (4, None), "cpu", False, None),
        (1, GRAPH, (4, 1), "cpu", True, None),
        (2, NORM, (4, None), "cpu", True, "sync_batchnorm=true on the CPU"),
        (2, NORM, (4, None), "cuda", True, None),
        (2, NORM, (4, None), "cuda", False, "global_batch_size=4 on 2 ranks.*drop_last=true"),
        (2, NORM, (4, 1), "cuda", True, "one micro-batch of the same size"),
        (3, NORM, (4, None), "cuda", True, "one micro-batch of the same size"),
        (2, NORM, (None, None), "cuda", False, "one micro-batch of the same size"),
        (1, NORM, (4, 1), "cuda", False, None),
    ],
)
def test_options_that_cannot_work_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    world_size: int,
    options: dict[str, Any],
    plan: tuple[int | None, int | None],
    device: str,
    always_full: bool,
    message: str | None,
) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: world_size)
    strategy = DDPStrategy(**options)
    refused = pytest.raises(ValueError, match=message) if message else nullcontext()
    with refused:
        strategy.check(GlobalBatchPlan(*plan), torch.device(device), always_full)


def test_options_are_checked_in_a_fit(tmp_path: Path) -> None:
    options = {"global_batch_size": 4, "max_epochs": 1, "static_graph": True, "micro_batch_size": 1}
    with pytest.raises(ValueError, match="static_graph=true with 2 micro-batches"):
        fit_on(2, Regression(), tmp_path, train=samples(8), **options)


DDP_NODE: dict[str, Any] = {"_target_": "trainer.strategies.DDPStrategy"}


def test_a_strategy_of_ones_own_is_a_node_and_its_options_count(tmp_path: Path) -> None:
    node = {**DDP_NODE, "find_unused_parameters": True}
    options = {"train": samples(13), "global_batch_size": 6, "max_epochs": 2}
    found, expected = WithSpare(), WithSpare()
    fit_on(2, found, tmp_path, strategy=node, **options)
    train_by_hand(expected, samples(13), global_batch_size=6, epochs=2)
    assert_same(found, expected)
    node = {**DDP_NODE, "static_graph": True}
    with pytest.raises(ValueError, match="static_graph=true with 3 micro-batches"):
        fit_on(2, WithSpare(), tmp_path, strategy=node, micro_batch_size=1, **options)


def test_what_is_no_strategy_is_refused() -> None:
    config = TrainerConfig(strategy={"_target_": "torch.nn.Identity"})
    with pytest.raises(ValueError, match="strategy is a Identity; it must be `ddp` or a node"):
        build_strategy(config)


def test_options_of_ddp_beside_a_strategy_node_are_refused_by_name() -> None:
    assert isinstance(build_strategy(TrainerConfig(strategy=DDP_NODE)), DDPStrategy)
    for options, given in (
        ({"static_graph": True, "bucket_cap_mb": 5}, "bucket_cap_mb=5.0, static_graph=true given"),
        ({"gradient_as_bucket_view": False}, "gradient_as_bucket_view=false given"),
        ({"comm_hook": "bf16"}, "comm_hook='bf16' given"),
        ({"find_unused_parameters": True}, "find_unused_parameters=true given"),
    ):
        config = TrainerConfig.from_options({"strategy": DDP_NODE, **options})
        with pytest.raises(ValueError, match=f"{given} beside a strategy node"):
            build_strategy(config)
