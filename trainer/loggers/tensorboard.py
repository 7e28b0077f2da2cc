"""Metrics for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.loggers.base import Logger
from trainer.run_dir import set_aside

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from trainer.run import Run


class TensorBoardLogger(Logger):
    """Writes scalars under ``tensorboard/``; watch with ``tensorboard --logdir <run_dir>``.

    A resumed run goes on in the same folder, and what was logged beyond its step disappears from
    the charts. A new run sets an older folder aside.

    Args:
        folder: Name of the folder in the run's folder.
        flush_secs: The longest that a value waits until it is on disk.
    """

    def __init__(self, folder: str = "tensorboard", flush_secs: int = 10) -> None:
        self.folder = folder
        self.flush_secs = flush_secs
        self._path: Path | None = None
        self._first_step: int | None = None
        self._writer: SummaryWriter | None = None

    def open(self, run: Run) -> None:
        """Note where to write. The first value opens the file: the import takes 0.15 s."""
        self._path = run.run_dir / self.folder
        if run.step == 0:
            set_aside(self._path)
        self._first_step = run.step + 1 if run.step else None
        self._writer = None

    @property
    def writer(self) -> SummaryWriter:
        """Torch's writer, for a callback that logs images, text or histograms."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            assert self._path is not None, "log before open"
            self._writer = SummaryWriter(
                str(self._path), purge_step=self._first_step, flush_secs=self.flush_secs
            )
        return self._writer

    def log(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Write the values as scalars at ``run.step``, in one event: the writer is a thread."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        file = self.writer.file_writer
        assert file is not None  # unless it is closed
        file.add_summary(Summary(value=values), run.step)

    def state_dict(self) -> dict[str, Any]:
        """Bring the values to the file: a run that goes on from here does not log them again."""
        if self._writer is not None:
            with suppress(OSError):  # it comes up again in `log`
                self._writer.flush()
        return {}

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()
