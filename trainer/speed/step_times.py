"""How long the parts of a step take on this rank, with nothing to wait for that is not awaited yet.

On the CPU the `watch` has measured every step already. An accelerator computes behind the host,
which only says how fast it launches work; there events in the stream time one step between two log
events, and are read when the host waits for the device in any case.
"""

from __future__ import annotations

import time
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from trainer.watch import STEP_PHASES, Phase, watch

Floats = np.ndarray[Any, np.dtype[np.float64]]

_LEAST_S = 1e-6  # between the phases of a step there is nothing but rounding
_NEVER = -1
# What to multiply the time and the seconds of loading, forward, backward and optimizer with.
_ELSEWHERE = np.array([1.0, -1.0, -1.0, -1.0, -1.0])
_BEFORE_BACKWARD = np.array([1.0, 0.0, 0.0, -1.0, 0.0])


class StepTimes(NamedTuple):
    """Seconds of one step, the mean of several.

    Attributes:
        step: All of it, without logging, evaluation and saving.
        data: Waiting for batches.
        forward: Copying batches to the device, forward and loss, of all micro-batches.
        backward: Backward of all of them, with the wait for gradients.
        optimizer: From gradients to the end of the step.
    """

    step: float
    data: float
    forward: float
    backward: float
    optimizer: float


class Steps(NamedTuple):
    """What was measured of the steps between two log events.

    A step is what lies between the ends of two backwards, where the ranks have waited for each
    other. Those in which something else happened (logging, a validation) do not count where there
    are others: the ranks wait in them for the one that did the most.

    Attributes:
        mean: The mean of the steps that count.
        counts: Of each step, whether it counts: 1 or 0.
        before: Of each step, the seconds of all but its backward.
        backward: Of each step, the seconds of its backward.
    """

    mean: StepTimes
    counts: Floats
    before: Floats
    backward: Floats


class StepClock:
    """Measures the steps between two log events."""

    def __init__(self, device: torch.device) -> None:
        """Get ready to measure on ``device``."""
        self._marks = None if device.type == "cpu" else DeviceMarks(device)
        watch.listeners = ()  # of an earlier fit

    def take(self) -> Steps | None:
        """Return what was measured since the last call; to be called while logging.

        None where nothing was measured, which is so on all ranks at once.
        """
        ends = watch.take_ends()
        if len(ends) < 2:
            return None
        # A fraction of what np.array, np.diff, sum and mean take for so few numbers.
        table = np.fromiter(chain.from_iterable(ends), float).reshape(len(ends), -1)
        steps = table[1:] - table[:-1]
        parts = steps[:, 1:]
        if self._marks is not None:
            times = self._marks.take(parts)
            if times is None:
                return None
            all_steps = np.ones(len(parts))
            before, backward = times.step - times.backward, times.backward
            return Steps(times, all_steps, all_steps * before, all_steps * backward)
        counts = (steps @ _ELSEWHERE < _LEAST_S).astype(float)
        if not counts.any():
            counts[:] = 1
        mean = (counts @ parts / counts.sum()).tolist()
        return Steps(StepTimes(sum(mean), *mean), counts, steps @ _BEFORE_BACKWARD, parts[:, 2])


class DeviceMarks:
    """Events in the stream of an accelerator, where the phases of one step begin.

    The `watch` calls only while there is a step to time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step = _NEVER  # the one to time
        self._events: list[tuple[Phase, torch.cuda.Event]] = []

    def enter(self, phase: Phase) -> None:
        """Mark where ``phase`` begins, if it belongs to the step to time or ends it."""
        is_over = watch.step == self._step
        belongs = watch.step + 1 == self._step and Phase.LOADING <= phase <= Phase.OPTIMIZER
        if is_over or belongs:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._events.append((phase, event))
        if is_over:
            self._step = _NEVER
        if is_over or phase is Phase.FINISHING:  # in which it will not come any more
            watch.unlisten(self.enter)

    def take(self, parts: Floats) -> StepTimes | None:
        """Wait for the device, as whoever logs does anyhow, and return what it has done.

        Args:
            parts: Of each step, the host's seconds in each of its phases.
        """
        torch.cuda.current_stream(self._device).synchronize()
        waited = time.monotonic() - watch.since
        events, self._events = self._events, []
        is_timed = bool(events) and self._step == _NEVER
        self._step = watch.step + len(parts)  # the next one that is logged, so at no cost
        watch.listen(self.enter)
        if not is_timed:
            return None
        totals = [0.0] * len(Phase)
        for (phase, start), (_, end) in pairwise(events):
            totals[phase] += start.elapsed_time(end) / 1000
        _, *computing = totals[STEP_PHASES]
        # The device idles for loading at most as long as the host loads.
        step = (float(parts.sum()) + waited) / len(parts)
        data = min(float(parts[:, 0].mean()), max(0.0, step - sum(computing)))
        return StepTimes(data + sum(computing), data, *computing)
