"""Rank 0's callbacks and loggers, and how the loop calls them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, get_args

from trainer import distributed
from trainer.callbacks import Callback
from trainer.evaluation import evaluating
from trainer.guard import no_collectives
from trainer.loggers import Logger
from trainer.messages import reason, warn
from trainer.reporting.run_file import RunFile
from trainer.run import Run
from trainer.stopping import STOP_SIGNALS
from trainer.watch import Phase, watch

Event = Literal["on_fit_start", "on_log", "on_validation_end", "on_save", "on_fit_end"]


class Observers:
    """What observes a run on rank 0. Elsewhere there are none, and nothing happens here."""

    def __init__(
        self,
        view: Run,
        callbacks: Sequence[Callback],
        loggers: Sequence[Logger],
        on_error: str = "stop",
    ) -> None:
        """Note them.

        Args:
            view: The run as they see it.
            callbacks: In the order in which they are called.
            loggers: Likewise.
            on_error: ``warn`` trains on where a logger can no longer write, else the run stops.
        """
        self._view = view
        self._callbacks = callbacks
        self._by_event: dict[str, list[Any]] = {}  # the callbacks' own methods
        for event in get_args(Event):
            methods = [getattr(callback, event) for callback in callbacks]
            default = getattr(Callback, event)
            own = [method for method in methods if getattr(method, "__func__", None) is not default]
            self._by_event[event] = own
        told = distributed.rank() == 0 and not view.config.fast_dev_run
        self._loggers = [*loggers, RunFile()] if told else loggers
        self._on_error = on_error
        self._warned: set[Logger] = set()  # of these

    @contextmanager
    def open(self) -> Iterator[None]:
        """Open the loggers, and close everything whatever happens."""
        with ExitStack() as stack:
            stack.callback(watch.tells, False)
            closing = stack.enter_context(ExitStack())
            opened: list[Logger] = []
            stack.callback(self._end, opened)  # all of them, before the first one is waited for
            try:
                for logger in self._loggers:
                    closing.callback(self._close, logger)
                    opened.append(logger)
                    with no_collectives("a logger"):
                        logger.open(self._view)
                for callback in self._callbacks:
                    stack.callback(no_collectives("a callback")(callback.close))
                yield
            except BaseException:
                self._view.status = "failed"
                raise
            self._view.status = self._status()

    def tell(self, event: Event, *args: Any) -> None:
        """Call the method ``event`` of each callback that has one of its own.

        Meanwhile the task is in eval mode, without gradients.

        Args:
            event: ``on_log``, say.
            *args: What it gets beside the run.
        """
        methods = self._by_event[event]
        if not methods:
            return
        watch.enter(Phase.CALLBACKS)
        with evaluating(self._view.task, "train", None), no_collectives("a callback"):
            for method in methods:
                method(self._view, *args)

    def write(self, values: Mapping[str, float]) -> None:
        """Write one event to the loggers."""
        watch.enter(Phase.LOGGING)
        for logger in self._loggers:
            with self._using(logger):
                logger.log(self._view, values)

    def _status(self) -> str:
        reason = self._view.stop_reason
        signals = [number.name for number in STOP_SIGNALS]
        return f"stopped by {reason}" if reason in signals else "finished"

    def _end(self, loggers: Sequence[Logger]) -> None:
        for logger in loggers:
            with self._using(logger):
                logger.end(self._view)

    def _close(self, logger: Logger) -> None:
        with watch.excused(Phase.FINISHING), self._using(logger):
            logger.close()

    @contextmanager
    def _using(self, logger: Logger) -> Iterator[None]:
        try:
            with no_collectives("a logger"):
                yield
        except OSError as error:  # a full disk, a mount that is gone
            text = f"{logger.label} failed: {reason(error)}"
            if self._on_error == "stop":
                raise OSError(f"{text}; checkpoint.on_error=warn trains on") from error
            if logger not in self._warned:
                self._warned.add(logger)
                warn(f"{text}; training goes on")
