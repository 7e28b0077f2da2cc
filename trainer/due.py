"""What is due at a step: it follows from the options and the clock alone."""

from __future__ import annotations

from typing import NamedTuple

from trainer.config import TrainerConfig
from trainer.state import TrainState


class Due(NamedTuple):
    """What is to be done at a step boundary, in this order."""

    log: bool
    validate: bool
    save: bool


def due(config: TrainerConfig, state: TrainState) -> Due:
    """Return what the options call for where the clock stands."""
    is_epoch_end = not state.step_in_epoch
    return Due(
        log=is_epoch_end or _is_multiple(state.step, config.log_every_n_steps),
        validate=_is_multiple(state.step, config.validate_every_n_steps)
        or (is_epoch_end and _is_multiple(state.epoch, config.validate_every_n_epochs)),
        save=_is_multiple(state.step, config.checkpoint.every_n_steps)
        or (is_epoch_end and _is_multiple(state.epoch, config.checkpoint.every_n_epochs)),
    )


def limit_reached(config: TrainerConfig, state: TrainState) -> str | None:
    """Return why the run ends here: the option that says so."""
    if config.max_steps is not None and state.step >= config.max_steps:
        return f"max_steps={config.max_steps} reached"
    if config.max_epochs is not None and state.epoch >= config.max_epochs:
        return f"max_epochs={config.max_epochs} reached"
    return None


def _is_multiple(count: int, every: int | None) -> bool:
    return every is not None and count % every == 0
