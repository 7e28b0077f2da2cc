from __future__ import annotations

import pytest

from trainer.config import TrainerConfig
from trainer.due import Due, due, limit_reached
from trainer.state import TrainState

CONFIG = TrainerConfig(
    max_steps=100,
    max_epochs=7,
    log_every_n_steps=2,
    validate_every_n_steps=3,
    validate_every_n_epochs=2,
    checkpoint={"every_n_steps": 5, "every_n_epochs": 3},  # type: ignore[arg-type]
)


@pytest.mark.parametrize(
    ("step", "epoch", "step_in_epoch", "expected"),
    [
        (1, 0, 1, Due(log=False, validate=False, save=False)),
        (2, 0, 2, Due(log=True, validate=False, save=False)),
        (3, 0, 3, Due(log=False, validate=True, save=False)),
        (5, 0, 5, Due(log=False, validate=False, save=True)),
        (30, 2, 3, Due(log=True, validate=True, save=True)),
        (7, 1, 0, Due(log=True, validate=False, save=False)),  # the end of an epoch
        (7, 2, 0, Due(log=True, validate=True, save=False)),
        (7, 3, 0, Due(log=True, validate=False, save=True)),
        (7, 2, 1, Due(log=False, validate=False, save=False)),
    ],
)
def test_what_is_due(step: int, epoch: int, step_in_epoch: int, expected: Due) -> None:
    state = TrainState(step=step, epoch=epoch, step_in_epoch=step_in_epoch)
    assert due(CONFIG, state) == expected


def test_nothing_is_due_where_no_option_says_so() -> None:
    never = TrainerConfig(
        max_steps=1,
        log_every_n_steps=50,
        validate_every_n_epochs=None,
        checkpoint={"every_n_epochs": None},  # type: ignore[arg-type]
    )
    assert due(never, TrainState(step=7, step_in_epoch=7)) == (False, False, False)
    assert due(never, TrainState(step=7, epoch=1)) == (True, False, False)


def test_limits() -> None:
    assert limit_reached(CONFIG, TrainState(step=99, epoch=6)) is None
    assert limit_reached(CONFIG, TrainState(step=100)) == "max_steps=100 reached"
    assert limit_reached(CONFIG, TrainState(step=9, epoch=7)) == "max_epochs=7 reached"
