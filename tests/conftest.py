"""What tests in every folder below get; being here, it also lets them import ``support``."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before torch is loaded, here and in what the tests start: OpenMP's threads must not spin while
# they wait, because several processes at once then have more of them than the machine has cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
from torch import nn

from trainer.config import TrainerConfig
from trainer.run import Run
from trainer.task import TaskModule


class Tiny(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 100)
        self.frozen = nn.Linear(100, 1, bias=False).requires_grad_(False)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """Build a run as rank 0's callbacks see it, with any field replaced."""

    def make(**fields: Any) -> Run:
        values: dict[str, Any] = {
            "task": Tiny(),
            "config": TrainerConfig(max_epochs=2),
            "run_dir": tmp_path,
            "world_size": 2,
            "global_batch_size": 128,
            "micro_batch_size": 32,
            "accumulation_steps": 2,
            "total_steps": 100,
            "steps_per_epoch": 50,
            "device": "cpu",
        }
        return Run(**{**values, **fields})

    return make
