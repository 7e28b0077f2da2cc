"""Rank 0's callbacks and loggers, and how the loop calls them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from trainer.callbacks import Callback
from trainer.evaluation import evaluating
from trainer.guard import no_collectives
from trainer.loggers import Logger
from trainer.run import Run
from trainer.watch import Phase, watch


class Observers:
    """What observes a run on rank 0. Elsewhere there are none, and nothing happens here."""

    def __init__(self, view: Run, callbacks: Sequence[Callback], loggers: Sequence[Logger]) -> None:
        """Note them, and the run as they see it."""
        self._view = view
        self._callbacks = callbacks
        self._loggers = loggers

    @contextmanager
    def open(self) -> Iterator[None]:
        """Open the loggers, and close everything whatever happens."""
        with ExitStack() as stack:
            for logger in self._loggers:
                stack.callback(no_collectives("a logger")(logger.close))
                with no_collectives("a logger"):
                    logger.open(self._view)
            for callback in self._callbacks:
                stack.callback(no_collectives("a callback")(callback.close))
            yield

    def tell(self, event: str, *args: Any) -> None:
        """Call the method ``event`` of each callback, with the task in eval mode and no gradients.

        Args:
            event: ``on_log``, say.
            *args: What it gets beside the run.
        """
        if not self._callbacks:
            return
        watch.enter(Phase.CALLBACKS)
        with evaluating(self._view.task, "train", None), no_collectives("a callback"):
            for callback in self._callbacks:
                getattr(callback, event)(self._view, *args)

    def write(self, values: Mapping[str, float]) -> None:
        """Write one event to the loggers."""
        watch.enter(Phase.LOGGING)
        if not self._loggers:
            return
        with no_collectives("a logger"):
            for logger in self._loggers:
                logger.log(self._view, values)
