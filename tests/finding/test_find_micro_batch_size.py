"""`Trainer.find_micro_batch_size`: the smallest rank decides, and nobody waits for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Regression, adamw, assert_equal_bits, samples, weights
from test_find_lr import Infinite, Itself, Pair
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from trainer import TaskModule, Trainer, distributed
from trainer.finding.memory import Memory
from trainer.finding.micro_batch import search
from trainer.finding.micro_batch_report import MicroBatchReport

pytestmark = pytest.mark.timeout(60)

PLENTY_MB = 1e6


def find(task: TaskModule, run_dir: Path, **options: Any) -> MicroBatchReport:
    limit_mb = options.pop("memory_limit_mb", PLENTY_MB)
    train = options.pop("train", samples(64))
    options = {"global_batch_size": 64, "accelerator": "cpu", "timeout_s": 15, **options}
    trainer = Trainer(run_dir=str(run_dir), **options)
    report = trainer.find_micro_batch_size(task, train=train, memory_limit_mb=limit_mb)
    assert report is not None
    return report


class Hungry(Regression):
    """Runs out of memory where a rank has more samples than it can take."""

    def __init__(self, where: str, *capacity: int) -> None:
        super().__init__(adamw)
        self.where, self.capacity = where, capacity
        self.size = 0

    def forward(self, batch: Any) -> Tensor:
        self.size = len(batch[0])
        if self.where == "forward":
            self.take()
        outputs = super().forward(batch)
        if self.where == "backward":
            outputs.register_hook(lambda _: self.take())
        return outputs

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = super().configure_optimizers()
        if self.where == "optimizer":
            optimizer.register_step_pre_hook(lambda *_: self.take_in(optimizer))
        return optimizer

    def take_in(self, optimizer: torch.optim.Optimizer) -> None:
        """Run out in the middle of making the optimizer's state."""
        try:
            self.take()
        except torch.OutOfMemoryError:
            optimizer.state[self.net[0].weight] = {"step": torch.tensor(0.0)}
            raise

    def take(self) -> None:
        if self.size > self.capacity[self.run.rank]:
            raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_the_smallest_rank_decides(where: str, tmp_path: Path) -> None:
    task = Hungry(where, 99, 11)
    before = weights(task)
    report = find(task, tmp_path, devices=2)
    assert_equal_bits(task, before)
    assert report.largest == 11
    # 32 samples of a rank in 3 micro-batches, and 11 is the smallest size for that.
    assert (report.micro_batch_size, report.accumulation_steps) == (11, 3)
    assert [(trial.size, trial.out) for trial in report.trials] == [
        (2, []),
        (4, []),
        (8, []),
        (16, [1]),
        (12, [1]),
        (10, []),
        (11, []),
    ]
    found = json.loads((tmp_path / "find_micro_batch_size.json").read_text())
    assert (found["largest"], found["micro_batch_size"]) == (11, 11)
    assert "write    trainer.micro_batch_size=11" in str(report)
    assert "16" in str(report)
    assert "too much for rank 1" in str(report)


def test_what_is_written_needs_no_more_steps_than_the_largest(tmp_path: Path) -> None:
    report = find(Hungry("forward", 24), tmp_path)
    assert report.largest == 24
    assert (report.micro_batch_size, report.accumulation_steps) == (22, 3)


def test_a_whole_share_needs_no_cut(tmp_path: Path) -> None:
    report = find(Regression(), tmp_path, devices=2)
    assert (report.largest, report.accumulation_steps) == (32, 1)
    assert "micro_batch_size=null" in str(report)
    assert [trial.size for trial in report.trials] == [2, 4, 8, 16, 32]


def test_where_nothing_fits_it_says_so(tmp_path: Path) -> None:
    report = find(Hungry("forward", 0), tmp_path)
    assert (report.largest, report.micro_batch_size) == (0, None)
    assert "Not even one sample fits" in str(report)


class Large(Regression):
    """Takes 16 MiB for each sample in backward, and keeps 8 until then."""

    def forward(self, batch: Any) -> Tensor:
        outputs = super().forward(batch)
        kept = outputs.new_ones(len(outputs), 2**20).requires_grad_()
        return outputs + 0 * kept.mean(dim=1)


def test_on_the_cpu_resident_memory_counts(tmp_path: Path) -> None:
    find(Large(), tmp_path, global_batch_size=2)  # what is taken once is taken now
    memory = Memory(torch.device("cpu"), PLENTY_MB)
    memory.begin()
    report = find(Large(), tmp_path, memory_limit_mb=memory.peak_mb() + 160)
    assert 5 <= report.largest <= 20
    assert any(trial.out for trial in report.trials)


def test_a_stream_is_cut_too(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(samples(64))

    assert find(Hungry("forward", 5, 7), tmp_path, devices=2, train=Stream()).largest == 5


def test_several_optimizers_and_a_loss_that_is_infinite_are_tried(tmp_path: Path) -> None:
    for task in (Pair(), Infinite()):
        assert find(task, tmp_path, weight_average="ema").largest == 64


class Meets(Regression):
    def forward(self, batch: Any) -> Tensor:
        distributed.barrier()
        return super().forward(batch)


def test_a_forward_that_waits_for_other_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the trial of a micro-batch: it would wait"):
        find(Meets(), tmp_path, devices=2)


class Together(Regression):
    global_loss = True


@pytest.mark.parametrize(
    ("task", "options", "words"),
    [
        (Itself(), {}, "Itself optimizes itself"),
        (Together(), {}, "Together has global_loss=True"),
        (Regression(), {"memory_limit_mb": None}, "on the CPU without memory_limit_mb"),
        (Regression(), {"memory_limit_mb": 0}, "memory_limit_mb=0 is not allowed"),
    ],
)
def test_refused(task: TaskModule, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        find(task, tmp_path, **options)


def test_another_error_is_no_lack_of_memory(tmp_path: Path) -> None:
    class Wrong(Regression):
        def forward(self, batch: Any) -> Tensor:
            result: Tensor = nn.Linear(7, 1)(batch[0])
            return result

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        find(Wrong(), tmp_path)


@pytest.mark.parametrize("most", [1, 2, 3, 64, 1000])
@pytest.mark.parametrize("capacity", [0, 1, 2, 5, 63, 700, 5000])
def test_the_search(capacity: int, most: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= capacity

    found, largest = search(fits, most), min(capacity, most)
    assert largest - largest // 25 <= found <= largest
    assert max(tried) <= min(max(2 * capacity, 2), most)
    assert len(tried) == len(set(tried))
