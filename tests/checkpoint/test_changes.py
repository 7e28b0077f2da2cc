"""A resumed run that is another experiment: refused with what differs, or taken as it was meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Optimizers, Regression, assert_equal_bits, fit, samples, sgd
from torch import Tensor, nn
from torch.optim import lr_scheduler

from trainer import OptimizerSetup, Trainer
from trainer.checkpoint.writer import read_state
from trainer.data.module import DataModule

DATA: dict[str, Any] = {"train": samples(12), "global_batch_size": 2}
Params = Iterable[nn.Parameter]


def slower(params: Params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.8)


def adam(params: Params) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def scheduled(make: Callable[..., Any], lr: float = 0.1, **setup: Any) -> Optimizers:
    def build(params: Params) -> OptimizerSetup:
        optimizer = torch.optim.SGD(params, lr=lr, momentum=0.9)
        return OptimizerSetup(optimizer, make(optimizer), **setup)

    return build


def cosine(steps: int, lr: float = 0.1) -> Optimizers:
    return scheduled(lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, steps), lr)


class Longer(Regression):
    """`Regression` with one more parameter, in front of the others."""

    def __init__(self, optimizer: Optimizers = sgd) -> None:
        super().__init__(optimizer)
        net = self.net
        del self.net
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.net = net

    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch) * self.scale


def go_on(before: Regression, after: Regression, run_dir: Path, **options: Any) -> Any:
    """Train 3 steps, then 3 more with another task or other options."""
    fit(before, run_dir, max_steps=3, **DATA)
    return fit(after, run_dir, **{"max_steps": 6, "resume": "auto", **DATA, **options})


def by_hand(
    task: Regression,
    optimizer: torch.optim.Optimizer,
    start: int,
    stop: int,
    clip: float | None = None,
) -> None:
    """Steps ``start`` to ``stop`` of an epoch in dataset order."""
    x, y = DATA["train"].tensors
    for step in range(start, stop):
        batch = x[2 * step : 2 * step + 2], y[2 * step : 2 * step + 2]
        optimizer.zero_grad()
        task.loss(task(batch), batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(task.parameters(), clip)
        optimizer.step()


class Ordered(DataModule):
    def train_dataset(self) -> Any:
        return samples(14)

    def train_indices(self, seed: int, epoch: int) -> list[int]:
        return list(range(14))


def test_every_difference_is_shown_with_what_to_write(tmp_path: Path) -> None:
    fit(Regression(cosine(20)), tmp_path, max_steps=3, **DATA)
    task = Longer(cosine(40, lr=0.05))
    task.net[2] = nn.Linear(5, 2).double()
    task.net[0].bias.requires_grad_(False)
    options: dict[str, Any] = {"run_dir": str(tmp_path), "resume": "auto", "max_steps": 6}
    options |= {"callbacks": False, "logger": False, "accelerator": "cpu", "seed": 1}
    options |= {"gradient_clip_norm": 1.0, "precision": "bf16"}
    path = tmp_path / "checkpoints" / "step-00000003"
    with pytest.raises(ValueError, match="another experiment") as caught:
        Trainer(global_batch_size=4, accept_changes=["model"], **options).fit(task, Ordered())
    assert str(caught.value).splitlines() == [
        f"the run to resume from {path} was another experiment:",
        "  model: net.0.bias (5,) float64 -> (5,) float64 frozen",
        "  model: net.2.weight (1, 5) float64 -> (2, 5) float64",
        "  model: net.2.bias (1,) float64 -> (2,) float64",
        "  model: scale none -> (1,) float64",
        "  optimizer: lr 0.1 -> 0.05",
        "  optimizer: gradient_clip_norm none -> 1.0",
        "  optimizer: precision fp32 -> bf16",
        "  schedule: CosineAnnealingLR T_max 20 -> 40",
        "  data: seed 0 -> 1",
        "  data: global_batch_size 2 -> 4",
        "  data: shuffle False -> none",
        "  data: num_samples 12 -> 14",
        "  data: sampler none -> train_indices",
        "Set these back; or, if they are meant, set "
        "accept_changes=[model,optimizer,schedule,data]:",
        "  optimizer: the new values apply, with the old state as far as it fits",
        "  schedule: the new schedule goes on from this step",
        "  data: the new order goes on from this position in the epoch",
        f"or start a new run from its weights: set init_from={path} in place of resume=auto",
        "(On the command line: trainer.accept_changes=..., trainer.init_from=...)",
    ]


def test_new_hyperparameters_meet_the_old_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, expected = Regression(slower), Regression()
    with pytest.raises(ValueError, match=r"lr 0\.1 -> 0\.05\n.* momentum 0\.9 -> 0\.8\n"):
        go_on(Regression(), task, tmp_path)
    go_on(Regression(), task, tmp_path, accept_changes=["optimizer"])
    assert "accepted optimizer: momentum 0.9 -> 0.8" in capsys.readouterr().out
    optimizer = sgd(expected.parameters())
    by_hand(expected, optimizer, 0, 3)
    optimizer.param_groups[0].update(lr=0.05, momentum=0.8)
    by_hand(expected, optimizer, 3, 6)
    assert_equal_bits(task, expected)


def test_what_the_message_says_is_what_works(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="another experiment") as caught:
        go_on(Regression(), Regression(slower), tmp_path, resume="last", gradient_clip_norm=1.0)
    [accepted] = re.findall(r"set accept_changes=\[(.*)\]", str(caught.value))
    [[path, resume]] = re.findall(r"set init_from=(.*) in place of (.*)", str(caught.value))
    assert resume == "resume=last"
    result = fit(Regression(slower), tmp_path / "new", init_from=path, max_steps=1, **DATA)
    assert result.step == 1
    result = go_on(Regression(), Regression(slower), tmp_path, accept_changes=[accepted])
    assert result.step == 6


def test_other_options_of_the_step_leave_the_state_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def plateau(params: Params) -> OptimizerSetup:
        optimizer = sgd(params)
        follower = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=9.0)
        return OptimizerSetup(optimizer, follower, monitor="val/loss")

    options: dict[str, Any] = {"val": samples(2), "validate_every_n_steps": 1, **DATA}
    fit(Regression(plateau), tmp_path, max_steps=3, gradient_clip_norm=0.5, **options)
    task, expected = Regression(plateau), Regression()
    options |= {"max_steps": 4, "resume": "auto", "gradient_clip_norm": 0.1}
    with pytest.raises(ValueError, match=r"optimizer: gradient_clip_norm 0\.5 -> 0\.1\n"):
        fit(task, tmp_path, **options)
    fit(task, tmp_path, accept_changes=["optimizer"], **options)
    said = capsys.readouterr().out
    assert "accepted optimizer: gradient_clip_norm 0.5 -> 0.1\n" in said
    assert "anew" not in said
    optimizer = sgd(expected.parameters())
    for step, (rate, clip) in enumerate([(0.1, 0.5), (0.05, 0.5), (0.025, 0.5), (0.0125, 0.1)]):
        optimizer.param_groups[0]["lr"] = rate
        by_hand(expected, optimizer, step, step + 1, clip)
    assert_equal_bits(task, expected)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (1, 2, "resume: micro_batch_size 1 -> 2: dropout masks and BatchNorm follow the micro-b"),
        (1, None, "resume: micro_batch_size 1 -> null: "),
        (None, 1, None),
        (1, 1, None),
    ],
)
def test_other_micro_batches_are_said(
    before: int | None,
    after: int | None,
    words: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit(Regression(), tmp_path, max_steps=1, micro_batch_size=before, **DATA)
    fit(Regression(), tmp_path, max_steps=2, micro_batch_size=after, resume="auto", **DATA)
    said = capsys.readouterr().out
    assert words in said if words else "micro_batch_size" not in said


def test_another_optimizer_starts_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task, expected = Regression(adam), Regression()
    go_on(Regression(), task, tmp_path, accept_changes=["optimizer"])
    said = capsys.readouterr().out
    assert "accepted optimizer: SGD -> Adam\n" in said
    assert "the state of SGD is of no use to Adam, which starts anew" in said
    by_hand(expected, sgd(expected.parameters()), 0, 3)
    by_hand(expected, adam(expected.parameters()), 3, 6)
    assert_equal_bits(task, expected)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize(
    ("before", "after", "accepted"),
    [
        (cosine(20), cosine(40), ["schedule"]),
        (cosine(20), cosine(20, lr=0.3), ["optimizer"]),
        (sgd, cosine(40, lr=0.1), ["schedule"]),
    ],
)
def test_a_new_schedule_goes_on_from_the_present_step(
    before: Optimizers, after: Optimizers, accepted: list[str], tmp_path: Path
) -> None:
    task, expected = Regression(after), Regression()
    with pytest.raises(ValueError, match=rf"accept_changes=\[{accepted[0]}\]"):
        go_on(Regression(before), task, tmp_path)
    go_on(Regression(before), task, tmp_path, accept_changes=accepted)

    def through(optimizers: Optimizers, start: int, stop: int, state: Any = None) -> Any:
        setup = optimizers(expected.parameters())
        setup = setup if isinstance(setup, OptimizerSetup) else OptimizerSetup(setup)
        if state is not None:
            fresh = setup.optimizer.state_dict()["param_groups"]
            setup.optimizer.load_state_dict({"state": state, "param_groups": fresh})
        for step in range(stop):
            if step >= start:
                by_hand(expected, setup.optimizer, step, step + 1)
            if setup.scheduler is not None:
                setup.scheduler.step()
        return setup.optimizer.state_dict()["state"]

    state = through(before, 0, 3)
    through(after, 3, 6, state)
    assert_equal_bits(task, expected)


def decay(task: Regression) -> Optimizers:
    total = task.run.total_steps
    assert total is not None
    return scheduled(lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1 - step / total))


class Decaying(Regression):
    def configure_optimizers(self) -> Any:
        return decay(self)(self.parameters())


class WarmingUp(Regression):
    def configure_optimizers(self) -> Any:
        def factor(step: int) -> float:
            assert self.run.total_steps is not None, "it may depend on it"
            return min(1.0, (step + 1) / 3)

        return scheduled(lambda opt: lr_scheduler.LambdaLR(opt, factor))(self.parameters())


def test_a_longer_run_is_refused_where_it_would_have_had_another_past(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"LambdaLR factor at 3 \[0\.0\] -> \[0\.5\]\n"):
        go_on(Decaying(), Decaying(), tmp_path / "decay")
    task, through = WarmingUp(), WarmingUp()
    go_on(WarmingUp(), task, tmp_path / "warm-up")
    fit(through, tmp_path / "through", max_steps=6, **DATA)
    assert_equal_bits(task, through)


def test_weights_that_fit_are_kept_with_their_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, expected = Longer(), Longer()
    with pytest.raises(ValueError, match=r"model: scale none -> \(1,\) float64\n.*=\[model\]"):
        go_on(Regression(), task, tmp_path)
    go_on(Regression(), task, tmp_path, accept_changes=["model"])
    assert "resume: the optimizer starts anew for scale\n" in capsys.readouterr().out
    old = [p for name, p in expected.named_parameters() if name != "scale"]
    optimizer = sgd(old)
    by_hand(expected, optimizer, 0, 3)
    optimizer.param_groups[0]["params"].append(expected.scale)
    expected.scale.grad = None
    by_hand(expected, optimizer, 3, 6)
    assert_equal_bits(task, expected)


def test_the_order_of_the_parameters_does_not_matter(tmp_path: Path) -> None:
    def reversed_adam(params: Params) -> torch.optim.Optimizer:
        return adam(list(params)[::-1])

    task, through = Regression(reversed_adam), Regression(adam)
    go_on(Regression(adam), task, tmp_path / "a")
    fit(through, tmp_path / "b", max_steps=6, **DATA)
    assert_equal_bits(task, through)


def test_a_parameter_in_another_group(tmp_path: Path) -> None:
    def two_groups(params: Params, first: int) -> torch.optim.Optimizer:
        some = list(params)
        groups = [{"params": some[:first], "name": "a"}, {"params": some[first:], "lr": 0.2}]
        return torch.optim.SGD(groups, lr=0.1)

    before, after = (Regression(lambda p, n=n: two_groups(p, n)) for n in (2, 3))
    with pytest.raises(ValueError, match=r"optimizer: net\.2\.weight group 1 -> group a\n"):
        go_on(before, after, tmp_path)


def test_other_groups_are_shown_by_what_they_change(tmp_path: Path) -> None:
    def two_groups(params: Params) -> torch.optim.Optimizer:
        some = list(params)
        return torch.optim.SGD([{"params": some[:3], "lr": 0.2}, {"params": some[3:]}], lr=0.1)

    before = Regression(lambda params: torch.optim.SGD(params, lr=0.1))
    with pytest.raises(ValueError, match="another experiment") as caught:
        go_on(before, Regression(two_groups), tmp_path)
    assert [line for line in str(caught.value).splitlines() if "optimizer: " in line][:-1] == [
        "  optimizer: group 0 -> group 0, group 1",
        "  optimizer: lr 0.1 -> 0.2 for net.0.weight, net.0.bias, net.2.weight",
    ]


def by_plateau(lr: float, patience: int, groups: int = 1) -> Optimizers:
    def build(params: Params) -> OptimizerSetup:
        some = list(params)
        parts = [{"params": some[number::groups]} for number in range(groups)]
        optimizer = torch.optim.SGD(parts, lr=lr)
        # Whatever comes is no improvement.
        follower = lr_scheduler.ReduceLROnPlateau(optimizer, patience=patience, threshold=9.0)
        return OptimizerSetup(optimizer, follower, monitor="val/loss")

    return build


@pytest.mark.parametrize(
    ("after", "rate"),
    [
        (by_plateau(0.1, patience=3), 1e-4),
        (by_plateau(0.1, patience=3, groups=2), 1e-4),
        (by_plateau(0.5, patience=3), 0.5),
    ],
)
def test_a_rate_that_followed_a_metric_stays(
    after: Optimizers, rate: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"val": samples(2), "validate_every_n_steps": 1}
    fit(Regression(by_plateau(0.1, patience=0)), tmp_path, max_steps=3, **options, **DATA)
    options |= {"accept_changes": ["optimizer", "schedule"], "resume": "auto", "max_steps": 4}
    result = fit(Regression(after), tmp_path, **options, **DATA)
    said = capsys.readouterr().out
    assert "the schedule that follows val/loss starts anew\n" in said
    assert ("the learning rate stays where it was, at 0.0001\n" in said) == (rate == 1e-4)
    groups = read_state(result.last_checkpoint)["optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == pytest.approx([rate] * len(groups))


def test_another_global_batch_goes_on_at_the_same_sample(tmp_path: Path) -> None:
    task, expected = Regression(), Regression()
    change: dict[str, Any] = {"accept_changes": ["data"], "global_batch_size": 3}
    result = go_on(Regression(), task, tmp_path, **change, max_epochs=1)
    assert (result.samples, result.step) == (12, 5), "6 samples in 3 steps, then 6 in 2"
    optimizer = sgd(expected.parameters())
    by_hand(expected, optimizer, 0, 3)
    x, y = DATA["train"].tensors
    for start in (6, 9):
        optimizer.zero_grad()
        batch = x[start : start + 3], y[start : start + 3]
        expected.loss(expected(batch), batch).backward()
        optimizer.step()
    torch.testing.assert_close(task.state_dict(), expected.state_dict(), rtol=1e-12, atol=1e-12)


class Lasting(Regression):
    """Its schedule refuses to go on after the last step of the run."""

    total = 0

    def configure_optimizers(self) -> OptimizerSetup:
        assert self.run.total_steps is not None
        self.total = self.run.total_steps
        optimizer = sgd(self.parameters())
        return OptimizerSetup(optimizer, lr_scheduler.OneCycleLR(optimizer, 0.1, self.total))


def test_a_run_of_other_global_batches_knows_its_last_step(tmp_path: Path) -> None:
    fit(Lasting(), tmp_path, max_epochs=2, limit_train_batches=6, **DATA)
    options: dict[str, Any] = {**DATA, "max_epochs": 4, "global_batch_size": 4, "resume": "auto"}
    options |= {"limit_train_batches": 6, "accept_changes": ["data", "schedule"]}
    task = Lasting()
    assert fit(task, tmp_path, **options).step == task.total == 12 + 2 * 3
    task = Lasting()
    options |= {"resume": str(tmp_path / "checkpoints/step-00000015"), "accept_changes": []}
    assert fit(task, tmp_path, **options).step == task.total == 18, "nothing has changed since"


@pytest.mark.parametrize(("size", "fitting"), [(4, "3 or 6"), (5, "3 or 6"), (7, "6")])
def test_a_global_batch_that_would_start_elsewhere_is_refused(
    size: int, fitting: str, tmp_path: Path
) -> None:
    change: dict[str, Any] = {"accept_changes": ["data"], "global_batch_size": size}
    with pytest.raises(ValueError, match=rf"at sample 6 of .* global_batch_size={fitting} it"):
        go_on(Regression(), Regression(), tmp_path, **change)


def test_an_execution_detail_is_no_change(tmp_path: Path) -> None:
    def fused(params: Params) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=0.01, fused=True)

    result = go_on(Regression(fused), Regression(adam), tmp_path, micro_batch_size=1)
    assert result.step == 6
    [group] = read_state(result.last_checkpoint)["optimizer"]["param_groups"]
    assert group["fused"] is None, "it computes as the checkpoint's optimizer did"


def test_accepting_what_has_not_changed_changes_nothing(tmp_path: Path) -> None:
    task, through = Regression(cosine(20)), Regression(cosine(20))
    everything = ["model", "optimizer", "schedule", "data"]
    go_on(Regression(cosine(20)), task, tmp_path / "a", accept_changes=everything)
    fit(through, tmp_path / "b", max_steps=6, **DATA)
    assert_equal_bits(task, through)
