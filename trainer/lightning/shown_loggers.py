"""The loggers of a run as a LightningModule finds them: ``self.logger``, ``self.loggers``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainer.loggers import Logger


class NotAFactError(AttributeError, ValueError):
    """Something that ``self.trainer`` has under Lightning, and not here."""


def shown_loggers(loggers: Iterable[Logger]) -> list[Any]:
    """Return loggers as a module finds them, those with an ``experiment`` first."""
    own = [logger.own for logger in loggers]
    shown = [OurLogger(logger) if isinstance(logger, Logger) else logger for logger in own]
    return sorted(shown, key=lambda logger: not hasattr(logger, "experiment"))


class OurLogger:
    """A logger of ours, in so far as it is one of Lightning's."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger

    @property
    def experiment(self) -> Any:
        """TensorBoard's writer."""
        try:
            return self._logger.writer  # type: ignore[attr-defined]
        except AttributeError:
            raise NotAFactError(
                f"self.logger.experiment: a {self._logger.label} has none; log what it takes by "
                "self.log, or give the Trainer a logger that has one"
            ) from None

    def __getattr__(self, name: str) -> Any:
        raise NotAFactError(
            f"self.logger.{name} is not known here: a {self._logger.label} has an experiment if "
            "it is for TensorBoard; numbers are logged by self.log"
        )


class Silent:
    """The logger of a rank that logs nothing: whatever is called does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Silent:
        """Do nothing."""
        return self
