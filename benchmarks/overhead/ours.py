"""The same with the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from benchmarks.overhead.work import Work, world_size
from trainer import DataModule, Trainer

NO_EXTRAS: dict[str, Any] = {"callbacks": False, "logger": False}


class Data(DataModule):
    """The samples of a work, with its way to make batches of them."""

    def __init__(self, work: Work) -> None:
        self.collate_fn = work.collate
        self.samples = work.data

    def train_dataset(self) -> Dataset[Any]:
        """Return all of them."""
        return self.samples


def train(work: Work, folder: Path, **options: Any) -> None:
    """Train as it comes: progress bar, metrics.jsonl, TensorBoard, checkpoints."""
    _trainer(work, folder, max_steps=work.total_steps, **options).fit(work.net(), Data(work))


def evaluate(work: Work, folder: Path) -> None:
    """Validate as it comes."""
    _trainer(work, folder).validate(work.net(), val=work.data)


def predict(work: Work, folder: Path) -> None:
    """Predict as it comes."""
    _trainer(work, folder).predict(work.net(), predict=work.data)


def _trainer(work: Work, folder: Path, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        global_batch_size=work.batch_size * work.accumulation,
        micro_batch_size=work.batch_size // world_size() if work.accumulation > 1 else None,
        num_threads=work.threads,
        run_dir=str(folder),
        **options,
    )
