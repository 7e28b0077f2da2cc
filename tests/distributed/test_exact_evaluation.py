"""Evaluation and prediction over real ranks, compared with one pass over the whole dataset."""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from support import on_ranks
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from trainer import DataModule, TaskModule, Trainer, WeightedLoss, distributed, load_predictions

pytestmark = pytest.mark.timeout(60)

WORLD_SIZES = (1, 3, 4)  # 2 is that of most other tests
SIZES = range(18)


def dataset(size: int) -> TensorDataset:
    """Samples ``(index, score, label, weight)``."""
    index = torch.arange(size)
    score = ((index * 7919) % 97) / 97
    return TensorDataset(index, score.double(), (index * 31 % 7 < 3).long(), (index * 5) % 4)


def build() -> dict[str, Any]:
    import torchmetrics as tm
    from torchmetrics import classification, retrieval, wrappers

    def group(**options: Any) -> Any:
        return tm.MetricCollection(
            {
                "precision": classification.BinaryPrecision(),
                "recall": classification.BinaryRecall(),
                "auroc": classification.BinaryAUROC(),
            },
            **options,
        )

    metrics = {
        "accuracy": classification.BinaryAccuracy(),
        "auroc": classification.BinaryAUROC(),
        "confusion": classification.BinaryConfusionMatrix(),
        "multilabel": classification.MultilabelAUROC(num_labels=2),
        "pearson": tm.PearsonCorrCoef(),
        "kendall": tm.KendallRankCorrCoef(),
        "spearman": tm.SpearmanCorrCoef(),
        "max": tm.MaxMetric(),
        "min": tm.MinMetric(),
        "mean": tm.MeanMetric(),
        "cat": tm.CatMetric(),
        "map": retrieval.RetrievalMAP(),
        "group": group(),
        "apart": group(compute_groups=False),
        "classwise": wrappers.ClasswiseWrapper(
            classification.MulticlassAccuracy(num_classes=2, average=None)
        ),
        "composed": classification.BinaryPrecision() * 2 + classification.BinaryRecall(),
        "minmax": wrappers.MinMaxMetric(classification.BinaryAccuracy()),
    }
    for metric in metrics.values():
        metric.set_dtype(torch.float64)
    return metrics


def update(metrics: dict[str, Any], batch: Any) -> None:
    index, score, label, weight = batch
    for name, metric in metrics.items():
        if name in ("max", "min", "cat"):
            metric.update(score)
        elif name == "mean":
            metric.update(score, weight)
        elif name == "multilabel":
            metric.update(torch.stack([score, 1 - score], 1), torch.stack([label, label], 1))
        elif name == "map":
            metric.update(score, label, indexes=index % 3)
        elif name in ("pearson", "kendall", "spearman"):
            metric.update(score, label + score.sin())
        elif name == "classwise":
            metric.update((score > 0.5).long(), label)
        else:
            metric.update(score, label)


class Measured(TaskModule):
    def __init__(self, by_weight: bool = False, build: Any = build) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.by_weight, self.build, self.sizes = by_weight, build, []

    def forward(self, batch: Any) -> Any:
        self.sizes.append(len(batch[1]))
        return batch[1] * self.scale

    def loss(self, outputs: Any, batch: Any) -> Any:
        losses = (outputs - batch[2]) ** 2
        self.log("score", outputs.mean())
        self.log("weighed", outputs.max(), weight=2.0)
        if self.by_weight:
            weight = batch[3].sum()
            return WeightedLoss((losses * batch[3]).sum() if weight else losses.sum() / 0, weight)
        return losses.mean()

    def build_metrics(self, split: str) -> Any:
        return self.build()

    def update_metrics(self, metrics: Any, outputs: Any, batch: Any) -> None:
        update(metrics, batch)


def flat(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, dict):
        return {k: v for key, part in value.items() for k, v in flat(f"{name}/{key}", part).items()}
    if value.dim():
        return {k: v for i, part in enumerate(value) for k, v in flat(f"{name}/{i}", part).items()}
    return {name: float(value)}


@cache
def expected(size: int) -> dict[str, float]:
    """Every metric, updated once with everything."""
    if size == 0:
        return {}
    batch = dataset(size).tensors
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        metrics = build()
        update(metrics, batch)
        return {k: v for name, m in metrics.items() for k, v in flat(name, m.compute()).items()}


def close(found: dict[str, float], wanted: dict[str, float]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        # Some metrics reckon in float32 whatever they are given.
        assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-7, nan_ok=True), name


def without(found: dict[str, float], *prefixes: str) -> dict[str, float]:
    return {name: value for name, value in found.items() if not name.startswith(prefixes)}


def trainer(**options: Any) -> Trainer:
    return Trainer(**{"accelerator": "cpu", "callbacks": False, "logger": False, **options})


def validate_all_sizes() -> list[Any]:
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchmetrics' on correlations of one sample
        for size in SIZES:
            plain = trainer(eval_batch_size=2).validate(Measured(), val=dataset(size))
            weighted = trainer().validate(Measured(True, dict), val=dataset(size))
            found.append((plain, weighted))
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_metrics_are_exact_for_every_size(world_size: int) -> None:
    first, *others = (
        on_ranks(world_size, validate_all_sizes) if world_size > 1 else [validate_all_sizes()]
    )
    for other in others:
        assert repr(other) == repr(first)  # NaN included
    for size, (plain, weighted) in zip(SIZES, first, strict=True):
        wanted = {f"val/{name}": value for name, value in expected(size).items()}
        score, label, weight = dataset(size).tensors[1:]
        losses = (score * 1.5 - label) ** 2
        if size:
            wanted |= {"val/loss": float(losses.mean()), "val/score": float(score.mean()) * 1.5}
        close(without(plain, "val/weighed"), wanted)
        # Logged once per micro-batch, with a weight of its own.
        tops = [float(score[i : i + 2].max()) * 1.5 for i in range(0, size, 2)]
        assert plain.get("val/weighed", 0) == pytest.approx(sum(tops) / max(1, len(tops)))
        if weight.sum():
            mean = (losses * weight).sum() / weight.sum()
            assert weighted["val/loss"] == pytest.approx(float(mean), rel=1e-12)
        else:
            assert "val/loss" not in weighted


class Numbers(IterableDataset):
    """Yields samples of `dataset`, or batches of them."""

    def __init__(self, size: int, batch: int | None = None) -> None:
        self.size, self.batch = size, batch

    def __iter__(self) -> Any:
        data = dataset(self.size)
        if self.batch is None:
            return iter(data)
        return (data[i : i + self.batch] for i in range(0, self.size, self.batch))


class Shards(Numbers):
    def shard(self, rank: int, world_size: int) -> Any:
        raise AssertionError("evaluation is in order")


def in_any_form(size: int) -> dict[str, Any]:
    return {
        "dataset": dataset(size),
        "stream": Numbers(size),
        "shards": Shards(size),
        "loader": DataLoader(dataset(size), batch_size=3),
        "shuffled": DataLoader(dataset(size), batch_size=4, shuffle=size > 0),
        "stream_loader": DataLoader(Numbers(size), batch_size=3, num_workers=1),
        "ready": DataLoader(Numbers(size, batch=5), batch_size=None),
    }


class Summed(Measured):
    def build_metrics(self, split: str) -> Any:
        import torchmetrics as tm

        return {"sum": tm.SumMetric()}

    def update_metrics(self, metrics: Any, outputs: Any, batch: Any) -> None:
        metrics["sum"].update(batch[0])


def validate_forms() -> Any:
    torch.manual_seed(distributed.rank())  # the shuffled loader has no seed of its own
    task = Summed()
    return {size: trainer().validate(task, val=in_any_form(size)) for size in (0, 1, 3, 11)}


def test_data_may_come_in_any_form() -> None:
    for found in on_ranks(3, validate_forms):
        for size, values in found.items():
            score, label = dataset(size).tensors[1:3]
            wanted = {
                "loss": float(((score * 1.5 - label) ** 2).mean()),
                "score": float(score.mean()) * 1.5,
                "sum": sum(range(size)),
            }
            names = in_any_form(size) if size else ()
            wanted = {f"val/{s}/{name}": v for s in names for name, v in wanted.items()}
            assert without(values, *(f"val/{s}/weighed" for s in names)) == pytest.approx(wanted)


class Shapes(Measured):
    def predict(self, batch: Any) -> Any:
        index = batch[0]
        both = torch.stack([index, -index], dim=1)
        return {
            "tensor": both,
            "tuple": (index, [str(int(i)) for i in index]),
            "nothing": None,
        }


def predict_all_sizes() -> list[Any]:
    return [trainer().predict(Shapes(), predict=dataset(size)) for size in SIZES]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_predictions_are_in_dataset_order(world_size: int) -> None:
    every = on_ranks(world_size, predict_all_sizes) if world_size > 1 else [predict_all_sizes()]
    first, *others = every
    assert others == [[None] * len(SIZES)] * len(others)
    for size, found in zip(SIZES, first, strict=True):
        if size == 0:
            assert found == []
            continue
        assert found["tensor"].tolist() == [[i, -i] for i in range(size)]
        assert found["tuple"][0].tolist() == list(range(size))
        assert found["tuple"][1] == [str(i) for i in range(size)]
        assert found["nothing"] is None


class Echo(Measured):
    def predict(self, batch: Any) -> Any:
        return batch[0]


def predict_forms(folder: Any) -> Any:
    found = {
        name: trainer().predict(Echo(), predict=data) for name, data in in_any_form(11).items()
    }
    streams = (Numbers(11), Shards(11))
    for number, data in enumerate((dataset(11), *streams)):
        assert trainer(eval_batch_size=2).predict(
            Echo(), predict=data, output_dir=folder / f"new/{number}"
        ) == folder / (f"new/{number}")
    with pytest.raises(ValueError, match="holds predictions already"):  # on every rank
        trainer().predict(Echo(), predict=dataset(11), output_dir=folder / "new/0")
    return found


def test_predictions_of_any_data_and_into_files(tmp_path: Any) -> None:
    found, *_ = on_ranks(3, predict_forms, tmp_path)
    assert sorted(found.pop("shuffled").tolist()) == list(range(11))
    assert {name: value.tolist() for name, value in found.items()} == {
        name: list(range(11)) for name in found
    }
    for number in range(3):
        files = sorted((tmp_path / f"new/{number}").glob("predictions-*.pt"))
        assert len(files) >= 6
        assert torch.cat([torch.load(file) for file in files]).tolist() == list(range(11))
        assert load_predictions(tmp_path / f"new/{number}").tolist() == list(range(11))


def test_the_folder_for_predictions_is_checked(tmp_path: Any) -> None:
    (tmp_path / "predictions-000000000000.pt").touch()
    with pytest.raises(ValueError, match="holds predictions already"):
        trainer().predict(Echo(), predict=dataset(3), output_dir=tmp_path)
    with pytest.raises(ValueError, match="cannot be made: "):
        trainer().predict(
            Echo(), predict=dataset(3), output_dir=tmp_path / "predictions-000000000000.pt"
        )


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (torch.tensor(1.0), r"predict returned a Tensor of shape \(\) for a batch of 3 samples"),
        (torch.ones(2), r"returned a Tensor of shape \(2,\)"),
        ("text", "returned a str for a batch of 3 samples"),
        ([1, 2], "returned a list for a batch"),
    ],
)
def test_predictions_that_belong_to_no_sample_are_refused(output: Any, message: str) -> None:
    class Odd(Measured):
        def predict(self, batch: Any) -> Any:
            return output

    with pytest.raises(ValueError, match=message):
        trainer().predict(Odd(), predict=dataset(3))


def limits() -> Any:
    task = Measured(build=dict)
    found = trainer(limit_val_batches=2, global_batch_size=4).validate(
        task, val={"a": dataset(17), "b": Numbers(17), "c": DataLoader(dataset(17), batch_size=4)}
    )
    sizes, task.sizes = task.sizes, []
    trainer(eval_batch_size=3, global_batch_size=16).validate(task, val=dataset(17))
    return found, sum(sizes), task.sizes


def test_limits_and_sizes_of_evaluation() -> None:
    every = on_ranks(2, limits)
    first = dataset(8).tensors
    for found, _, sizes in every:
        for name in "abc":
            loss = float(((first[1] * 1.5 - first[2]) ** 2).mean())
            assert found[f"val/{name}/loss"] == pytest.approx(loss)
        assert max(sizes) == 3
    assert sum(counted for _, counted, _ in every) == 3 * 8
    assert [sizes for *_, sizes in every] == [[3, 3, 3], [3, 3, 2]]


class WithBuffers(Measured):
    def __init__(self) -> None:
        super().__init__(build=dict)
        self.norm = nn.BatchNorm1d(1)
        self.dropout = nn.Dropout()
        self.register_buffer("gaps", (torch.arange(6) + 10 * distributed.rank())[::2])
        self.register_buffer("expanded", torch.zeros(1).expand(3))
        self.register_buffer("flag", torch.tensor(distributed.rank() == 0))
        self.norm.running_mean.fill_(distributed.rank())
        self.modes: list[Any] = []

    def eval_forward(self, batch: Any) -> Any:
        self.modes.append((self.run.split, self.training, self.norm.training, self.norm.track))
        assert not torch.is_grad_enabled()
        return self.norm(batch[1].float()[:, None])[:, 0]


def buffers() -> Any:
    task = WithBuffers()
    task.train()
    task.norm.eval()  # frozen by the user
    task.norm.track = "own"
    values = trainer(eval_batch_size=2).test(task, test=dataset(9))
    state = {name: value.tolist() for name, value in task.named_buffers()}
    modes = (task.training, task.norm.training, task.dropout.training)
    return values, state, modes, set(task.modes), task.run.split


def test_buffers_are_rank_0s_and_modes_come_back() -> None:
    every = on_ranks(2, buffers)
    score, label = dataset(9).tensors[1:3]
    normed = score / math.sqrt(1 + 1e-5)
    for values, state, modes, seen, split in every:
        assert values["test/loss"] == pytest.approx(float(((normed - label) ** 2).mean()), rel=1e-5)
        assert state["norm.running_mean"] == [0]
        assert state["gaps"] == [0, 2, 4]
        assert state["expanded"] == [0, 0, 0]
        assert state["flag"] is True
        assert modes == (True, False, True)
        assert seen == {("test", False, False, "own")}
        assert split == "train"


class ValidatesWhileTraining(Measured):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_and_validate(folder: Any) -> Any:
    import torchmetrics as tm

    task = ValidatesWhileTraining(build=lambda: {"max": tm.MaxMetric(), "auroc": _auroc()})
    data: Dataset[Any] = dataset(10)
    result = trainer(max_epochs=2, run_dir=str(folder), global_batch_size=5).fit(
        task, train=data, val=dataset(3)
    )
    again = trainer().validate(task, val=dataset(3))
    return result.metrics, again


def _auroc() -> Any:
    from torchmetrics.classification import BinaryAUROC

    return BinaryAUROC()


def test_metrics_start_anew_each_time(tmp_path: Any) -> None:
    (metrics, again), *_ = on_ranks(4, fit_and_validate, tmp_path)
    found = {name: value for name, value in metrics.items() if name.startswith("val/")}
    assert without(found, "val/weighed") == pytest.approx(without(again, "val/weighed"))
    assert metrics["val/max"] == pytest.approx(float(dataset(3).tensors[1].max()))
    assert metrics["train/max"] == pytest.approx(float(dataset(10).tensors[1].max()))


def test_missing_data_is_named() -> None:
    for run, split in ((trainer().validate, "val"), (trainer().test, "test")):
        with pytest.raises(ValueError, match=rf"there is no {split} data: DataModule.{split}_data"):
            run(Measured(), DataModule())
    with pytest.raises(ValueError, match=r"no data to predict for: DataModule.predict_dataset\(\)"):
        trainer().predict(Measured(), DataModule())
