"""`Trainer.plan` on real ranks, and what it makes of what it measured."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Regression, adamw, assert_equal_bits, samples, sgd, weights
from torch import nn
from torch.utils.data import IterableDataset

from trainer import PlanReport, Trainer, distributed
from trainer.config import TrainerConfig
from trainer.diagnosis.failures import RankError
from trainer.hydra.command_line import Place, check_command_line
from trainer.hydra.composition import register_configs
from trainer.planning import planning
from trainer.planning.options import PlanConfig
from trainer.planning.profile import Profile
from trainer.planning.scaling import Scaling, ladder

ROOT = Path(__file__).parents[2]


def plan(task: Regression, run_dir: Path, **options: Any) -> PlanReport:
    known = {name: options.pop(name) for name in list(options) if hasattr(PlanConfig(), name)}
    options = {"global_batch_size": 8, "accelerator": "cpu", "timeout_s": 30, **options}
    train = options.pop("train", samples(20))
    trainer = Trainer(run_dir=str(run_dir), **options)
    report = trainer.plan(task, train=train, **{"steps": 2, "max_ranks": 100, **known})
    assert report is not None
    return report


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> PlanReport:
    task = Regression()
    before = weights(task)
    run_dir = tmp_path_factory.mktemp("alone")
    report = plan(task, run_dir, bandwidth_gbps=1, latency_us=20)
    assert_equal_bits(task, before)
    assert {path.name for path in run_dir.iterdir()} == {"plan.json", "plan.png"}
    return report


def test_rows_go_as_far_as_they_make_sense(alone: PlanReport) -> None:
    assert [row.ranks for row in alone.weak] == [1, 2, 4, 8, 16, 32, 64, 100]
    assert [(row.ranks, row.samples) for row in alone.strong] == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert [row.is_extrapolated for row in alone.strong] == [False, True, True, True]
    assert "On more than 8 ranks: less than one sample per rank." in str(alone)


def test_one_rank_is_what_was_measured(alone: PlanReport) -> None:
    profile = alone.measured.profile
    measured_s = profile.forward_s[-1] + profile.backward_s[-1] + profile.optimizer_s
    for row in (alone.strong[0], alone.weak[0]):
        assert row.ring_s == row.tree_s == pytest.approx(measured_s)
        assert (row.efficiency, row.exposed_s) == (pytest.approx(1), 0)


def test_the_batch_and_the_rate_go_with_the_ranks(alone: PlanReport) -> None:
    assert [row.global_batch_size for row in alone.weak] == [8 * row.ranks for row in alone.weak]
    assert [row.learning_rate for row in alone.weak] == [0.1 * row.ranks for row in alone.weak]
    assert {row.learning_rate for row in alone.strong} == {0.1}  # SGD


def test_memory_is_weights_gradients_momentum_and_activations(alone: PlanReport) -> None:
    numbers = 3 * 5 + 5 + 5 + 1  # of 8 bytes, as weights, as gradients and as momentum
    fixed = 3 * 8 * numbers + 4  # and the gradient of the weight of a batch
    kept = [8 * row.samples * 5 for row in alone.strong]  # the activations
    assert all(m.memory - fixed >= k for m, k in zip(alone.strong, kept, strict=True))
    assert alone.strong[0].memory < fixed + 4 * kept[0]
    assert alone.strong[0].memory > alone.strong[-1].memory


def test_failures_go_with_the_ranks(alone: PlanReport) -> None:
    assert alone.weak[-1].failures_per_day == pytest.approx(24 * 100 / 50_000)
    assert alone.weak[-1].save_every_s < alone.weak[0].save_every_s


def test_what_is_written_is_what_is_printed(alone: PlanReport) -> None:
    found = json.loads((alone.measured.run_dir / "plan.json").read_text())
    assert [row["ranks"] for row in found["weak"]] == [row.ranks for row in alone.weak]
    assert found["facts"]["machines"].startswith("1 rank each, 20 us, 1 Gbit/s (given)")
    text = " ".join(str(alone).split())  # lines are broken anywhere
    assert [fact for fact in found["facts"].values() if fact not in text] == []


def test_ranks_measure_links_and_a_whole_step(tmp_path: Path) -> None:
    task = Regression(adamw)
    before = weights(task)
    report = plan(task, tmp_path, devices=2, micro_batch_size=2, rank_mtbf_h=100)
    assert_equal_bits(task, before)
    measured = report.measured
    assert measured.links["within"].bandwidth > 0
    assert measured.step_s is not None
    assert measured.local_world_size == measured.world_size == 2
    assert measured.profile.sizes[-1] == 2
    assert [row.is_extrapolated for row in report.strong] == [False, False, True, True]
    assert [row.samples for row in report.strong] == [8, 4, 2, 2]  # half of 8 ranks have none
    assert report.weak[0].global_batch_size == 4
    assert report.weak[-1].learning_rate is None  # Adam's betas have no place for a batch so large
    assert report.weak[-1].failures_per_day == pytest.approx(24)


def test_a_smaller_bucket_is_chosen_where_it_hides_more(alone: PlanReport) -> None:
    count = 2**18  # 1 MiB each
    ready_s = [0.1 * n for n in range(8, 0, -1)]
    profile = replace(
        alone.measured.profile, backward_s=[0.8] * 3, ready_s=[ready_s] * 3, sizes=[1, 2, 8]
    )
    parameters, order = [(count, torch.float32)] * 8, list(range(8))[::-1]
    large = replace(alone.measured, profile=profile, parameters=parameters, order=order)
    options = PlanConfig(bandwidth_gbps=0.1, latency_us=0, max_ranks=8)
    scaling = Scaling(large, TrainerConfig(bucket_cap_mb=100), options)
    assert len(scaling.own_layout) == 1
    row = scaling.strong([8])[0]
    assert row.bucket_cap_mb == 1
    assert row.ring_s < scaling.own_step(8).step_s
    assert scaling.own_step(8).exposed_s == pytest.approx(scaling.network.ring_s(8 * 2**20, 8))


@pytest.mark.parametrize(
    ("dtype", "gain"), [(torch.float64, 4), (torch.float32, 2), (torch.bfloat16, 1)]
)
def test_a_hook_gains_what_its_two_bytes_are_less(
    alone: PlanReport, dtype: torch.dtype, gain: int
) -> None:
    count = len(alone.measured.parameters)
    measured = replace(alone.measured, parameters=[(2**18, dtype)] * count)
    options = PlanConfig(bandwidth_gbps=0.1, latency_us=0, max_ranks=8)
    hooks = (None, "bf16")
    steps = [
        Scaling(measured, TrainerConfig(comm_hook=hook), options).own_step(8) for hook in hooks
    ]
    assert steps[0].communication_s == pytest.approx(gain * steps[1].communication_s)


class Normalized(Regression):
    """Cannot train on a single sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()


def test_a_batch_too_small_to_train_on_ends_the_table(tmp_path: Path) -> None:
    report = plan(Normalized(), tmp_path)
    assert [row.samples for row in report.strong] == [8, 4, 2]
    assert "On more than 4 ranks: 1 per micro-batch: Expected more than 1 value" in str(report)


class Adapted(Regression):
    """Trains before and after a frozen matrix and a constant one, each of 32 KiB."""

    def __init__(self) -> None:
        super().__init__()
        frozen = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.net = nn.Sequential(nn.Linear(3, 64), frozen, nn.Linear(64, 1)).double()
        self.register_buffer("turn", torch.eye(64, dtype=torch.float64))

    def forward(self, batch: Any) -> torch.Tensor:
        first, frozen, last = self.net
        outputs: torch.Tensor = last(frozen(first(batch[0])) @ self.turn).squeeze(1)
        return outputs


def test_weights_are_counted_once_and_a_resume_is_of_no_matter(tmp_path: Path) -> None:
    report = plan(Adapted(), tmp_path, resume="auto", accept_changes=["data"])
    measured = report.measured
    assert measured.weight_bytes > 2 * 64 * 64 * 8
    # Autograd keeps the frozen matrix and the constant for the gradient of what comes before.
    assert measured.profile.activation_bytes[0] < 64 * 64 * 8


@pytest.mark.parametrize(
    ("measured_s", "forward_s", "doubt"),
    [
        (0.006, [0.001, 0.002, 0.004], ""),
        (0.005, [0.001, 0.002, 0.004], ""),
        (0.004, [0.001, 0.002, 0.004], "2 ranks is +25% off what they took"),
        (0.010, [0.001, 0.002, 0.004], "2 ranks is -50% off what they took"),
        (0.005, [0.001, 0.002, 0.010], "2 ranks would be 130% efficient"),
    ],
)
def test_measurements_that_do_not_go_together_are_doubted(
    alone: PlanReport, measured_s: float, forward_s: list[float], doubt: str, tmp_path: Path
) -> None:
    count = len(alone.measured.parameters)
    sizes, zeros = [2, 4, 8], [0.0] * 3
    profile = Profile(0.003, sizes, forward_s, zeros, [[0.0] * count] * 3, [0] * 3)
    measured = replace(
        alone.measured, run_dir=tmp_path, profile=profile, world_size=2, step_s=measured_s
    )
    options = PlanConfig(max_ranks=2, bandwidth_gbps=1e6, latency_us=0)
    report = planning.plan(replace(measured, local_world_size=1), TrainerConfig(), options)
    warning = report.notes[0] if report.notes[0].startswith("WARNING") else ""
    assert doubt in warning
    assert bool(warning) == bool(doubt)
    assert not doubt or "quiet machine, with more plan.steps" in warning


class Killed(Regression):
    """Its first rank is killed in the middle."""

    def forward(self, batch: Any) -> torch.Tensor:
        if distributed.rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(batch)


def test_no_folder_is_left_of_a_killed_rank(tmp_path: Path) -> None:
    with pytest.raises(RankError):
        plan(Killed(), tmp_path, devices=2)
    deadline = time.monotonic() + 10
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(tmp_path.iterdir())


class Contrastive(Regression):
    global_loss = True


class Alternating(Regression):
    def configure_optimizers(self) -> Any:
        first, _, last = self.net
        return {"first": sgd(first.parameters()), "last": sgd(last.parameters())}


class Unused(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.items = [samples(20)[n] for n in range(count)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (Contrastive, {}, "Contrastive has global_loss=True"),
        (Alternating, {}, "Alternating has several optimizers"),
        (Regression, {"comm_hook": "powersgd"}, "comm_hook='?powersgd"),
        (Regression, {"latency_us": -1}, "latency_us=-1 is not allowed; it must be a number of at"),
        (Regression, {"max_ranks": 2**40}, "max_ranks=.* at least 2 and at most 1000000"),
        (Unused, {}, r"no gradient for spare.weight, spare.bias: .*find_unused_parameters=true"),
        (Normalized, {"global_batch_size": 1}, "Expected more than 1 value.*give a larger global_"),
        (
            Normalized,
            {"global_batch_size": 2, "devices": 2},
            "Expected more than 1 value.*a micro-batch of 1 sample.*use fewer devices",
        ),
        (Regression, {"train": Stream(0)}, "the training stream yields no sample in epoch 0"),
        (Regression, {"train": Stream(1), "devices": 2}, "1 sample, and there is none for rank 1"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    task: type[Regression], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        plan(task(), tmp_path, **options)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("plan.max_rank=3", "plan: there is no option 'max_rank'; did you mean max_ranks?"),
        ("plan.max_ranks=1", "plan: max_ranks=1 is not allowed; it must be a whole number of at"),
        ("plan=3", "plan=3 is not allowed; it must be a mapping"),
        ("ckpt_path=best", "ckpt_path=best with mode=plan"),
    ],
)
def test_the_command_line_is_checked(override: str, message: str) -> None:
    try:
        with pytest.raises(ValueError, match=message.replace("?", r"\?")):
            check_command_line(Place(str(ROOT / "conf"), "mnist"), ["mode=plan", override], False)
    finally:
        register_configs()


def test_the_ladder_has_those_that_measured_and_the_last() -> None:
    assert ladder(10, 3) == [1, 2, 3, 4, 8, 10]
