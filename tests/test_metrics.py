"""Torchmetrics, whose states are combined by us: names, resets, and what is refused."""

import io

import pytest
import torch
import torchmetrics as tm
from support import Regression, fit, measured, on_ranks, samples
from torchmetrics import classification, wrappers

from trainer import distributed, metrics
from trainer.metric_states import combined, state_of

CPU = torch.device("cpu")


def place(**found):
    return metrics.place(found, CPU, exact=False)


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
    assert metrics.compute(place()) == {}


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
        [classification.BinaryPrecision(), classification.BinaryRecall()],
        compute_groups=[["BinaryPrecision", "BinaryRecall"]],
    )
    found = place(group=group)
    ones, mixed = torch.ones(4, dtype=torch.long), torch.tensor([1, 0, 0, 0])
    found["group"].update(ones, ones)
    assert metrics.compute(found) == {"group/BinaryPrecision": 1, "group/BinaryRecall": 1}
    found["group"].update(ones, mixed)
    expected = {"group/BinaryPrecision": 5 / 8, "group/BinaryRecall": 1}
    assert metrics.compute(found) == metrics.compute(found) == expected


def test_metrics_that_agree_at_first_do_not_share_a_state():
    low, high = (classification.BinaryAccuracy(threshold=threshold) for threshold in (0.1, 0.9))
    found = place(group=tm.MetricCollection({"low": low, "high": high}))
    for score in (0.0, 0.5):
        found["group"].update(torch.tensor([score]), torch.tensor([1]))
    assert metrics.compute(found) == {"group/low": 0.5, "group/high": 0}


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
    whole = combined(ranks[0], [state_of(metric) for metric in ranks])
    assert whole.pop("_update_count") == 3
    assert {
        name: [float(v) for v in value] if isinstance(value, list) else value.tolist()
        for name, value in whole.items()
        if name != "seen"
    } == {
        "total": 15,
        "middle": 5,
        "top": 9,
        "product": 72,
        "kept": [2, 4, 9],
        "loose": [2, 4, 9],
    }
    assert [part.tolist() for part in whole["seen"]] == [[2, 4, 9]]


def test_what_is_no_metric_is_refused():
    with pytest.raises(ValueError, match=r"build_metrics returned a float for 'accuracy'; it must"):
        place(accuracy=0.5)


def test_a_window_over_updates_is_refused():
    with pytest.raises(ValueError, match="returned a Running, which follows the order of its upda"):
        place(recent=wrappers.Running(tm.SumMetric(), window=3))


def every_kind():
    """Sums of floats and of integers, lists, states without a reduction, and all of it nested."""
    return {
        "error": tm.MeanSquaredError(),
        "half": tm.MeanMetric().set_dtype(torch.bfloat16),
        "auroc": classification.BinaryAUROC(),
        "pearson": tm.PearsonCorrCoef(),
        "accuracy": classification.BinaryAccuracy(),
        "max": tm.MaxMetric(),
        "composed": tm.MeanSquaredError() + classification.BinaryAccuracy(),
        "group": tm.MetricCollection(
            {"error": tm.MeanSquaredError(), "rooted": tm.MeanSquaredError(squared=False)},
            compute_groups=[["error", "rooted"]],
        ),
        "outputs": wrappers.MultioutputWrapper(tm.MeanAbsoluteError(), num_outputs=2),
    }


def update(found, numbers):
    """Go through this rank's micro-batches among ``numbers``: of each step of 4, a block."""
    for number in numbers:
        if number % 4 * distributed.world_size() // 4 != distributed.rank():
            continue
        generator = torch.Generator().manual_seed(number)
        outputs = torch.rand(3, generator=generator)
        targets = torch.rand(3, generator=generator).round()
        for name, metric in found.items():
            if name in ("half", "max"):
                metric.update(outputs)
            elif name == "outputs":
                metric.update(torch.stack([outputs] * 2, 1), torch.stack([targets] * 2, 1))
            else:
                is_class = name in ("auroc", "accuracy", "composed")
                metric.update(outputs, targets.long() if is_class else targets)
        metrics.after_update(found, (number, 0))


def two_halves(exact, former=None):
    """Measure 7 micro-batches, then 6 more; go on from there in other processes, too.

    Returns:
        The values at half-way; at the end, without and with a checkpoint between, and after the
        first half at another world size (its checkpoint is ``former``); and a checkpoint.
    """
    first, second = range(7), range(7, 13)
    found = metrics.place(every_kind(), CPU, exact)
    update(found, first)
    half = metrics.compute(found)
    file = io.BytesIO()
    torch.save(distributed.broadcast_object(metrics.state(found)), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    ends = []
    for state in (None, saved, former or saved):
        if state is not None:
            found = metrics.place(every_kind(), CPU, exact)
            metrics.restore(found, state)
            assert metrics.compute(found) == (half if exact else pytest.approx(half, rel=1e-2))
        update(found, second)
        ends.append(metrics.compute(found))
    return half, *ends, saved


class Measured(Regression):
    def build_metrics(self, split):
        return {"error": tm.MeanSquaredError(), "pearson": tm.PearsonCorrCoef()}

    def update_metrics(self, found, outputs, batch):
        for metric in found.values():
            metric.update(outputs, batch[1])


def logged(folder):
    """Fit on the ranks that are there; return what was logged."""
    data = {"train": samples(21), "val": samples(9)}
    sizes = {"global_batch_size": 8, "micro_batch_size": 2, "max_epochs": 1}
    return measured(fit(Measured(), folder, reproducible=True, **data, **sizes).metrics)


def everything(folder, former):
    halves = {exact: two_halves(exact, former.get(exact)) for exact in (True, False)}
    return halves, logged(folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return everything(tmp_path_factory.mktemp("alone"), {})


@pytest.mark.timeout(60)
@pytest.mark.parametrize("world_size", [2, 4])
def test_values_have_the_same_bits_at_any_world_size_if_asked_for(world_size, alone, tmp_path):
    halves, in_fit = alone
    former = {exact: found[-1] for exact, found in halves.items()}
    exact_half, *exact_ends, _ = halves[True]
    assert exact_ends == [exact_ends[0]] * 3
    assert {"train/error", "train/pearson", "val/error", "val/pearson"} < in_fit.keys()
    for found, found_in_fit in on_ranks(world_size, everything, tmp_path, former):
        assert found_in_fit == in_fit
        half, *ends, _ = found[True]
        assert half == exact_half
        assert ends == exact_ends
        half, end, resumed, moved, _ = found[False]
        assert resumed == end, "the same world size goes on where it was"
        for value, expected in ((half, exact_half), (end, exact_ends[0]), (moved, exact_ends[0])):
            assert value == pytest.approx(expected, rel=1e-2)
    # And back to one process.
    again = metrics.place(every_kind(), CPU, exact=True)
    metrics.restore(again, found[True][-1])
    update(again, range(7, 13))
    assert metrics.compute(again) == exact_ends[0]


def test_the_usual_mode_takes_nothing_out():
    found = place(error=tm.MeanSquaredError())
    found["error"].update(torch.ones(2), torch.zeros(2))
    metrics.after_update(found, (0, 0))
    assert not found.fresh
    assert found["error"].total == 2


def test_a_reset_forgets_what_was_taken_out():
    found = metrics.place(every_kind(), CPU, exact=True)
    update(found, range(2))
    metrics.compute(found)
    update(found, range(2, 4))
    metrics.reset(found)
    assert metrics.compute(found) == {}


def test_metrics_that_have_changed_start_anew(capsys):
    found = place(error=tm.MeanSquaredError(), gone=tm.MaxMetric(), same=tm.MinMetric())
    for metric in found.values():
        metric.update(*(torch.ones(2), torch.zeros(2))[: 1 + (metric is found["error"])])
    state = metrics.state(found)
    other = place(error=tm.MaxMetric(), new=tm.MaxMetric(), same=tm.MinMetric())
    metrics.restore(other, state)
    assert metrics.compute(other) == {"same": 1}
    assert "other train metrics than before, which start anew: error, gone, new" in (
        capsys.readouterr().out
    )
    metrics.restore(other, {})
    assert metrics.compute(other) == {}
