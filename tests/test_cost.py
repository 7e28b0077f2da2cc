"""What an ordinary step costs, in counts that no machine changes.

Counted are steps between two log events, with everything on that is on by default: where the host
waits for the device, what the ranks send each other, and how many Python functions of the package
are called. How long a step takes is measured in ``benchmarks/overhead``.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support import Regression, on_ranks, samples
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import trainer
from trainer import Trainer, WeightedLoss, distributed, lazy_dynamo, logbook, stopping
from trainer.diagnosis.flight_recorder import Collective, recorded
from trainer.optimizing import gradients
from trainer.watch import watch

pytestmark = pytest.mark.timeout(60)

PACKAGE = str(Path(trainer.__file__).parent)
STAND_IN = lazy_dynamo.__file__  # for functions of torch, which calls them

# The most functions of the package that a step may call, by the number of ranks. A step that calls
# more has become dearer for every task: do without, or raise the number here.
MOST_CALLS = {1: 81, 2: 83}

NEVER_S = 1e9  # between the steps at which ranks agree on signals, which follow the clock

NUM_GRADIENTS = sum(p.numel() for p in Regression().parameters()) + 1  # and that of the weight


class Watched(Regression):
    """Is in ``window`` for ``every - 1`` steps, forward to forward, without a log event.

    The weights of its losses are not the planned ones, so gradients are corrected in every step.
    It has no hook, for which there would be more to do.
    """

    def __init__(self, window: AbstractContextManager[Any], every: int = 10) -> None:
        super().__init__()
        self.float()
        self.window, self.every = window, every
        self.opened = ExitStack()
        self.step = -1

    def forward(self, batch: Any) -> Tensor:
        if self.run.step > self.step:
            self.step = self.run.step
            if self.step == self.every:
                self.opened.enter_context(self.window)
            elif self.step == 2 * self.every - 1:
                self.opened.close()
        return super().forward(batch)

    def loss(self, outputs: Tensor, batch: Any) -> WeightedLoss:
        weight = 1.5 + self.run.step % 3
        self.log("output", outputs.mean())
        return WeightedLoss(((outputs - batch[1]) ** 2).sum() * weight, len(outputs) * weight)


class LogsOften(Watched):
    """Logs a value that now is a number of the host, now one of the device."""

    def loss(self, outputs: Tensor, batch: Any) -> WeightedLoss:
        self.log("mixed", outputs.mean() if self.run.step % 2 else 1.0)
        return super().loss(outputs, batch)


def train(task: Watched, run_dir: Path, **options: Any) -> None:
    """Train, with progress, metrics, loggers and checkpoints, from one log event to the next."""
    options = {"global_batch_size": 4, "log_every_n_steps": task.every, **options}
    steps = 2 * task.every
    data = samples(steps * options["global_batch_size"], torch.float32)
    trainer = Trainer(accelerator="cpu", run_dir=str(run_dir), max_steps=steps, **options)
    with task.opened:
        trainer.fit(task, train=data)


class Calls:
    """Counts the functions of the package that are called, in any thread that starts from now on.

    A generator that goes on is one, too.
    """

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._is_on = False
        threading.setprofile(self._count)

    def __enter__(self) -> None:
        self._is_on = True
        sys.setprofile(self._count)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)
        self._is_on = False

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        is_ours = code.co_filename.startswith(PACKAGE) and code.co_filename != STAND_IN
        if self._is_on and event == "call" and is_ours:
            self.found[code.co_name] += 1


class Reads(TorchDispatchMode):
    """Counts how often the host asks for the number in a tensor, as ``item`` and ``float`` do."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class HostCopies(TorchFunctionMode):
    """Notes what is copied from the host to the device so that the host waits for it."""

    MAKE = (torch.tensor, torch.as_tensor, Tensor.new_tensor)  # out of numbers of the host
    MOVE = (Tensor.to, Tensor.copy_)

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = (*args, *(kwargs or {}).values())
        moves = func in self.MOVE and any(isinstance(v, Tensor) and v.is_cpu for v in values)
        is_asynchronous = any(value is True for value in values)  # non_blocking
        result = func(*args, **(kwargs or {}))
        if (func in self.MAKE or (moves and not is_asynchronous)) and result.is_meta:
            self.found.append(func)
        return result


class Sent:
    """Notes the collectives that this rank starts, in any thread and group."""

    def __enter__(self) -> None:
        self._before = set(map(_number, recorded()))

    def __exit__(self, *_: object) -> None:
        new = [each for each in recorded() if _number(each) not in self._before]
        self.found = [(each.name, each.num_bytes) for each in new]
        self.buckets = watch.num_buckets


def _number(collective: Collective) -> tuple[str, int]:
    return collective.group, collective.number


class EnoughError(Exception):
    pass


@contextmanager
def then_stop(window: AbstractContextManager[Any]) -> Iterator[None]:
    """End the training after ``window``."""
    with window:
        yield
    raise EnoughError


def test_the_host_waits_for_nothing_that_the_device_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meta tensors take the place of a device's: they have no numbers, and reading one raises."""
    monkeypatch.setattr(distributed, "device", lambda kind: torch.device("meta"))
    monkeypatch.setattr(logbook, "STACK_AFTER", 3)  # as after many micro-batches
    copies = HostCopies()
    task = LogsOften(then_stop(copies))
    with pytest.raises(EnoughError):  # before the first log event, for that reads
        train(task, tmp_path, log_every_n_steps=100, gradient_clip_norm=1.0)
    assert next(task.parameters()).is_meta
    assert copies.found == [], "a copy from the host that is not asynchronous"


def test_a_step_calls_few_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "AGREE_EVERY_S", NEVER_S)
    calls = Calls()
    train(Watched(calls, every=50), tmp_path)
    check_calls(calls, world_size=1)


def check_calls(calls: Calls, world_size: int) -> None:
    steps = 49
    per_step = sum(calls.found.values()) / steps
    listed = ", ".join(f"{n / steps:.3g} {name}" for name, n in calls.found.most_common())
    assert 1 < per_step <= MOST_CALLS[world_size], f"{per_step:.1f} calls in a step: {listed}"


LAYOUTS: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "several buckets": {"bucket_cap_mb": 1e-5},
    "8 micro-batches": {"global_batch_size": 16, "micro_batch_size": 1},
    "fp16": {"comm_hook": "fp16"},
}


class Counted(NamedTuple):
    """What a rank counts."""

    calls: Calls
    reads: int
    sent: dict[str, Sent]


def count(run_dir: Path) -> Counted:
    """Train in one rank of several."""
    stopping.AGREE_EVERY_S = NEVER_S
    calls, reads = Calls(), Reads()
    train(Watched(calls, every=50), run_dir / "calls")
    sent = {name: Sent() for name in LAYOUTS}
    for name, options in LAYOUTS.items():
        train(Watched(sent[name]), run_dir / name, **options)
    # Here the tensors are in the host's memory, where it may read what costs it no wait.
    gradients._is_slow_to_read = lambda number: True
    logbook.STACK_AFTER = 3
    train(LogsOften(reads), run_dir / "reads")
    return Counted(calls, reads.found, sent)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Counted]:
    found: list[Counted] = on_ranks(2, count, tmp_path_factory.mktemp("cost"))
    return found


def test_a_step_of_two_ranks_calls_few_functions(ranks: list[Counted]) -> None:
    for counted in ranks:
        check_calls(counted.calls, world_size=2)


def test_two_ranks_read_nothing(ranks: list[Counted]) -> None:
    assert [counted.reads for counted in ranks] == [0, 0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_sends_each_bucket_once_and_nothing_else(layout: str, ranks: list[Counted]) -> None:
    steps = 9
    for counted in ranks:
        sent = counted.sent[layout]
        assert {name for name, _ in sent.found} == {"all_reduce"}
        sizes = [num_bytes for _, num_bytes in sent.found]
        beside = [size for size in sizes if size <= 16]
        # Where gradients are rounded, the weight of the global batch goes beside them.
        assert len(beside) == (steps if layout == "fp16" else 0)
        assert len(sizes) - len(beside) == steps * sent.buckets
        item_size = 2 if layout == "fp16" else 4
        assert sum(sizes) - sum(beside) == steps * item_size * NUM_GRADIENTS
        assert (sent.buckets > 1) == (layout == "several buckets")
