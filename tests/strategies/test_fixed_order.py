"""What the fixed order of addition refuses, each with its reason; what it gives is in
``tests/distributed/test_reproducible.py``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Regression, fit, fit_on, on_ranks, samples
from torch import Tensor, nn

from trainer.config import TrainerConfig
from trainer.diagnosis.failures import RankError
from trainer.strategies import DDPStrategy, FixedOrderDDP, build_strategy

OPTIONS: dict[str, Any] = {
    "reproducible": True,
    "train": samples(8),
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "max_steps": 2,
}


class With(Regression):
    """Has one more layer, in front of the others."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.front = layer

    def forward(self, batch: Any) -> Tensor:
        return super().forward((self.front(batch[0]), batch[1]))


class Counting(nn.Module):
    """Counts its forwards in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x


def refusals(run_dir: Path) -> list[str]:
    """The messages for options that cannot work with the number of ranks."""
    found = []
    for options in ({}, {"micro_batch_size": 3, "global_batch_size": 6}):
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the test compares the messages
            fit(Regression(), run_dir, **{**OPTIONS, **options})
        found.append(str(error.value))
    return found


def test_a_world_size_that_is_no_power_of_two_is_refused(tmp_path: Path) -> None:
    for first, second in on_ranks(3, refusals, tmp_path):
        assert first.startswith("reproducible=true on 3 ranks")
        assert "use 2 or 4 ranks" in first
        assert second.startswith("reproducible=true on 3 ranks")


def test_more_ranks_than_micro_batches_are_refused(tmp_path: Path) -> None:
    for first, second in on_ranks(4, refusals, tmp_path):
        assert "make 2 micro-batches, too few to give one to every rank; use at most 2" in first
        assert first.endswith("or lower micro_batch_size to 1")
        assert "make 2 micro-batches" in second


def test_batch_norm_is_refused_while_the_batch_is_cut(tmp_path: Path) -> None:
    layer = nn.BatchNorm1d(3).double()
    with pytest.raises(ValueError, match="with front: statistics of BatchNorm follow from"):
        fit(With(layer), tmp_path, **OPTIONS)
    fit(With(layer), tmp_path, **{**OPTIONS, "micro_batch_size": 4})
    fit(With(nn.BatchNorm1d(3, track_running_stats=False).double()), tmp_path, **OPTIONS)
    task = With(layer)
    layer.eval()  # frozen: the statistics are constants
    fit(task, tmp_path, **OPTIONS)


def test_a_buffer_that_training_changes_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"training changes front\.count"):
        fit(With(Counting()), tmp_path, **OPTIONS)


def test_sparse_and_complex_gradients_are_refused(tmp_path: Path) -> None:
    task = Regression()
    task.table = nn.Embedding(3, 2, sparse=True)
    with pytest.raises(ValueError, match="gradients of table, which has sparse=True; use dense"):
        fit(task, tmp_path, **OPTIONS)
    task = Regression()
    task.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="gradients of phase, which is complex; use dense, real"):
        fit(task, tmp_path, **OPTIONS)


class Hanging(Regression):
    """On the last rank, backward does not come in the second step."""

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        if self.run.step == 1 and self.run.rank == self.run.world_size - 1:
            time.sleep(300)
        return super().loss(outputs, batch)


def test_a_rank_that_hangs_ends_the_run_in_time(tmp_path: Path) -> None:
    started, limits = time.monotonic(), {"timeout_s": 3, "start_timeout_s": 60}
    with pytest.raises(RankError, match="rank 3"):
        fit_on(4, Hanging(), tmp_path, **OPTIONS | {"micro_batch_size": 1} | limits)
    assert time.monotonic() - started < 60


def test_options_that_follow_the_world_size_are_refused() -> None:
    for option, match in (
        ({"micro_batch_size": None}, "reproducible=true without micro_batch_size"),
        ({"comm_hook": "fp16"}, "reproducible=true together with comm_hook='fp16'"),
        ({"sync_batchnorm": True}, "reproducible=true together with sync_batchnorm=true"),
    ):
        with pytest.raises(ValueError, match=match):
            TrainerConfig(**{"reproducible": True, "micro_batch_size": 2, **option})


class Own(FixedOrderDDP):
    pass


def test_a_strategy_of_ones_own_must_be_one_of_fixed_order() -> None:
    def built(target: str) -> Any:
        node = {"_target_": target}
        return build_strategy(TrainerConfig(strategy=node, reproducible=True, micro_batch_size=2))

    with pytest.raises(ValueError, match="reproducible=true with the strategy DDPStrategy"):
        built("trainer.strategies.DDPStrategy")
    assert isinstance(built(f"{__name__}.Own"), Own)
    plain = build_strategy(TrainerConfig())
    assert type(plain) is DDPStrategy
