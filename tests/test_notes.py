"""What a run says at its start about how its global batches are cut."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support import Regression, fit, samples
from torch import nn

from trainer.config import TrainerConfig
from trainer.data.plan import GlobalBatchPlan
from trainer.notes import note_late_start, notes_on_cut, notes_on_epochs


def notes(
    task: nn.Module, world_size: int, size: int | None = 8, micro: int | None = None, **options: Any
) -> str:
    config = TrainerConfig(micro_batch_size=micro, **options)
    return "\n".join(notes_on_cut(task, GlobalBatchPlan(size, micro), config, world_size))


@pytest.mark.parametrize(
    ("size", "micro", "words"),
    [
        (8, 4, "micro-batches of 4 leaves 2 of 4 ranks without samples; micro_batch_size=2 "),
        (5, None, "micro-batches of 2 leaves 1 of 4 .*; a global_batch_size that is a multiple of"),
        (7, None, None),
        (8, 1, None),
        (None, 1, None),
    ],
)
def test_ranks_without_samples(size: int | None, micro: int | None, words: str | None) -> None:
    found = notes(nn.Linear(1, 1), 4, size, micro)
    assert found == "" if words is None else re.search(words, found)


DROPPING = {
    "dropout": nn.Dropout(0.1),
    "attention": nn.MultiheadAttention(2, 1, dropout=0.1),
    "recurrent": nn.LSTM(2, 2, num_layers=2, dropout=0.1),
}


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_that_follows_the_world_size(name: str) -> None:
    task = nn.Sequential(DROPPING[name])
    found = notes(task, 3)
    assert "with it the masks of dropout; micro_batch_size=3 keeps" in found
    assert "fp16" not in found
    assert "micro_batch_size=a number keeps" in notes(task, 3, size=None)
    assert notes(task, 1) == notes(task, 2, micro=2) == ""


def test_overflows_that_follow_the_world_size() -> None:
    task = nn.Tanh()
    found = notes(task, 2, precision="fp16")
    assert "which steps overflow and are skipped (fp16); micro_batch_size=4 keeps" in found
    assert notes(task, 1, precision="fp16") == notes(task, 2, micro=2, precision="fp16") == ""
    both = notes(nn.Dropout(0.1), 2, precision="fp16")
    assert "the masks of dropout and which steps overflow" in both


class Together(Regression):
    global_loss = True


def test_a_loss_over_the_global_batch_is_not_told_to_fix_the_cut() -> None:
    task = Together()
    assert re.search("overflow.*; global_loss=True needs it so$", notes(task, 2, precision="fp16"))
    assert "micro_batch_size=null would give each a share" in notes(task, 4, 8, 4)


@pytest.mark.parametrize(
    "module", [nn.Dropout(0.0), nn.Dropout(0.1).eval(), nn.LSTM(2, 2), nn.Tanh()]
)
def test_no_dropout_no_note(module: nn.Module) -> None:
    assert notes(nn.Sequential(module), 2) == ""


def test_batchnorm_over_a_part_of_the_global_batch() -> None:
    task = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    words = "BatchNorm (1) normalizes each micro-batch by itself"
    assert words in notes(task, 2)
    assert words in notes(task, 1, micro=4)
    assert words in notes(task, 2, size=None)
    assert words in notes(task, 1, micro=4, sync_batchnorm=True), "on one rank it does nothing"
    assert notes(task, 1) == notes(task, 2, sync_batchnorm=True) == ""
    assert notes(task, 2, micro=4, reproducible=True) == "", "it is refused there"
    assert notes(nn.Sequential(nn.BatchNorm1d(2).eval(), nn.InstanceNorm1d(2)), 2) == ""


def test_the_start_of_a_fit_prints_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    task = Regression()
    task.net.append(nn.BatchNorm1d(1).double())
    fit(task, tmp_path, train=samples(8), global_batch_size=4, micro_batch_size=2, max_steps=1)
    assert "note: BatchNorm (net.3) normalizes each micro-batch" in capfd.readouterr().out


@pytest.mark.parametrize(("total", "is_late"), [(None, False), (100, True), (101, False)])
def test_a_compression_that_never_begins(
    total: int | None, is_late: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    note_late_start(100, total)
    assert (
        "powersgd_start_step=100; a tenth of the run is 10" in capsys.readouterr().out
    ) == is_late


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, None),
        ({"overfit_batches": 11}, None),
        ({"overfit_batches": 1}, "epoch of 1 step, .* validates and saves; raise validate_every"),
        (
            {"overfit_batches": 2, "validate_every_n_epochs": None},
            "the run saves; raise checkpoint",
        ),
        (
            {"overfit_batches": 2, "checkpoint": {"every_n_epochs": 9}},
            "the run validates; raise val",
        ),
    ],
)
def test_epochs_of_few_steps(options: dict[str, Any], words: str | None) -> None:
    found = "".join(notes_on_epochs(TrainerConfig.from_options(options)))
    assert found == "" if words is None else re.search(words, found)
