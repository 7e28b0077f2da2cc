"""Loggers: where a run's metrics are written. One file each; they live on rank 0."""

from trainer.loggers.base import Logger
from trainer.loggers.jsonl import JsonlLogger
from trainer.loggers.lightning import LightningLogger
from trainer.loggers.tensorboard import TensorBoardLogger

__all__ = ["JsonlLogger", "LightningLogger", "Logger", "TensorBoardLogger", "default_loggers"]


def default_loggers() -> list[Logger]:
    """Return the loggers of a run that names none."""
    return [JsonlLogger(), TensorBoardLogger()]
