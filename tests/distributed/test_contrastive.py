"""Losses over the whole global batch on real ranks, compared with plain loops in one process."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from support import assert_equal_bits, assert_same, fit, on_ranks, sgd, weights
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from trainer import TaskModule, Trainer, WeightedLoss

pytestmark = [pytest.mark.timeout(90), pytest.mark.parametrize("world_size", [1, 3, 4])]

# 5, 5 and 1 samples: with 4 ranks one never has any, and in the last step only one has.
GLOBAL_BATCH, SAMPLES, EPOCHS = 5, 11, 2


def pairs(count: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Two views of each sample."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, 3, generator=generator, dtype=torch.float64) / 3
    return TensorDataset(x.to(dtype), (x + noise).to(dtype))


class Contrastive(TaskModule):
    """What the tasks here have in common: one small encoder, the same at the start."""

    global_loss = True

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)).to(dtype)
        self.temperature = nn.Parameter(torch.tensor(0.7, dtype=dtype))
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.encoder.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def configure_optimizers(self) -> Any:
        return sgd(self.parameters())


class SimCLR(Contrastive):
    """NT-Xent (Chen et al. 2020), with a learned temperature that only the loss uses."""

    def forward(self, batch: Any) -> Any:
        self.log("share of forward", 1.0)
        return tuple(functional.normalize(self.encoder(view), dim=1) for view in batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        self.log("share of forward", 0.0)
        self.log("samples", len(batch[0]))
        return nt_xent(*outputs, self.temperature)


class Sequences(Contrastive):
    def forward(self, batch: Any) -> Any:
        return self.encoder(batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        return (outputs.mean(dim=(0, 1)) ** 2).sum() * self.temperature


class Measured(SimCLR):
    def build_metrics(self, split: str) -> Any:
        from torchmetrics import SumMetric

        return {"seen": SumMetric()}

    def update_metrics(self, metrics: Any, outputs: Any, batch: Any) -> None:
        metrics["seen"].update(float(len(outputs[0])))


def fields(batch: Any) -> Any:
    return batch.values() if isinstance(batch, dict) else batch


def nt_xent(first: Tensor, second: Tensor, temperature: Tensor) -> Tensor:
    count = len(first)
    both = torch.cat([first, second])
    logits = both @ both.T / temperature
    logits = logits.masked_fill(torch.eye(2 * count, dtype=torch.bool), -torch.inf)
    return functional.cross_entropy(logits, torch.arange(2 * count).roll(count))


class Pair(NamedTuple):
    image: Any
    text: Any
    name: Any


class Named(Dataset[Pair]):
    """Samples of `pairs` with a name each: of another length for each sample."""

    def __init__(self, count: int) -> None:
        self.pairs = pairs(count)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Pair:
        return Pair(*self.pairs[index], "x" * (index + 1))


class AsDict(Named):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)._asdict()


class CLIP(Contrastive):
    """A symmetric loss (Radford et al. 2021); ``forward`` returns the learned scale."""

    def forward(self, batch: Any) -> Any:
        image, text, _ = fields(batch)
        features = [functional.normalize(self.encoder(view), dim=1) for view in (image, text)]
        return {"features": features, "scale": self.temperature.exp(), "name": "clip"}

    def loss(self, outputs: Any, batch: Any) -> Any:
        _, _, names = fields(batch)
        image, text = outputs["features"]
        logits = image @ text.T * outputs["scale"]
        labels = torch.arange(len(logits))
        losses = functional.cross_entropy(logits, labels, reduction="none")
        losses = losses + functional.cross_entropy(logits.T, labels, reduction="none")
        lengths = torch.tensor([len(name) for name in names], dtype=losses.dtype)
        return (losses * lengths).mean() / 10


class Weighed(SimCLR):
    """Weighs samples by what the others are; a whole batch may have weight 0."""

    def loss(self, outputs: Any, batch: Any) -> Any:
        first, second = outputs
        near = (first @ second.T).relu()
        weight = (batch[0][:, 0] > 0).to(near.dtype)
        total = weight @ near @ weight * self.temperature
        return WeightedLoss(total if weight.sum() else total / 0, weight.sum())


class Skipping(SimCLR):
    """Leaves out the last step of an epoch."""

    def loss(self, outputs: Any, batch: Any) -> Any:
        return super().loss(outputs, batch) if len(batch[0]) > 1 else None


class WithNoise(SimCLR):
    """Draws in the loss."""

    def loss(self, outputs: Any, batch: Any) -> Any:
        noise = torch.rand(len(batch[0]), dtype=torch.float64)
        return super().loss(outputs, batch) + (outputs[0].sum(dim=1) * noise).mean()


class Sampling(WithNoise):
    """Draws in evaluation too."""

    def __init__(self, global_loss: bool) -> None:
        super().__init__()
        self.global_loss = global_loss

    def eval_forward(self, batch: Any) -> Any:
        return tuple(part + torch.randn_like(part) for part in self(batch))

    def loss(self, outputs: Any, batch: Any) -> Any:
        return super().loss(outputs, batch) if self.global_loss else outputs[0].mean()


class Unused(SimCLR):
    """Has a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(2))


class PerRank(SimCLR):
    global_loss = False


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(pairs(SAMPLES))


class Shards(Stream):
    """Rank 0 of several has one sample only, and then none any more."""

    def shard(self, rank: int, world_size: int) -> Any:
        data = pairs(SAMPLES)
        own = range(rank, SAMPLES, world_size - 1) if world_size > 1 else range(SAMPLES)
        return (data[i] for i in (own if rank or world_size == 1 else [0]))


class Case(NamedTuple):
    task: Callable[[], TaskModule]
    data: Callable[[], Any] = lambda: pairs(SAMPLES)
    options: Mapping[str, Any] = MappingProxyType({})
    tolerance: float = 1e-9


CASES = {
    "simclr": Case(SimCLR),
    "float32": Case(
        lambda: SimCLR(torch.float32), lambda: pairs(SAMPLES, torch.float32), tolerance=1e-5
    ),
    "clip of named tuples": Case(CLIP, lambda: Named(SAMPLES)),
    "clip of dicts": Case(CLIP, lambda: AsDict(SAMPLES)),
    "weighed": Case(Weighed),
    "skipping": Case(Skipping),
    "clipped": Case(SimCLR, options={"gradient_clip_norm": 0.1}),
    "unused": Case(Unused, options={"find_unused_parameters": True}),
    "stream": Case(SimCLR, Stream),
    "loader": Case(SimCLR, lambda: DataLoader(pairs(SAMPLES), batch_size=GLOBAL_BATCH)),
}


FORMS: dict[str, Callable[[], Any]] = {
    "dataset": lambda: pairs(SAMPLES),
    "stream": Stream,
    "shards": Shards,
    "loader": lambda: DataLoader(pairs(SAMPLES), batch_size=GLOBAL_BATCH),
    "workers": lambda: DataLoader(pairs(SAMPLES), batch_size=GLOBAL_BATCH, num_workers=1),
}
# Global batches of `Shards`: the samples of all ranks, each of which takes its share of 5 per step.
SHARDED = {1: (5, 5, 1), 2: (4, 3, 3, 1), 3: (5, 4, 2), 4: (5, 3, 2, 1)}


def trainer(**options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        callbacks=False,
        logger=False,
        global_batch_size=GLOBAL_BATCH,
        **options,
    )


@cache
def by_hand(name: str) -> tuple[dict[str, Tensor], float]:
    """Train on whole global batches; return the weights and the mean loss of the last epoch."""
    case = CASES[name]
    task, data = case.task(), case.data()
    optimizer = task.configure_optimizers()
    assert isinstance(optimizer, torch.optim.Optimizer)
    loader = data if isinstance(data, DataLoader) else DataLoader(data, batch_size=GLOBAL_BATCH)
    for _ in range(EPOCHS):
        total = count = 0.0
        for batch in loader:
            loss, weight = task.loss(task(batch), batch), len(next(iter(fields(batch))))
            if isinstance(loss, WeightedLoss):
                weight = float(loss.weight)
                loss = loss.total / weight if weight else None
            if loss is None:
                continue
            total, count = total + float(loss.detach()) * weight, count + weight
            optimizer.zero_grad()
            loss.backward()
            if "gradient_clip_norm" in case.options:
                nn.utils.clip_grad_norm_(task.parameters(), case.options["gradient_clip_norm"])
            optimizer.step()
    return weights(task), total / count


class Fitted(NamedTuple):
    weights: dict[str, Tensor]
    metrics: dict[str, float]


def fit_case(case: Case, folder: Path) -> Fitted:
    task, data = case.task(), case.data()
    size = None if isinstance(data, DataLoader) else GLOBAL_BATCH
    result = fit(
        task, folder, train=data, global_batch_size=size, max_epochs=EPOCHS, **case.options
    )
    return Fitted(weights(task), result.metrics)


def run_all(folder: Path) -> dict[str, Any]:
    """Everything that is compared between world sizes, in one launch."""
    found: dict[str, Any] = {n: fit_case(case, folder / n) for n, case in CASES.items()}
    found["drawn"] = fit_case(Case(WithNoise), folder / "drawn")
    found["shards"] = fit_case(Case(SimCLR, Shards), folder / "shards")
    found["per rank"] = fit_case(Case(PerRank), folder / "per rank")
    found["evaluated"] = {
        f"{form}, {size}": trainer(eval_batch_size=size).validate(Measured(), val=FORMS[form]())
        for form, size in [*zip(FORMS, itertools.repeat(1)), ("dataset", None), ("dataset", 4)]
    }
    found["refused"] = refused(folder / "refused")
    found["sampled"] = [
        trainer(eval_batch_size=1).validate(Sampling(kind), val=pairs(SAMPLES))["val/loss"]
        for kind in (True, False)
    ]
    found["of weight"] = trainer().validate(Weighed(), val=pairs(SAMPLES))
    return found


def refused(folder: Path) -> str | None:
    """Pad every micro-batch to its own longest sequence."""

    def pad(sequences: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(sequences, batch_first=True)

    lengths = [torch.ones(2 + i % 3, 3, dtype=torch.float64) for i in range(SAMPLES)]
    loader: Any = DataLoader(lengths, batch_size=GLOBAL_BATCH, collate_fn=pad)  # type: ignore[arg-type]
    try:
        fit(Sequences(), folder, train=loader, global_batch_size=None, max_epochs=1)
    except ValueError as error:
        return str(error)
    return None


@cache
def ranks(world_size: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        if world_size == 1:
            return [run_all(Path(folder))]
        return on_ranks(world_size, run_all, Path(folder))


def test_training_is_that_of_one_process_on_the_whole_batch(world_size: int) -> None:
    for name, case in CASES.items():
        expected, loss = by_hand(name)
        for rank in ranks(world_size):
            assert_same(rank[name].weights, expected, case.tolerance)
            assert_equal_bits(rank[name].weights, ranks(world_size)[0][name].weights)
        found = ranks(world_size)[0][name].metrics
        assert found["train/loss"] == pytest.approx(loss, rel=max(case.tolerance, 1e-12)), name
        if "train/samples" in found:  # logged in loss, once per global batch
            sizes = (5, 5) if name == "skipping" else (5, 5, 1)
            assert found["train/samples"] == sum(n * n for n in sizes) / sum(sizes)
            if name != "skipping":
                assert found["train/share of forward"] == 0.5


def test_what_the_loss_draws_is_the_same_everywhere(world_size: int) -> None:
    for rank in ranks(world_size):
        assert_same(rank["drawn"].weights, ranks(1)[0]["drawn"].weights)


def test_what_is_drawn_in_evaluation_is_the_same_everywhere(world_size: int) -> None:
    assert ranks(world_size)[0]["sampled"] == pytest.approx(ranks(1)[0]["sampled"], rel=1e-12)


def test_shards_of_any_length_give_a_global_batch(world_size: int) -> None:
    """Which samples it has depends on the world size, but every rank has all of it."""
    first, *others = ranks(world_size)
    for rank in others:
        assert_equal_bits(rank["shards"].weights, first["shards"].weights)
    sizes = SHARDED[world_size]
    found = first["shards"].metrics["train/samples"]
    assert found == pytest.approx(sum(n * n for n in sizes) / sum(sizes))


def test_without_it_the_world_size_is_a_hyperparameter(world_size: int) -> None:
    """The same task without the attribute: a rank's samples are compared with each other only."""
    found, expected = ranks(world_size)[0]["per rank"].weights, by_hand("simclr")[0]
    furthest = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    assert furthest == pytest.approx(0, abs=1e-9) if world_size == 1 else furthest > 0.05


def test_evaluation_is_that_of_whole_batches(world_size: int) -> None:
    task, data = SimCLR(), pairs(SAMPLES).tensors
    sizes = (5, 5, 1)
    batches = list(zip(*(view.split(sizes) for view in data), strict=True))
    with torch.no_grad():
        losses = [float(task.loss(task(batch), batch)) for batch in batches]
    wanted = {
        "val/loss": sum(n * loss for n, loss in zip(sizes, losses, strict=True)) / SAMPLES,
        "val/samples": sum(n * n for n in sizes) / SAMPLES,
        "val/share of forward": 0.5,
        "val/seen": SAMPLES,  # each sample once, in update_metrics
    }
    for rank in ranks(world_size):
        for form, found in rank["evaluated"].items():
            assert found == pytest.approx(wanted, rel=1e-12), form
    first = ranks(world_size)[0]
    assert first["evaluated"] == ranks(1)[0]["evaluated"]
    assert first["of weight"] == pytest.approx(ranks(1)[0]["of weight"], rel=1e-12)


def test_what_does_not_fit_together_is_the_same_error_on_every_rank(world_size: int) -> None:
    for rank in ranks(world_size):
        if world_size == 1:
            assert rank["refused"] is None
        else:
            assert "outputs is a tensor of shape (" in rank["refused"]
            assert "pad to one length for all batches" in rank["refused"]
            assert rank["refused"] == ranks(world_size)[0]["refused"]
