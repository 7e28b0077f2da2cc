"""Callbacks: observers of a run. One file each; they live on rank 0."""

from trainer.callbacks.base import Callback
from trainer.callbacks.early_stopping import EarlyStopping
from trainer.callbacks.learning_rate import LearningRate
from trainer.callbacks.progress import ProgressBar
from trainer.callbacks.report import Report
from trainer.callbacks.throughput import Throughput

__all__ = [
    "Callback",
    "EarlyStopping",
    "LearningRate",
    "ProgressBar",
    "Report",
    "Throughput",
    "default_callbacks",
]


def default_callbacks() -> list[Callback]:
    """Return the callbacks of a run that names none."""
    return [LearningRate(), Throughput(), ProgressBar()]
