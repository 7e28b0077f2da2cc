"""A trace of chosen steps by ``torch.profiler``: the option ``profile=10-14``.

Each rank writes a file of its own, in the format of Chrome's traces. In it the phases of a step
have names, above the operations of which they are made.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from trainer import distributed
from trainer.config import TrainerConfig
from trainer.lazy_dynamo import load_dynamo
from trainer.messages import counted
from trainer.watch import Phase, watch

FOLDER = "profile"
VIEWER = "https://ui.perfetto.dev"
_NAMES = {Phase.LOADING: "data"}  # where the field has another word
_QUIET = "6"  # Kineto would write two lines of its own to stderr


@contextmanager
def traced(config: TrainerConfig, run_dir: Path) -> Iterator[None]:
    """Trace the steps that ``profile`` names, if it names any, while they are trained here.

    Must be called on every rank.

    Args:
        config: The options.
        run_dir: The traces are in ``profile/rank-<n>.json.gz`` below it.
    """
    steps = config.profiled_steps
    if steps is None:
        yield
        return
    _warm_up()
    folder = run_dir / FOLDER
    trace = _Trace(steps, folder / f"rank-{distributed.rank()}.json.gz")
    watch.listen(trace.enter)
    try:
        yield
    finally:
        watch.unlisten(trace.enter)
        trace.close()
    if distributed.rank() == 0:
        print(trace.summary(folder, distributed.world_size()), flush=True)


class _Trace:
    """The trace of one rank; the `watch` tells it which phase begins."""

    def __init__(self, steps: range, path: Path) -> None:
        self._steps, self._path = steps, path
        self._profiler: profile | None = None
        self._step: record_function | None = None
        self._phase: record_function | None = None
        self._traced: list[int] = []

    def enter(self, phase: Phase) -> None:
        """Begin with the first step's data; name what begins; end with whatever follows."""
        step = watch.step + 1
        if self._profiler is None:
            if phase is not Phase.LOADING or step not in self._steps or self._is_over:
                return
            self._start()
        elif step not in self._steps:
            self.close()
            return
        _end(self._phase)
        if phase is Phase.LOADING and step not in self._traced:
            _end(self._step)
            self._step = _begin(f"step {step}")
            self._traced.append(step)
        self._phase = _begin(_NAMES.get(phase, phase.name.lower()))

    def close(self) -> None:
        """Write the trace, if one has begun."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        _end(self._phase)
        _end(self._step)
        with watch.excused(Phase.SAVING):
            profiler.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._path))

    def summary(self, folder: Path, world_size: int) -> str:
        """Return the line for the end of a run."""
        first, last = self._steps[0], self._steps[-1]
        if not self._traced:
            return f"profile: none of steps {first} to {last} was trained, so there is no trace"
        steps = f"steps {self._traced[0]} to {self._traced[-1]}"
        files = f"{folder}/rank-<n>.json.gz, {counted(world_size, 'file')}"
        return f"profile: {steps} in {files}; open it in {VIEWER}"

    @property
    def _is_over(self) -> bool:
        return bool(self._traced)

    def _start(self) -> None:
        self._profiler = _profiler()
        self._profiler.start()


def _profiler() -> profile:
    wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA}
    possible = supported_activities()  # type: ignore[no-untyped-call]
    return profile(activities=wanted & set(possible))


def _warm_up() -> None:
    """Load what the profiler needs before the first step, which else would wait for it."""
    os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)
    load_dynamo()  # it asks for it
    with _stderr_dropped():  # Kineto takes a forked process for a thread that should not call it
        profiler = _profiler()
        profiler.start()
        profiler.stop()


@contextmanager
def _stderr_dropped() -> Iterator[None]:
    """Drop what C++ writes to stderr, for a moment."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _begin(name: str) -> record_function:
    begun = record_function(name)
    begun.__enter__()  # type: ignore[no-untyped-call]
    return begun


def _end(begun: record_function | None) -> None:
    if begun is not None:
        begun.__exit__(None, None, None)
