"""Validation, test and prediction of a LightningModule: its hooks and steps, in their order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.evaluation import evaluating

if TYPE_CHECKING:
    from trainer.lightning.module import LightningTask

# Lightning's word for the evaluation of a split.
WORDS = {"val": "validation", "test": "test", "predict": "predict"}


class Evaluations:
    """One evaluation after the other.

    Attributes:
        dataloader_idx: The number of the set that is evaluated now, among several.
    """

    def __init__(self, task: LightningTask) -> None:
        self.dataloader_idx = 0
        self._task = task
        self._batches: dict[str | None, int] = {}  # done of each set

    @property
    def is_of_many(self) -> bool:
        """Whether one of several sets is evaluated now."""
        split = self._task.run.split
        return split != "train" and self._task.data.is_one_of_many(split)

    def begin(self, split: str) -> None:
        """Run the hooks at the start."""
        self._batches.clear()
        with evaluating(self._task, split, None):
            self._task.calls.hook(f"on_{WORDS[split]}_start")
            self._task.calls.hook(f"on_{WORDS[split]}_epoch_start")

    def run(self, batch: Any, step: str) -> Any:
        """Run a step for one micro-batch, and the hooks around it."""
        task, word = self._task, WORDS[self._task.run.split]
        name = task.run.evaluated_set
        self.dataloader_idx = task.data.number(task.run.split, name)
        number = self._batches[name] = self._batches.get(name, -1) + 1
        book = task.run._logbook  # a prediction has none
        task.log_book.evaluation.num_samples += 1 if book is None else book.num_samples
        batch = task.transferred(batch)
        place = (batch, number, self.dataloader_idx)
        task.calls.hook(f"on_{word}_batch_start", *place)
        outputs = task.calls.step(step, *place)
        task.calls.hook(f"on_{word}_batch_end", outputs, *place)
        return outputs

    def end(self, split: str, values: Mapping[str, float]) -> dict[str, float]:
        """Run the hooks at the end.

        Args:
            split: ``val``, ``test`` or ``predict``.
            values: What was measured so far.

        Returns:
            What was measured besides.
        """
        task, word = self._task, WORDS[split]
        self.dataloader_idx = 0
        logs = task.log_book
        with evaluating(task, split, None):
            found = logs.told(logs.evaluation, f"on_{word}_epoch_end", beside=values)
            task.calls.hook(f"on_{word}_end")
        return found
