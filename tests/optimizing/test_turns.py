"""Several optimizers, turn by turn: as by hand, on any number of ranks, and through a resume."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support import assert_equal_bits, assert_same, fit, fit_on, on_ranks, samples, weights
from torch import Tensor, nn
from torch.optim import lr_scheduler

from trainer import Callback, OptimizerSetup, TaskModule, Trainer, WeightedLoss
from trainer.checkpoint.writer import read_state

SIZES = {"global_batch_size": 4, "micro_batch_size": 1}
CLIP = 0.05


class Duel(TaskModule):
    """One net imitates ``y``, another tells it from the imitation; float64."""

    def __init__(self, names: tuple[str, str] = ("critic", "maker")) -> None:
        super().__init__()
        self.names = names
        self.maker = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.critic = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.shared = nn.Parameter(torch.ones((), dtype=torch.float64))  # no optimizer's
        self.seen: list[tuple[str | None, frozenset[str]]] = []
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in [*self.maker.parameters(), *self.critic.parameters()]:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def forward(self, batch: Any) -> Tensor:
        made: Tensor = self.maker(batch[0]) * self.shared
        return made

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        x, y = batch
        if self.run.split != "train":
            return nn.functional.mse_loss(outputs.squeeze(1), y)
        self.seen.append((self.run.turn, needing_gradients(self)))
        return self.losses(outputs, x, y)[self.run.turn or ""]

    def losses(self, made: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        judged = self.critic(torch.cat([x, made], dim=1))
        real = self.critic(torch.cat([x, y.unsqueeze(1)], dim=1))
        critic, maker = self.names
        return {critic: (judged**2 + (real - 1) ** 2).mean(), maker: ((judged - 1) ** 2).mean()}

    def configure_optimizers(self) -> Mapping[str, Any]:
        critic = torch.optim.Adam(self.critic.parameters(), lr=0.02)
        maker = torch.optim.SGD(self.maker.parameters(), lr=0.1, momentum=0.9)
        halving = lr_scheduler.StepLR(maker, step_size=2, gamma=0.5)
        return dict(zip(self.names, (critic, OptimizerSetup(maker, halving)), strict=True))


def needing_gradients(task: nn.Module) -> frozenset[str]:
    return frozenset(
        name.partition(".")[0] for name, p in task.named_parameters() if p.requires_grad
    )


def changed(found: dict[str, Tensor]) -> set[str]:
    """Which nets were trained."""
    before = weights(Duel())
    return {n.partition(".")[0] for n in before if not torch.equal(found[n], before[n])}


def by_hand(task: Duel, count: int, epochs: int) -> None:
    """Train with whole global batches of 4."""
    setups = task.configure_optimizers()
    nets = {"critic": task.critic, "maker": task.maker}
    x, y = samples(count).tensors
    for _ in range(epochs):
        for start in range(0, count, 4):
            batch = x[start : start + 4], y[start : start + 4]
            for name, setup in setups.items():
                optimizer = getattr(setup, "optimizer", setup)
                task.zero_grad()
                task.losses(task(batch), *batch)[name].backward()
                nn.utils.clip_grad_norm_(nets[name].parameters(), CLIP)
                optimizer.step()
            setups["maker"].scheduler.step()


class Events(Callback):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def on_log(self, run: Any, metrics: dict[str, float]) -> None:
        self.found.append({**metrics, **run.learning_rates})


def fit_here(run_dir: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """On the ranks that are there, sums in any order and in one order."""
    found = []
    for name, options in {"any": {}, "one": {"reproducible": True}}.items():
        task = Duel()
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if ranks == 3 and options:  # no power of two
            continue
        options = {**SIZES, "gradient_clip_norm": CLIP, "max_epochs": 2, **options}
        fit(task, run_dir / f"{ranks}-{name}", train=samples(10), devices=ranks, **options)
        found.append(weights(task))
    return found[0], found[-1]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], ...]:
    return fit_here(tmp_path_factory.mktemp("turns"))


def test_one_process_trains_as_by_hand(alone: tuple[dict[str, Tensor], ...]) -> None:
    expected = Duel()
    by_hand(expected, 10, epochs=2)
    assert_same(alone[0], weights(expected))
    assert changed(alone[0]) == {"critic", "maker"}


@pytest.mark.parametrize("world_size", [2, 3])
def test_more_ranks_train_the_same(
    world_size: int, alone: tuple[dict[str, Tensor], ...], tmp_path: Path
) -> None:
    for found in on_ranks(world_size, fit_here, tmp_path):
        assert_same(found[0], alone[0])
        if world_size == 2:
            assert_equal_bits(found[1], alone[1])


def test_a_turn_has_its_name_and_only_its_own_parameters(tmp_path: Path) -> None:
    task, events = Duel(), Events()
    options = {"max_steps": 3, "log_every_n_steps": 1, "callbacks": [events], "val": samples(4)}
    result = fit(task, tmp_path, train=samples(8), global_batch_size=4, **options)
    turns = [("critic", frozenset({"critic"})), ("maker", frozenset({"maker"}))]
    assert task.seen == 3 * turns
    assert result.step == 3
    assert needing_gradients(task) == {"critic", "maker", "shared"}
    assert task.run.turn is None
    assert [event["train/lr/maker"] for event in events.found] == [0.1, 0.1, 0.05]
    named = {name for name in events.found[-1] if name.startswith("train/")}
    assert named == {f"train/{what}/{name}" for what in ("loss", "lr") for name in task.names}
    assert "val/loss" in result.metrics


def test_a_resumed_run_goes_on_with_every_optimizer(tmp_path: Path) -> None:
    options: dict[str, Any] = {"train": samples(10), **SIZES}
    whole, part, rest = Duel(), Duel(), Duel()
    fit(whole, tmp_path / "whole", max_steps=5, **options)
    fit(part, tmp_path / "parts", max_steps=2, **options)
    result = fit(rest, tmp_path / "parts", max_steps=5, resume="last", **options)
    assert_equal_bits(rest, whole)
    assert result.last_checkpoint is not None
    state = read_state(result.last_checkpoint)
    assert state["optimizer/critic"]["state"][0]["step"] == 5
    assert state["schedule/maker"]["scheduler"]["last_epoch"] == 5


class Slower(Duel):
    """Its critic learns at half the rate."""

    def configure_optimizers(self) -> Mapping[str, Any]:
        critic = torch.optim.Adam(self.critic.parameters(), lr=0.01)
        return {**super().configure_optimizers(), "critic": critic}


def test_other_optimizers_are_another_experiment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"train": samples(10), **SIZES}
    for folder in (tmp_path / "names", tmp_path / "rates"):
        fit(Duel(), folder, max_steps=2, **options)
    renamed = ("judge", "maker")
    options |= {"max_steps": 3, "resume": "last"}
    with pytest.raises(ValueError, match=r"optimizer: critic, maker -> judge, maker"):
        fit(Duel(renamed), tmp_path / "names", **options)
    fit(Duel(renamed), tmp_path / "names", accept_changes=["optimizer"], **options)
    assert "resume: judge starts anew" in capsys.readouterr().out

    with pytest.raises(ValueError, match=r"critic: optimizer: lr 0.02 -> 0.01") as error:
        fit(Slower(), tmp_path / "rates", **options)
    assert "maker" not in str(error.value)


def test_verify_compares_the_turns_of_one_and_two_ranks(tmp_path: Path) -> None:
    options = {"devices": 2, "accelerator": "cpu", "max_steps": 8, "run_dir": str(tmp_path)}
    report = Trainer(**SIZES, **options).verify(Duel(), train=samples(16), steps=8)
    assert report.passed, str(report)
    found = {check.name: check for check in report.checks}
    assert found["loss falls"].passed is None
    assert "several optimizers" in found["loss falls"].found


class Pretrained(Duel):
    """Freezes the critic in every second epoch."""

    def on_epoch_start(self) -> None:
        self.critic.requires_grad_(self.run.epoch % 2 == 0)


def test_an_optimizer_without_trained_parameters_sits_out(tmp_path: Path) -> None:
    for world_size in (1, 2):
        task = Pretrained()
        fit_on(world_size, task, tmp_path, train=samples(4), max_epochs=3, **SIZES)
        if world_size == 1:
            alone = weights(task)
            turns = [turn for turn, _ in task.seen[::4]]  # of 4 micro-batches each
            assert turns == ["critic", "maker", "maker", "critic", "maker"]
    assert_same(task, alone)


class Frozen(Duel):
    """Has something to train, but in no turn, from the second epoch on."""

    def on_epoch_start(self) -> None:
        for net in (self.maker, self.critic):
            net.requires_grad_(self.run.epoch == 0)


def test_if_every_optimizer_sits_out_the_run_ends(tmp_path: Path) -> None:
    task = Frozen()
    with pytest.raises(ValueError, match=r"in epoch 1 all parameters .*frozen \(critic, maker\)"):
        fit(task, tmp_path, train=samples(8), max_epochs=3, **SIZES)
    assert len(task.seen) == 2 * 8  # micro-batches of the first epoch, in two turns


class Sharing(Duel):
    """Both optimizers have the critic."""

    def configure_optimizers(self) -> Mapping[str, Any]:
        sgd = torch.optim.SGD
        return {"critic": sgd(self.critic.parameters(), 0.1), "maker": sgd(self.parameters(), 0.1)}


def test_optimizers_may_share_parameters(tmp_path: Path) -> None:
    tasks = [Sharing(), Sharing()]
    for world_size, task in enumerate(tasks, start=1):
        fit_on(world_size, task, tmp_path, train=samples(10), max_epochs=1, **SIZES)
    assert_same(*tasks)
    assert changed(weights(tasks[0])) == {"critic", "maker", "shared"}
    options: dict[str, Any] = {"max_steps": 1, "find_unused_parameters": True}
    with pytest.raises(ValueError, match=r"find_unused_parameters=true, and critic.*one optimizer"):
        fit(Sharing(), tmp_path, train=samples(8), **options)


class Lopsided(Duel):
    """The critic's turn has no weight for some samples, and the maker's weighs them by ``y``."""

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        x, y = batch
        loss = self.losses(outputs, x, y)[self.run.turn or ""]
        if self.run.turn == "critic":
            return None if self.run.step == 0 else loss
        weight = (1 + y.abs().sum()) * 2.0**30  # out of all proportion to the other turn's
        return WeightedLoss(loss * weight, weight)


def test_each_turn_has_weights_of_its_own(tmp_path: Path) -> None:
    found = []
    for world_size in (1, 3):
        for max_steps in (1, 3):
            task = Lopsided()
            fit_on(world_size, task, tmp_path, train=samples(10), max_steps=max_steps, **SIZES)
            found.append(weights(task))
    for alone, both in ((found[0], found[2]), (found[1], found[3])):
        assert_same(alone, both, tolerance=1e-6)  # weights are added up in float32
    assert changed(found[0]) == {"maker"}, "the critic stepped on nothing"
