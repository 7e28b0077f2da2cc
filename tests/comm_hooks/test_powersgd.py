"""PowerSGD against the algorithm written down by hand, on real ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import assert_equal_bits, assert_same, fit, on_ranks, train_by_hand, weights
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from trainer import TaskModule, WeightedLoss, distributed
from trainer.checkpoint.weights import load_weights
from trainer.checkpoint.writer import read_state
from trainer.comm_hooks.low_rank import first_basis
from trainer.config import TrainerConfig
from trainer.logbook import Logbook
from trainer.precision import LossScaler, Precision
from trainer.state import TrainState
from trainer.step import StepModule
from trainer.strategies import DDPStrategy

pytestmark = pytest.mark.timeout(60)

CPU = torch.device("cpu")
ROWS, COLUMNS, RANK, STEPS = 12, 20, 2, 6
SMALL_BUCKETS = 1e-5
FOURTH = Path("checkpoints", "step-00000004")


class Given(TaskModule):
    """Gets the gradients that it is given: a batch has one per parameter, or None, by name."""

    def __init__(self, transposed: bool = False) -> None:
        super().__init__()
        for name in ("first", "second"):
            zeros = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
            laid_out = zeros.t().contiguous().t() if transposed else zeros
            self.register_parameter(name, nn.Parameter(laid_out))
        self.small = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.weight = 1.0

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([(self.get_parameter(n) * g).sum() for n, g in batch.items()]).sum()

    def loss(self, outputs: Tensor, batch: Any) -> WeightedLoss:
        return WeightedLoss(outputs, self.weight)


def random_gradients(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    shapes = {"first": (ROWS, COLUMNS), "second": (ROWS, COLUMNS), "small": (3,)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


class ByHand:
    """What the ranks together compute for one matrix, from the mean of their gradients."""

    def __init__(self, name: str, columns: int) -> None:
        self.q = first_basis(name, RANK, columns).double().t()
        self.error: Tensor | float = 0.0

    def send(self, gradient: Tensor) -> Tensor:
        matrix = gradient + self.error
        p = torch.linalg.qr(matrix @ self.q).Q
        q = matrix.t() @ p
        self.q = torch.linalg.qr(q).Q
        self.error = matrix - p @ q.t()
        return p @ q.t()


class Wrapped:
    """A `Given` under DDP, step by step."""

    def __init__(self, task: Given, scaler: LossScaler | None = None, **options: Any) -> None:
        self.task = task
        own = {"comm_hook": "powersgd", "powersgd_rank": RANK, "powersgd_start_step": 0}
        self.strategy = DDPStrategy(**{**own, **options})
        self.strategy.scaler = scaler
        self.logbook = Logbook()
        self.step = StepModule(
            task,
            self.logbook,
            {},
            TrainState(sample_weights={"loss": 1.0}),
            seed=0,
            averaged_over=distributed.world_size(),
            needs_every_parameter=not self.strategy.may_miss_gradients,
        )
        self.count = 0
        self.wrap()

    def wrap(self) -> None:
        self.strategy.teardown()
        self.module = self.strategy.setup(self.step, CPU)

    def send(self, given: Mapping[str, Tensor], weight: float = 1.0) -> dict[str, Tensor]:
        """Return the gradients that come of what each rank has."""
        self.count += 1
        self.logbook.begin(self.count, 0, 1)
        self.task.weight = weight
        self.step.has_weight = False
        for parameter in self.step.parameters():
            parameter.grad = None
        loss = self.module(given, 1, distributed.world_size())
        scaler = self.strategy.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()
        named = self.task.named_parameters()
        return {name: p.grad.clone() for name, p in named if p.grad is not None}


def steps(**options: Any) -> list[dict[str, Tensor]]:
    wrapped = Wrapped(Given(options.pop("transposed", False)), **options)
    return [wrapped.send(random_gradients(step, distributed.rank())) for step in range(STEPS)]


def wrap_twice(rank: int) -> None:
    Wrapped(Given(), powersgd_rank=rank).wrap()


def wrap_where_one_is_late() -> tuple[float, float]:
    """When this rank was in the hook's group, to which rank 1 comes late, and when it went on."""
    new_group, came = dist.new_group, []

    def slow_new_group(**options: Any) -> Any:
        group = new_group(**options)
        time.sleep(0.3 * distributed.rank())
        came.append(time.monotonic())
        return group

    dist.new_group = slow_new_group
    try:
        Wrapped(Given())
    finally:
        dist.new_group = new_group
    return *came, time.monotonic()


def steps_wrapped_anew() -> list[dict[str, Tensor]]:
    """With other buckets every time."""
    wrapped = Wrapped(Given(), bucket_cap_mb=SMALL_BUCKETS)
    found = []
    for step in range(STEPS):
        found.append(wrapped.send(random_gradients(step, distributed.rank())))
        wrapped.strategy._bucket_cap_mb = None if step % 2 else SMALL_BUCKETS
        wrapped.wrap()
    return found


def steps_without_weight() -> list[dict[str, Tensor]]:
    """With steps between them that nobody takes."""
    wrapped = Wrapped(Given())
    found = []
    for step in range(STEPS):
        found.append(wrapped.send(random_gradients(step, distributed.rank())))
        nothing = wrapped.send(random_gradients(99, distributed.rank()), weight=0.0)
        assert not any(gradient.any() for gradient in nothing.values())
    return found


def steps_without_a_parameter() -> list[dict[str, Tensor]]:
    """With steps between them in which no rank uses one, or only one does."""
    wrapped = Wrapped(Given(), find_unused_parameters=True, bucket_cap_mb=SMALL_BUCKETS)
    found = []
    for step in range(STEPS):
        given = random_gradients(step, distributed.rank())
        without = {name: given[name] for name in given if name != "second"}
        found.append(wrapped.send(without if (step, distributed.rank()) == (3, 0) else given))
        assert "second" not in wrapped.send({**without, "first": torch.zeros(ROWS, COLUMNS)})
    return found


def steps_with_a_changing_scale() -> list[dict[str, Tensor]]:
    scaler = LossScaler(Precision("fp16", CPU), averaged_over=2)
    wrapped = Wrapped(Given(), scaler)
    found = []
    for step in range(STEPS):
        sent = wrapped.send(random_gradients(step, distributed.rank()))
        scale = scaler.get_scale()
        found.append({name: gradient / scale for name, gradient in sent.items()})
        scaler.update(scale * (2.0 if step % 2 else 0.125))
    return found


def check_overflow() -> None:
    """An infinite gradient on one rank is one on all, and nothing of it stays."""
    wrapped, rank = Wrapped(Given()), distributed.rank()
    wrapped.send(random_gradients(0, rank))
    bases = {name: basis.clone() for name, basis in wrapped.strategy.state_dict()["bases"].items()}
    given = random_gradients(1, rank)
    if rank == 1:
        given["first"][3, 4] = torch.inf
    sent = wrapped.send(given)
    assert not sent["first"].isfinite().all()
    assert sent["second"].isfinite().all()
    state = wrapped.strategy.state_dict()
    assert not state["errors"]["first"].any()
    assert state["errors"]["second"].any()
    assert torch.equal(state["bases"]["first"], bases["first"])
    assert not torch.equal(state["bases"]["second"], bases["second"])
    assert all(g.isfinite().all() for g in wrapped.send(random_gradients(2, rank)).values())


def bytes_sent() -> dict[str | None, int]:
    """Of one step, by hook."""
    found = {}
    original = dist.all_reduce
    for hook in ("fp16", "bf16", "powersgd", "powersgd+fp16", "powersgd+bf16"):
        sent = []
        wrapped = Wrapped(Given(), comm_hook=hook, bucket_cap_mb=SMALL_BUCKETS)
        wrapped.send(random_gradients(0, 0))

        def all_reduce(tensor: Tensor, sent: list[int] = sent, **options: Any) -> Any:
            sent.append(tensor.nbytes)
            return original(tensor, **options)

        dist.all_reduce = all_reduce
        try:
            wrapped.send(random_gradients(1, 0))
        finally:
            dist.all_reduce = original
        found[hook] = sum(sent)
        wrapped.strategy.teardown()
    return found


CASES = {
    "one bucket": steps,
    "small buckets": partial(steps, bucket_cap_mb=SMALL_BUCKETS),
    "another memory layout": partial(steps, transposed=True, bucket_cap_mb=SMALL_BUCKETS),
    "gradients of their own": partial(steps, gradient_as_bucket_view=False),
    "wrapped anew": steps_wrapped_anew,
    "steps without weight": steps_without_weight,
    "unused parameters": steps_without_a_parameter,
    "loss scale": steps_with_a_changing_scale,
}


class Net(TaskModule):
    """A net in float64 with matrices worth compressing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        sizes = (16, 24, 32, 24, 12)
        layers = [[nn.Linear(*pair), nn.Tanh()] for pair in pairwise(sizes)]
        self.net = nn.Sequential(*chain(*layers)).double()

    def forward(self, batch: Any) -> Tensor:
        outputs: Tensor = self.net(batch[0])
        return outputs

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(outputs, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def pairs(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 16, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x[:, :12].sin())


def train(run_dir: Path, hook: str | None, **options: Any) -> dict[str, Tensor]:
    """Train a `Net`; return its weights."""
    task = Net()
    defaults: dict[str, Any] = {"train": pairs(64), "global_batch_size": 8, "max_steps": 8}
    if hook is not None and hook.startswith("powersgd"):
        defaults |= {"powersgd_start_step": 0, "powersgd_rank": RANK}
    options = {**defaults, "bucket_cap_mb": SMALL_BUCKETS, "comm_hook": hook, **options}
    fit(task, run_dir, **options)
    return weights(task)


def loss(final: dict[str, Tensor]) -> float:
    """Return the loss over all samples."""
    task = Net()
    task.load_state_dict(final)
    x, y = pairs(64).tensors
    return float(task.loss(task((x, y)), (x, y)).detach())


def trained_long(run_dir: Path, *hooks: str | None) -> dict[str | None, float]:
    options = {"max_steps": 50, "bucket_cap_mb": 0.005}
    return {hook: loss(train(run_dir / str(hook), hook, **options)) for hook in hooks}


def on_two_ranks(run_dir: Path) -> dict[str, Any]:
    check_overflow()
    every = {"checkpoint": {"every_n_steps": 4, "keep": None}}
    powersgd = partial(train, hook="powersgd")
    return {
        "cases": {name: case() for name, case in CASES.items()},
        "bytes": bytes_sent(),
        "losses": trained_long(run_dir / "losses", None, "powersgd", "powersgd+bf16"),
        "straight": powersgd(run_dir / "straight"),
        "saved": powersgd(run_dir / "saved", **every),
        "resumed": powersgd(run_dir / "resumed", resume=str(run_dir / "saved" / FOURTH)),
        "late": powersgd(run_dir / "late", powersgd_start_step=5, max_steps=5),
        "plain": train(run_dir / "plain", None, max_steps=5),
        "four samples": powersgd(run_dir / "4", global_batch_size=4, powersgd_rank=4, max_steps=5),
    }


def on_four_ranks(two: Path, run_dir: Path) -> dict[str, Any]:
    return {
        "losses": trained_long(run_dir / "losses", None, "powersgd"),
        "resumed": train(run_dir / "resumed", "powersgd", resume=str(two / "saved" / FOURTH)),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> list[Any]:
    return on_ranks(2, on_two_ranks, folder)


@pytest.fixture(scope="module")
def four_ranks(two_ranks: list[Any], folder: Path) -> list[Any]:
    return on_ranks(4, on_four_ranks, folder, folder / "four")


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_algorithm(case: str, two_ranks: list[Any]) -> None:
    is_transposed = case == "another memory layout"
    hands = {n: ByHand(n, ROWS if is_transposed else COLUMNS) for n in ("first", "second")}
    for step in range(STEPS):
        expected = {}
        for name in ("first", "second", "small"):
            pair = [random_gradients(step, rank)[name] for rank in range(2)]
            if (case, step, name) == ("unused parameters", 3, "second"):
                pair[0] = torch.zeros_like(pair[0])
            mean = (pair[0] + pair[1]) / 2
            if name == "small":
                expected[name] = mean
            elif is_transposed:
                expected[name] = hands[name].send(mean.t()).t()
            else:
                expected[name] = hands[name].send(mean)
        for found in two_ranks:
            assert_same(found["cases"][case][step], expected, 1e-9)
        assert_equal_bits(*(found["cases"][case][step] for found in two_ranks))


def test_what_is_sent(two_ranks: list[Any]) -> None:
    item = 8  # a float64
    whole = item * (2 * ROWS * COLUMNS + 3)
    thin = item * (2 * RANK * (ROWS + COLUMNS) + 3 + 2)  # a flag for each matrix
    weight = 4  # a float32, sent by itself
    found = two_ranks[0]["bytes"]
    assert found["fp16"] == found["bf16"] == whole // 4 + 2 + weight  # and once more in its bucket
    assert found["powersgd"] == thin + weight
    assert found["powersgd+fp16"] == found["powersgd+bf16"] == thin // 4 + weight


def test_it_trains_like_uncompressed_gradients(two_ranks: list[Any], four_ranks: list[Any]) -> None:
    for ranks in (two_ranks, four_ranks):
        losses = ranks[0]["losses"]
        assert all(found["losses"] == losses for found in ranks)
        plain = losses.pop(None)
        learned = loss(weights(Net())) - plain
        assert learned > plain
        for compressed in losses.values():
            assert 1e-6 < abs(compressed - plain) < 0.05 * learned
    assert losses["powersgd"] == pytest.approx(two_ranks[0]["losses"]["powersgd"], rel=1e-6)


def test_enough_columns_for_all_samples_lose_nothing(two_ranks: list[Any]) -> None:
    expected = Net()
    train_by_hand(expected, Subset(pairs(64), range(20)), global_batch_size=4)
    assert_same(two_ranks[0]["four samples"], weights(expected))


def test_before_its_first_step_nothing_is_compressed(two_ranks: list[Any]) -> None:
    assert_equal_bits(two_ranks[0]["late"], two_ranks[0]["plain"])


def test_it_is_said_if_no_matrix_is_large_enough(
    capfd: pytest.CaptureFixture[str],
) -> None:
    on_ranks(2, wrap_twice, RANK)
    assert "PowerSGD compresses nothing" not in capfd.readouterr().out
    on_ranks(2, wrap_twice, 1000)
    told = capfd.readouterr().out
    assert told.count("PowerSGD compresses nothing") == told.count("powersgd_rank=1000") == 1


def test_no_rank_goes_on_before_all_are_in_the_group_of_the_hook() -> None:
    """For it may leave the group again at once, and be taken for dead by those that connect."""
    (_, went_on), (late, _) = on_ranks(2, wrap_where_one_is_late)
    assert late < went_on


def test_a_checkpoint_has_the_errors_for_any_world_size(
    two_ranks: list[Any], four_ranks: list[Any]
) -> None:
    found = two_ranks[0]
    assert_same(found["saved"], found["straight"])
    assert_equal_bits(found["resumed"], found["saved"])
    assert_same(four_ranks[0]["resumed"], found["straight"])


def test_one_rank_pays_the_errors_off(two_ranks: list[Any], folder: Path, tmp_path: Path) -> None:
    source = folder / "saved" / FOURTH
    state = read_state(source)["shared"]["strategy"]
    assert all(error.any() for error in state["errors"].values())
    expected = Net()
    load_weights(expected, source)
    optimizer = expected.configure_optimizers()
    x, y = (tensor[32:40] for tensor in pairs(64).tensors)
    expected.loss(expected((x, y)), (x, y)).backward()
    for name, error in state["errors"].items():
        grad = expected.get_parameter(name).grad
        assert grad is not None
        grad += error
    optimizer.step()
    found = train(tmp_path, "powersgd", resume=str(source), max_steps=5)
    assert_same(found, weights(expected))
    kept = read_state(tmp_path / "checkpoints" / "last")["shared"]["strategy"]
    assert kept["errors"] == {}
    assert_equal_bits(kept["bases"], state["bases"])


def test_another_rank_is_another_experiment(
    two_ranks: list[Any], folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"optimizer: powersgd_rank 2 -> 3"):
        train(tmp_path, "powersgd", resume=str(folder / "saved" / FOURTH), powersgd_rank=3)


def test_another_hook_has_no_use_for_the_errors(
    two_ranks: list[Any], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(folder / "saved" / FOURTH)
    with pytest.raises(ValueError, match=r"comm_hook powersgd -> none"):
        train(tmp_path, None, resume=source)
    train(tmp_path, None, resume=source, accept_changes=["optimizer"])
    assert "gradients that were sent in another way is dropped" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["powersgd_rank", "powersgd_start_step"])
def test_options_of_another_hook_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=rf"{option}=7 with comm_hook='fp16' has no effect"):
        TrainerConfig(comm_hook="fp16", **{option: 7})
