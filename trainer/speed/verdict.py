"""What limits a run, in one line at its end, and what to try."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from trainer.run import Run
from trainer.strategies.bucket_size import TORCHS_FIRST_MB
from trainer.watch import STEP_PHASES, Phase, watch

_WARM_UP_STEPS = 10  # caches fill, DDP settles its buckets
_LEAST_STEPS = 20  # to tell anything from
_LEAST_SHARE = 0.2  # of a step, for a wait to be named; else it is computing that limits
_MOST_IN_STEPS = 0.8  # of the time, where something outside of steps is named

# By name, the phases outside of steps, and what to try.
_OUTSIDE = {
    "logging and callbacks": (
        (Phase.LOGGING, Phase.CALLBACKS),
        ("a larger log_every_n_steps", "cheaper callbacks"),
    ),
    "evaluation": (
        (Phase.EVALUATION_LOADING, Phase.VALIDATION),
        ("validating less often", "less validation data"),
    ),
    "saving": ((Phase.SAVING,), ("saving less often",)),
    "starting epochs": ((Phase.EPOCH_START,), ("a cheaper on_epoch_start",)),
}


class Verdict:
    """Adds up the ``perf/`` values of a run's log events, but those with its first steps.

    What happens outside of steps is this rank's, as the `watch` has it.
    """

    def __init__(self, run: Run) -> None:
        """Begin where ``run`` is."""
        self._begun = self._last = self._counted_from = run.step
        self._seconds = list(watch.seconds)  # by phase, when steps began to count
        self._steps = 0
        self._millis: dict[str, float] = defaultdict(float)
        self._step_millis: dict[str, float] = defaultdict(float)  # of the steps it is measured in
        self._slower_by: dict[int, float] = defaultdict(float)  # milliseconds by rank

    def add(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Take the values of a log event in."""
        since, self._last = self._last, run.step
        if since < self._begun + _WARM_UP_STEPS:
            self._counted_from, self._seconds = run.step, list(watch.seconds)
            return
        if "perf/step_ms" not in metrics:
            return
        steps = run.step - since
        self._steps += steps
        for name, value in metrics.items():
            if name.startswith("perf/") and name.endswith("_ms"):
                part = name.removeprefix("perf/").removesuffix("_ms")
                self._millis[part] += steps * value
                self._step_millis[part] += steps * metrics["perf/step_ms"]
        if "perf/slowest_rank" in metrics:
            rank = int(metrics["perf/slowest_rank"])
            self._slower_by[rank] += steps * metrics["perf/slowest_by_ms"]

    def line(self, run: Run) -> str | None:
        """Return what limits ``run``, and what to try; None if too little was measured to tell."""
        if self._steps < _LEAST_STEPS:
            return None
        return self._outside_of_steps(run) or self._in_steps(run)

    def _outside_of_steps(self, run: Run) -> str | None:
        """Return what takes most of the time besides steps, if it is much."""
        seconds = [now - then for now, then in zip(watch.seconds, self._seconds, strict=True)]
        mean_step = self._millis["step"] / self._steps / 1000
        total, steps = sum(seconds), mean_step * (run.step - self._counted_from)
        if steps >= _MOST_IN_STEPS * total:
            return None
        others = sum(seconds[STEP_PHASES]) - steps  # those that do not count take longer
        if others < 0:  # a device computes behind the host, which waits for it while logging
            seconds[Phase.LOGGING] += others
        spent = {what: sum(seconds[each] for each in own) for what, (own, _) in _OUTSIDE.items()}
        what = max(spent, key=lambda what: spent[what])
        tries = [*_OUTSIDE[what][1]]
        if what == "saving" and not run.config.checkpoint.asynchronous:
            tries.insert(0, "checkpoint.asynchronous=true")
        most = spent[what]
        if others > most:  # first batches, and waits for the rank that did the most
            what, most = "first steps after a log event, validation or save", others
            tries = ["logging, validating and saving less often"]
        share, rest = _percent(most / total), _percent(steps / total)
        return _try(f"{what}: {share} of the time, ordinary steps {rest}", tries)

    def _in_steps(self, run: Run) -> str:
        data, hidden = self._share("data"), self._share("comm_hidden")
        exposed = self._share("comm") - hidden
        # All ranks but the slowest one of a step wait for that one.
        wait = min(1.0, self._share("wait") * run.world_size / max(1, run.world_size - 1))
        longest = max(data, exposed, wait)
        if longest < _LEAST_SHARE:
            share = sum(map(self._share, ("forward", "backward", "optimizer")))
            return _try(f"compute: {_percent(share)} of the step", _faster_computing(run))
        if longest == data:
            text = f"data: {_percent(data)} of the step waits for the next batch"
            return _try(text, run.faster_loading)
        if longest == exposed:
            text = f"communication: {_percent(exposed)} of the step waits for gradients"
            text += f" ({_percent(hidden / (hidden + exposed))} of communication is hidden)"
            return _try(text, _less_communication(run))
        return f"imbalance: {_percent(wait)} of the step waits for {self._slowest(run, wait)}"

    def _share(self, part: str) -> float:
        return self._millis[part] / self._step_millis[part] if part in self._millis else 0.0

    def _slowest(self, run: Run, wait: float) -> str:
        rank = max(self._slower_by, key=lambda rank: self._slower_by[rank])
        by = self._slower_by[rank] / self._step_millis["slowest_by"]  # in steps
        if by < wait / 2:
            return (
                "the slowest rank, now this one, now that; try batches that cost all ranks as much "
                "(DataModule.train_indices)"
            )
        millis = by * self._millis["step"] / self._steps
        return (
            f"rank {rank}, which takes {millis:.3g} ms longer than the others; look at its data, "
            "and at what else runs on its machine"
        )


def _less_communication(run: Run) -> list[str]:
    config, found = run.config, []
    if config.strategy == "ddp" and _is_large(run):
        if config.comm_hook is None and not config.reproducible:
            found.append("comm_hook=bf16")
        elif config.comm_hook in ("fp16", "bf16"):
            found.append(f"comm_hook=powersgd+{config.comm_hook}")
        if config.bucket_cap_mb != "auto":
            found.append("bucket_cap_mb=auto")
    return [*found, "a larger global batch"]


def _is_large(run: Run) -> bool:
    """Whether gradients fill more than DDP's first bucket: else there is little to gain by size."""
    sizes = (p.numel() * p.element_size() for p in run.task.parameters() if p.requires_grad)
    return sum(sizes) > TORCHS_FIRST_MB * 2**20


def _faster_computing(run: Run) -> list[str]:
    config, found = run.config, []
    if run.device.startswith("cuda"):
        if config.precision == "fp32":
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            found.append("precision=bf16" if has_bf16 else "precision=fp16")
        if config.devices == run.world_size < (count := torch.cuda.device_count()):
            found.append(f"devices={count}")
    if not config.compile and _can_compile(run):
        found.append("compile=true")
    return found


def _can_compile(run: Run) -> bool:
    """Whether there is what it takes, without loading torch's compiler to find out."""
    if any(module._compiled_call_impl is not None for module in run.task.modules()):
        return False  # it does so itself
    if run.device.startswith("cuda"):
        return find_spec("triton") is not None
    compilers = (os.environ.get("CXX", ""), "g++", "clang++")
    has_headers = Path(sysconfig.get_paths()["include"], "Python.h").is_file()
    return has_headers and any(map(shutil.which, compilers))


def _try(text: str, what: Sequence[str]) -> str:
    *first, last = what or [""]
    if not last:
        return text
    return f"{text}; try {', '.join(first)} or {last}" if first else f"{text}; try {last}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
