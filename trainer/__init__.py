"""A small trainer for distributed data parallel PyTorch: the world size is an execution detail.

What comes with it, and the base classes of your own: `trainer.callbacks`, `trainer.loggers`,
`trainer.strategies`.
"""

from trainer import startup as _startup
from trainer.api import Trainer
from trainer.callbacks import Callback
from trainer.checkpoint.weights import load_task, load_weights
from trainer.cli import hydra_main, run
from trainer.data.module import DataModule
from trainer.finding.lr_report import LRReport
from trainer.finding.micro_batch_report import MicroBatchReport
from trainer.lightning.as_lightning import as_lightning
from trainer.logbook import NotFiniteError
from trainer.loggers import Logger
from trainer.planning.report import PlanReport
from trainer.predictions import load_predictions
from trainer.run import FitResult, Run
from trainer.seeding import seed_everything
from trainer.task import OptimizerSetup, RunFacts, TaskModule, WeightedLoss
from trainer.verify.report import VerifyReport

__all__ = [
    "Callback",
    "DataModule",
    "FitResult",
    "LRReport",
    "Logger",
    "MicroBatchReport",
    "NotFiniteError",
    "OptimizerSetup",
    "PlanReport",
    "Run",
    "RunFacts",
    "TaskModule",
    "Trainer",
    "VerifyReport",
    "WeightedLoss",
    "as_lightning",
    "hydra_main",
    "load_predictions",
    "load_task",
    "load_weights",
    "run",
    "seed_everything",
]

_startup.note("import")
