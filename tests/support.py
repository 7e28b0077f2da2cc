"""What many tests share: tiny tasks, fits on real ranks, and the same training written by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path
from torch.utils.data import Dataset, TensorDataset

from trainer import FitResult, TaskModule, Trainer, WeightedLoss, distributed
from trainer.config import TrainerConfig
from trainer.launching.launcher import launch

Optimizers = Callable[[Iterable[nn.Parameter]], Any]


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02)


class Regression(TaskModule):
    """A two-layer net in float64, always with the same initial weights; batches are ``(x, y)``."""

    def __init__(self, optimizer: Optimizers = sgd) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.optimizer = optimizer
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def forward(self, batch: Any) -> Tensor:
        result: Tensor = self.net(batch[0]).squeeze(1)
        return result

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        return nn.functional.mse_loss(outputs, batch[1])

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class TokenRegression(Regression):
    """Weighs its samples: batches are ``(x, y, weight)``, and the loss is a `WeightedLoss`."""

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        errors = (outputs - batch[1]) ** 2
        return WeightedLoss((errors * batch[2]).sum(), batch[2].sum())


class Sleeper(Regression):
    """Takes its time: in each forward by rank, in the middle of a backward, before an update."""

    def __init__(self, *forward_s: float, backward_s: float = 0, update_s: float = 0) -> None:
        super().__init__()
        self.forward_s, self.backward_s, self.update_s = forward_s, backward_s, update_s

    def forward(self, batch: Any) -> Tensor:
        time.sleep(self.forward_s[self.run.rank])
        first, activation, last = self.net
        hidden = activation(first(batch[0]))
        if hidden.requires_grad:
            hidden.register_hook(lambda _: time.sleep(self.backward_s))
        result: Tensor = last(hidden).squeeze(1)
        return result

    def before_optimizer_step(self) -> None:
        time.sleep(self.update_s)


def samples(count: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """``count`` samples ``(x, y)``."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    y = x.sum(dim=1).sin() + torch.arange(count) / 10
    return TensorDataset(x.to(dtype), y.to(dtype))


class SlowSamples(Dataset[Any]):
    """``count`` samples ``(x, y)``, for each of which a rank takes its time."""

    def __init__(self, count: int, *seconds: float) -> None:
        self.samples = samples(count)
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds[distributed.rank()])
        return self.samples[index]


def weighted_samples(weights: Sequence[float]) -> TensorDataset:
    """Samples ``(x, y, weight)``, one per weight."""
    x, y = samples(len(weights)).tensors
    return TensorDataset(x, y, torch.tensor(weights, dtype=torch.float64))


def fit(task: TaskModule, run_dir: Path, *, train: Any, **options: Any) -> FitResult:
    """Fit without shuffling and with no callbacks and loggers but those in ``options``.

    In a rank it fits on the ranks that are there.
    """
    data = {name: options.pop(name) for name in ("val", "test", "test_best") if name in options}
    quiet: dict[str, Any] = {"callbacks": False, "logger": False, "shuffle": False}
    for name in ("callbacks", "logger"):
        if isinstance(options.get(name), list):  # in place of the default ones, not beside them
            options[name] = dict(enumerate(options[name]))
    return Trainer(
        **{**quiet, "accelerator": "cpu", "timeout_s": 30, "run_dir": str(run_dir), **options}
    ).fit(task, train=train, **data)


def fit_on(world_size: int, task: TaskModule, run_dir: Path, **options: Any) -> FitResult:
    """Fit on ``world_size`` ranks; ``task`` has the weights afterwards."""
    return fit(task, run_dir, devices=world_size, **options)


def on_ranks(world_size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``job(*args)`` on real ranks and return what each of them returned, in rank order.

    A `fit` inside ``job`` trains on these ranks: many of them share one launch.
    """
    config = TrainerConfig(devices=world_size, accelerator="cpu", timeout_s=30)
    found: list[Any] = launch(lambda: distributed.all_gather_object(job(*args)), config=config)
    return found


def train_by_hand(
    task: TaskModule,
    dataset: Dataset[Any],
    *,
    global_batch_size: int,
    epochs: int = 1,
    clip: float | None = None,
) -> float:
    """Train in dataset order by a plain loop on whole global batches.

    Returns:
        The mean loss of the last epoch.
    """
    optimizer = task.configure_optimizers()
    assert isinstance(optimizer, torch.optim.Optimizer)
    loader: Any = torch.utils.data.DataLoader(dataset, batch_size=global_batch_size)
    for _ in range(epochs):
        total = weight = 0.0
        for batch in loader:
            optimizer.zero_grad()
            loss, size = task.loss(task(batch), batch), len(batch[0])
            if isinstance(loss, WeightedLoss):
                if loss.weight == 0:
                    continue
                loss, size = loss.total / loss.weight, loss.weight
            total += float(loss.detach() * size)
            weight += float(size)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(task.parameters(), clip)
            optimizer.step()
    return total / weight


def measured(metrics: Mapping[str, float]) -> dict[str, float]:
    """What an event says about the training, not about its speed."""
    return {name: v for name, v in metrics.items() if not name.startswith("perf/")}


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def weights(module: nn.Module) -> dict[str, Tensor]:
    """A copy of the weights by name."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_same(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    """Compare weights (or the modules that have them) within the rounding of a sum."""
    found, expected = (weights(w) if isinstance(w, nn.Module) else w for w in (found, expected))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def assert_equal_bits(found: Any, expected: Any) -> None:
    """Compare nested tensors and plain values, or the weights of modules, to the last bit.

    NaN is the same as NaN, and -0 is another number than +0.
    """
    found, expected = (weights(w) if isinstance(w, nn.Module) else w for w in (found, expected))
    (left, spec), (right, same) = tree_flatten_with_path(found), tree_flatten_with_path(expected)
    assert spec == same
    for (path, one), (_, other) in zip(left, right, strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)  # tells where
            assert torch.equal(_bytes(one), _bytes(other)), f"{keystr(path)}: the sign of a zero"
        else:
            assert repr(one) == repr(other), keystr(path)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
