"""Torchmetrics, whose states are combined by us: names, resets, and what is refused."""

import pytest
import torch
import torchmetrics as tm
from torchmetrics import classification, wrappers

from trainer import metrics
from trainer.metrics import _combine, _state

CPU = torch.device("cpu")


def place(**found):
    return metrics.place(found, CPU)


def test_names_follow_the_values():
    found = place(
        mean=tm.MeanMetric(),
        confusion=classification.BinaryConfusionMatrix(),
        group=tm.MetricCollection({"max": tm.MaxMetric(), "min": tm.MinMetric()}),
    )
    found["mean"].update(3)
    found["confusion"].update(torch.tensor([1, 0, 1]), torch.tensor([1, 0, 0]))
    found["group"].update(torch.tensor([1.0, 2.0]))
    assert metrics.compute(found) == {
        "mean": 3,
        "confusion/0/0": 1,
        "confusion/0/1": 1,
        "confusion/1/0": 0,
        "confusion/1/1": 1,
        "group/max": 2,
        "group/min": 1,
    }


def test_without_an_update_there_is_no_value():
    # Torchmetrics warns, and a warning is an error here.
    classwise = wrappers.ClasswiseWrapper(
        classification.MulticlassAccuracy(num_classes=2, average=None)
    )
    found = place(mean=tm.MeanMetric(), group=tm.MetricCollection([tm.MaxMetric()]), own=classwise)
    assert metrics.compute(found) == {}
    assert metrics.compute({}) == {}


def test_computing_leaves_the_states_and_a_reset_clears_them():
    found = place(mean=tm.MeanMetric(), cat=tm.CatMetric())
    for value in (1.0, 5.0):
        found["mean"].update(value)
        found["cat"].update(value)
        latest = metrics.compute(found)
    assert latest == {"mean": 3, "cat/0": 1, "cat/1": 5}
    assert metrics.compute(found) == latest
    metrics.reset(found)
    assert metrics.compute(found) == {}
    found["mean"].update(7)
    assert metrics.compute(found) == {"mean": 7}


def test_the_values_of_a_compute_group_go_on_growing():
    group = tm.MetricCollection(
        [classification.BinaryPrecision(), classification.BinaryRecall()], compute_groups=True
    )
    found = place(group=group)
    ones, mixed = torch.ones(4, dtype=torch.long), torch.tensor([1, 0, 0, 0])
    found["group"].update(ones, ones)
    assert metrics.compute(found) == {"group/BinaryPrecision": 1, "group/BinaryRecall": 1}
    found["group"].update(ones, mixed)
    expected = {"group/BinaryPrecision": 5 / 8, "group/BinaryRecall": 1}
    assert metrics.compute(found) == metrics.compute(found) == expected


def test_states_of_ranks_are_combined_by_their_own_rules():
    class Kinds(tm.Metric):
        def __init__(self):
            super().__init__()
            self.add_state("total", torch.tensor(0.0), "sum")
            self.add_state("middle", torch.tensor(0.0), "mean")
            self.add_state("top", torch.tensor(0.0), "max")
            self.add_state("product", torch.tensor(1.0), lambda stacked: stacked.prod(0))
            self.add_state("kept", torch.tensor(0.0), None)
            self.add_state("seen", [], "cat")
            self.add_state("loose", [], None)

        def update(self, value):
            value = torch.tensor(float(value))
            for name in ("total", "middle", "top", "product", "kept"):
                setattr(self, name, value)
            self.seen.append(value[None])
            self.loose.append(value)

        def compute(self):
            return self.total

    ranks = [Kinds() for _ in range(3)]
    for metric, value in zip(ranks, (2, 4, 9), strict=True):
        metric.update(value)
    combined = _combine(ranks[0], [_state(metric) for metric in ranks])
    assert combined.pop("_update_count") == 3
    assert {
        name: [float(v) for v in value] if isinstance(value, list) else value.tolist()
        for name, value in combined.items()
        if name != "seen"
    } == {
        "total": 15,
        "middle": 5,
        "top": 9,
        "product": 72,
        "kept": [2, 4, 9],
        "loose": [2, 4, 9],
    }
    assert [part.tolist() for part in combined["seen"]] == [[2, 4, 9]]


def test_what_is_no_metric_is_refused():
    with pytest.raises(ValueError, match=r"build_metrics returned a float for 'accuracy'; it must"):
        place(accuracy=0.5)


def test_a_window_over_updates_is_refused():
    with pytest.raises(ValueError, match="returned a Running, which follows the order of its upda"):
        place(recent=wrappers.Running(tm.SumMetric(), window=3))
