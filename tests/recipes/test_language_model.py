"""The language model recipe: its text, its loss by bytes, and its command line over two ranks."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from recipes.language_model import (
    PADDING,
    ByteTransformer,
    PythonTopics,
    Windows,
    collate,
    read_topics,
)
from trainer.task import RunFacts

REPOSITORY = Path(__file__).parents[2]


def unigram_entropy(documents: Sequence[bytes]) -> float:
    """Nats per byte of the best guess that looks at no other byte."""
    counts = Counter(b"".join(documents))
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values())


def small_task() -> ByteTransformer:
    torch.manual_seed(0)
    return ByteTransformer(context=16, width=32, num_layers=2, num_heads=2).eval()


def test_windows_predict_every_byte_after_the_first_once() -> None:
    documents = [b"a first text, of some length", b"x", b"the second one"]
    windows = [bytes(window.tolist()) for window in Windows(documents, length=8).windows]
    assert [len(window) - 1 for window in windows] == [8, 8, 8, 3, 8, 5]
    assert b"".join(window[1:] for window in windows[:4]) == documents[0][1:]
    assert b"".join(window[1:] for window in windows[4:]) == documents[2][1:]
    # Each window starts with the byte that the one before it ends with.
    assert [window[:1] for window in windows[1:4]] == [window[-1:] for window in windows[:3]]


def test_documents_are_held_out_as_a_whole() -> None:
    data = PythonTopics(context=64, val_share=0.1)
    documents = read_topics()
    assert len(documents) == len(set(documents))
    held_out = sum(len(window) - 1 for window in data.val.windows)
    everything = sum(len(d) - 1 for d in documents)
    assert 0.1 < held_out / everything < 0.25
    assert held_out + sum(len(window) - 1 for window in data.train.windows) == everything
    assert any(len(window) < 65 for window in data.train.windows)


def test_a_batch_is_padded_and_knows_its_bytes() -> None:
    batch = collate([torch.tensor([1, 2, 3]), torch.tensor([4, 5])])
    assert batch.text.tolist() == [[1, 2, 3], [4, 5, PADDING]]
    assert batch.num_bytes == 3


def test_the_loss_is_the_sum_over_real_bytes() -> None:
    task = small_task()
    windows = [torch.tensor(list(text)) for text in (b"a longer window", b"short")]
    alone = [task.loss(task(batch), batch) for batch in (collate([w]) for w in windows)]
    batch = collate(windows)
    together = task.loss(task(batch), batch)
    assert together.weight == sum(len(w) - 1 for w in windows)
    torch.testing.assert_close(together.total, alone[0].total + alone[1].total)
    # The first term, written out.
    logits = task(collate(windows[:1]))[0]
    picked = F.log_softmax(logits, dim=1)[torch.arange(14), windows[0][1:]]
    torch.testing.assert_close(alone[0].total, -picked.sum())


def test_no_prediction_sees_what_comes_after() -> None:
    task = small_task()
    text = torch.arange(60, 77)
    changed = text.clone()
    changed[10:] = 0
    before, after = task(collate([text]))[0], task(collate([changed]))[0]
    torch.testing.assert_close(before[:10], after[:10])
    assert not torch.allclose(before[10:], after[10:])


def test_the_rate_rises_then_falls_to_zero() -> None:
    task = small_task()
    task.run = RunFacts(total_steps=50)
    setup = task.configure_optimizers()
    rates = []
    for _ in range(50):
        rates.append(setup.optimizer.param_groups[0]["lr"] / task.learning_rate)
        setup.optimizer.step()
        setup.scheduler.step()
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[27] == pytest.approx(0.5, abs=0.03)
    assert setup.optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-9)


def test_without_a_trainer_the_rate_is_constant() -> None:
    assert small_task().configure_optimizers().scheduler is None


def test_a_short_run_in_bf16_on_two_ranks_beats_the_unigrams(tmp_path: Path) -> None:
    overrides = [
        "trainer.devices=2",
        "trainer.max_steps=80",
        "trainer.precision=bf16",
        "trainer.log_every_n_steps=20",
        "task.width=64",
        "task.num_layers=1",
        "task.learning_rate=0.01",
        "data.context=64",
        f"trainer.run_dir={tmp_path}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "recipes.language_model", *overrides],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    train = [e["train/loss"] for e in events if "train/loss" in e]
    val = next(e for e in reversed(events) if "val/loss" in e)
    assert train == sorted(train, reverse=True)
    assert val["val/loss"] < unigram_entropy(read_topics()) - 0.4
    assert val["val/bits_per_byte"] == pytest.approx(val["val/loss"] / math.log(2), rel=1e-5)
