"""The MNIST recipe: its files, its task by hand, and its command line over two ranks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recipes.mnist import (
    ORIGINAL_FILES,
    PIXEL_MEAN,
    PIXEL_STD,
    SHA256,
    Digits,
    MnistData,
    MnistTask,
    parse_idx,
)
from trainer import OptimizerSetup

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data() -> MnistData:
    return MnistData()


def recipe(*overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "recipes.mnist", *overrides],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    run_dir = tmp_path_factory.mktemp("mnist") / "run"
    done = recipe(
        "trainer.devices=2",
        "trainer.max_steps=100",
        "trainer.limit_val_batches=10",
        f"trainer.run_dir={run_dir}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir, done.stdout


def events(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_idx_is_read_with_its_shape() -> None:
    header = bytes([0, 0, 0x08, 2, 0, 0, 0, 2, 0, 0, 0, 3])
    tensor = parse_idx(header + bytes([1, 2, 3, 4, 5, 255]))
    assert tensor.dtype == torch.uint8
    assert tensor.tolist() == [[1, 2, 3], [4, 5, 255]]


def test_the_original_data_is_split_in_three(data: MnistData) -> None:
    assert (len(data.train), len(data.val), len(data.test)) == (55_000, 5_000, 10_000)
    assert data.train.images.shape == (55_000, 28, 28)
    # What the original files start and end with.
    assert data.train.labels[:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]
    assert data.val.labels[-4:].tolist() == [3, 5, 6, 8]
    assert data.test.labels[:4].tolist() == [7, 2, 1, 0]
    counts = torch.cat([data.train.labels, data.val.labels]).bincount().tolist()
    assert counts == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


def test_pixels_are_normalised_by_the_training_images(data: MnistData) -> None:
    pixels = torch.cat([data.train.images, data.val.images]).double()
    assert pixels.mean().item() == pytest.approx(PIXEL_MEAN, abs=0.01)
    assert pixels.std().item() == pytest.approx(PIXEL_STD, abs=0.01)


def test_a_ready_batch_holds_the_samples_asked_for() -> None:
    digits = Digits(torch.arange(40, dtype=torch.uint8).view(10, 2, 2), torch.arange(10))
    images, labels = digits.__getitems__([7, 0, 7])
    assert labels.tolist() == [7, 0, 7]
    for row, index in enumerate([7, 0, 7]):
        torch.testing.assert_close(images[row], digits[index][0])


def test_a_missing_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz is missing.*data.folder"):
        MnistData(folder=str(tmp_path))


def test_one_flipped_bit_is_noticed(tmp_path: Path) -> None:
    for name in SHA256:
        shutil.copy(ORIGINAL_FILES / f"{name}-ubyte.gz", tmp_path)
    altered = tmp_path / "t10k-labels-idx1-ubyte.gz"
    content = bytearray(altered.read_bytes())
    content[-1] ^= 1
    altered.write_bytes(content)
    with pytest.raises(ValueError, match=r"t10k-labels-idx1-ubyte.gz is not the original.*fetch"):
        MnistData(folder=str(tmp_path))


def test_the_task_trains_without_a_trainer(data: MnistData) -> None:
    torch.manual_seed(0)
    task = MnistTask(learning_rate=0.003, dropout=0.0)
    setup = task.configure_optimizers()
    assert isinstance(setup, OptimizerSetup)
    assert setup.scheduler is None
    batch = data.train.__getitems__(range(32))
    losses = []
    for _ in range(12):
        loss = task.loss(task(batch), batch)
        setup.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        setup.optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(2.3, abs=0.3)  # ln 10: it starts with no opinion
    assert losses[-1] < 0.3
    assert (task.predict(batch) == batch[1]).float().mean() > 0.9


def test_100_steps_on_two_ranks_recognise_most_digits(short_run: tuple[Path, str]) -> None:
    run_dir, _ = short_run
    last = events(run_dir)[-1]
    assert last["step"] == 100
    assert last["samples"] == 100 * 128
    assert last["test/accuracy"] >= 0.94


def test_the_schedule_spans_the_run(short_run: tuple[Path, str]) -> None:
    rates = [e["train/lr"] for e in events(short_run[0]) if "train/lr" in e]
    assert max(rates) > 0.003
    assert rates[-1] < 0.0001


def test_the_best_checkpoint_tests_alike_in_one_process(short_run: tuple[Path, str]) -> None:
    run_dir, _ = short_run
    best = run_dir / "checkpoints" / "best"
    done = recipe("mode=test", f"ckpt_path={best}", f"trainer.run_dir={run_dir.parent / 'test'}")
    assert done.returncode == 0, done.stdout + done.stderr
    shown = dict(line.split() for line in done.stdout.splitlines() if line.startswith("test/"))
    expected = events(run_dir)[-1]["test/accuracy"]
    assert float(shown["test/accuracy"]) == pytest.approx(expected, abs=1e-6)


def test_bad_data_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    done = recipe(f"data.folder={tmp_path}", f"trainer.run_dir={tmp_path / 'run'}")
    assert done.returncode == 1
    assert "train-images-idx3-ubyte.gz is missing" in done.stderr
