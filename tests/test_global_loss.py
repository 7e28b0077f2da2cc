"""A global loss in one process; on real ranks elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import Regression, fit, samples, weights
from torch.utils.data import BatchSampler, DataLoader

from trainer.contract import check_contract
from trainer.data.plan import GlobalBatchPlan
from trainer.global_loss import TaskLoss, check_plan
from trainer.logbook import Logbook


class Spread(Regression):
    """Compares samples with each other."""

    global_loss = True

    def loss(self, outputs: Any, batch: Any) -> Any:
        self.log("samples", len(outputs))
        return (outputs[:, None] - outputs[None, :]).square().mean()


@pytest.mark.parametrize(
    ("size", "micro", "world_size"),
    [(8, None, 1), (8, None, 3), (8, 4, 2), (8, 8, 3), (None, None, 2)],
)
def test_one_micro_batch_per_rank_is_enough(size, micro, world_size):
    check_plan(Spread(), GlobalBatchPlan(size, micro), world_size)


@pytest.mark.parametrize(
    ("size", "micro", "world_size", "message"),
    [
        (8, 4, 1, r"size=4 with global_batch_size=8 on 1 rank makes 2\. .*=null or at least 8, or"),
        (9, 2, 2, r"on 2 ranks makes 3\. .*at least 5, or use at least 5 ranks"),
        (None, 4, 2, "micro_batch_size=4 does not promise that.*Set micro_batch_size=null"),
    ],
)
def test_several_micro_batches_per_rank_are_refused(size, micro, world_size, message):
    plan = GlobalBatchPlan(size, micro)
    with pytest.raises(ValueError, match="Spread has global_loss=True, so.*" + message):
        check_plan(Spread(), plan, world_size)
    check_plan(Regression(), plan, world_size)


def test_a_fit_is_refused_at_its_start(tmp_path):
    sizes = {"global_batch_size": 8, "micro_batch_size": 2}
    with pytest.raises(ValueError, match=r"micro_batch_size=2 .* on 1 rank makes 4"):
        fit(Spread(), tmp_path, train=samples(8), max_steps=1, **sizes)


class Growing(BatchSampler):
    """Announces a batch size and does not keep to it."""

    def __iter__(self) -> Any:
        return iter([[0, 1], [2, 3, 4, 5, 6]])


def test_a_batch_that_turns_out_too_large_is_refused(tmp_path):
    loader = DataLoader(samples(7), batch_sampler=Growing(range(7), 2, drop_last=False))
    message = "only 2 samples of a global batch of 5 are there at once, and Spread has global_loss"
    sizes = {"global_batch_size": None, "micro_batch_size": 2}
    with pytest.raises(ValueError, match=message):
        fit(Spread(), tmp_path, train=loader, max_epochs=1, **sizes)


def test_the_loss_gets_all_parts_and_what_it_logs_belongs_to_all_samples():
    task, logbook = Spread(), Logbook()
    task.run = task.run.__class__(_logbook=logbook)
    x, y = samples(5).tensors
    task_loss = TaskLoss(task, logbook)
    logbook.begin(1, 0, 2)
    first, last = ((x[i], y[i]) for i in (slice(3), slice(3, 5)))
    assert task_loss(task(first), first, 3, 5, is_last=False) is None
    loss = task_loss(task(last), last, 2, 5)  # logs that the batch has 5 samples
    assert loss.item() == pytest.approx(Spread().loss(task((x, y)), (x, y)).item(), rel=1e-12)
    logbook.add("other", 1.0)
    logbook.count(2, is_counted=False)
    logbook.add("other", 2.0)
    assert logbook.reduce() == {"samples": 5, "other": 1}


def test_on_one_rank_it_is_the_loss_as_it_stands(tmp_path: Path):
    found = []
    for kind in (True, False):
        task = Spread()
        task.global_loss = kind
        options: dict[str, Any] = {"train": samples(7), "val": samples(5)}
        result = fit(task, tmp_path / str(kind), global_batch_size=4, max_epochs=2, **options)
        found.append((weights(task), result.metrics["train/loss"], result.metrics["train/samples"]))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_the_attribute_is_true_or_false():
    task = Spread()
    check_contract(task)
    task.global_loss = "yes"  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"Spread\.global_loss is a str; it is True or False"):
        check_contract(task)
