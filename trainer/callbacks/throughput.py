"""The speed of training in the log."""

from __future__ import annotations

import time
from collections.abc import Mapping

from trainer.callbacks.base import Callback
from trainer.run import Run


class Throughput(Callback):
    """Adds ``perf/samples_per_s`` and ``perf/steps_per_s``, over all ranks, to every log event.

    They cover the time since the last log event or the last validation, whichever came later: the
    speed of training, without validation. The time for which a checkpoint holds the loop counts.
    """

    def on_fit_start(self, run: Run) -> None:
        """Start the clock."""
        self._restart(run)

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        """Add the speeds since the clock was started, and start it again."""
        seconds = time.monotonic() - self._time
        if run.step > self._step and seconds > 0:
            metrics["perf/samples_per_s"] = (run.samples - self._samples) / seconds
            metrics["perf/steps_per_s"] = (run.step - self._step) / seconds
        self._restart(run)

    def on_validation_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Start the clock again."""
        self._restart(run)

    def _restart(self, run: Run) -> None:
        self._time, self._step, self._samples = time.monotonic(), run.step, run.samples
