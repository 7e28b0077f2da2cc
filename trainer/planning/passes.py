"""Timed forward, backward and optimizer steps, done as the training loop does them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from statistics import median
from typing import Any

import torch

from trainer import distributed
from trainer.data.loading import MicroBatch
from trainer.optimizing.gradients import Gradients
from trainer.planning.profile import Profile
from trainer.trainer import Training
from trainer.watch import Phase, watch

_WARM_UP = 3  # passes before those that are timed: DDP orders its buckets, memory is found


class Passes:
    """Times the passes of one fit on this rank.

    Attributes:
        parameters: Those whose gradients are reduced.
        order: Their numbers, in the order in which their gradients become ready.
    """

    def __init__(self, training: Training, steps: int) -> None:
        """Note what to time.

        Args:
            training: A fit that has not begun.
            steps: How many passes of each kind; the median counts.
        """
        self._training, self._steps = training, steps
        self._device = training.session.device
        [self._turn] = training.turns.all
        self._step_module = self._turn.step_module
        clip_norm = training.config.gradient_clip_norm
        may_miss = self._turn.strategy.may_miss_gradients
        self._gradients = Gradients(self._step_module, self._turn.optimizer, clip_norm, may_miss)
        self._ready: dict[int, Any] = {}
        self.parameters = [p for p in self._step_module.parameters() if p.requires_grad]
        self.order: list[int] = []
        extra = self._step_module.extra_weight
        self._extra = next(n for n, p in enumerate(self.parameters) if p is extra)

    def profile(self, cut: Callable[[int], Any], most: int) -> tuple[Profile, str]:
        """Measure compute by size of micro-batch, from the largest one down to a single sample.

        Args:
            cut: Returns a batch of so many samples.
            most: Samples in the largest one.

        Returns:
            The profile of the slowest rank, and why there is none for smaller micro-batches.
        """
        too_small = "less than one sample per rank"
        found = []
        with ExitStack() as stack:
            for number, parameter in enumerate(self.parameters):
                add: Any = parameter.register_post_accumulate_grad_hook
                stack.callback(add(self._note(number)).remove)
            for size in sorted({max(1, most // 4**n) for n in range(20)}, reverse=True):
                batch = cut(size)
                try:
                    found.append((size, *self._compute(batch, size)))
                except ValueError as error:  # BatchNorm cannot train on one sample, say
                    if size == most:
                        _advise(error, size)
                        raise
                    too_small = f"{size} per micro-batch: {error}"
                    break
            optimizer_s = self._optimizer_s(cut(most), most)
        columns: list[Any] = [list(column) for column in zip(*reversed(found), strict=True)]
        profile = Profile(optimizer_s, *columns)
        everyone = distributed.all_gather_object(profile)
        return max(everyone, key=lambda p: p.forward_s[-1] + p.backward_s[-1]), too_small

    def ddp_step_s(self, micros: Sequence[MicroBatch]) -> float:
        """Return the seconds of a step of all ranks together, without loading."""
        turn = self._turn
        self._training.wrap()
        seconds = []
        for _ in range(_WARM_UP + self._steps):
            start = self._now()
            for micro in micros:
                with nullcontext() if micro.is_last else turn.strategy.no_sync():
                    try:
                        self._pass(turn.module, *micro[:2], micro.global_size)
                    except ValueError as error:
                        _advise(error, micro.num_samples)
                        raise
                turn.strategy.after_backward(micro)
            self._update(turn.gradients)
            seconds.append(self._between(start, self._now()))
        return median(seconds[_WARM_UP:])

    def _compute(self, batch: Any, size: int) -> tuple[float, float, list[float], int]:
        """Return seconds of forward and backward, when gradients are ready, and bytes kept."""
        storages: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self._pass(self._step_module, batch, size, size)
        module = self._step_module
        for tensor in (*module.parameters(), *module.buffers()):  # kept in any case
            storages.pop(tensor.untyped_storage().data_ptr(), None)
        table = []
        for _ in range(_WARM_UP + self._steps):
            self._gradients.clear()
            start, middle, end = self._pass(self._step_module, batch, size, size)
            # The weight of the batch is used last; what gets no gradient is waited for to the end.
            ready = {self._extra: middle} | self._ready
            ready |= {n: end for n in range(len(self.parameters)) if n not in ready}
            self.order = list(ready)
            times = [self._between(middle, ready[n]) for n in range(len(self.parameters))]
            table.append([self._between(start, middle), self._between(middle, end), *times])
        # One pass and not the median of each number: they must go together.
        timed = sorted(table[_WARM_UP:], key=lambda row: row[0] + row[1])
        forward_s, backward_s, *ready_s = timed[len(timed) // 2]
        return forward_s, backward_s, ready_s, sum(storages.values())

    def _optimizer_s(self, batch: Any, size: int) -> float:
        seconds = []
        for _ in range(_WARM_UP + self._steps):
            _, _, start = self._pass(self._step_module, batch, size, size)
            self._update(self._gradients)
            seconds.append(self._between(start, self._now()))
        return median(seconds[_WARM_UP:])

    def _pass(self, module: Any, batch: Any, size: int, global_size: int) -> tuple[Any, Any, Any]:
        """Do what the loop does with a micro-batch; return when it began, turned and ended."""
        training = self._training
        watch.enter(Phase.FORWARD)
        self._ready.clear()
        training.logbook.begin(1, 0, size)
        start = self._now()
        with training.session.precision.autocast():
            loss = module(batch, size, global_size)
        middle = self._now()
        self._turn.scaler.scale(loss).backward()
        return start, middle, self._now()

    def _update(self, gradients: Gradients) -> None:
        """Do what the loop does between the last backward and the next step."""
        turn = self._turn
        gradients.check()
        if gradients.correct(turn.scaler):
            gradients.clip()
            with turn.schedule.scaled():
                turn.scaler.step(turn.optimizer)
            turn.scaler.update()
        gradients.clear()

    def _note(self, number: int) -> Callable[[torch.Tensor], None]:
        def note(_: torch.Tensor) -> None:
            self._ready[number] = self._now()

        return note

    def _now(self) -> Any:
        """Return a point in the time of the device."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        """Return the seconds between two points."""
        if self._device.type != "cuda":
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


def _advise(error: ValueError, size: int) -> None:
    """Say what to change if a forward may have failed for want of samples."""
    if size == 1:
        raise ValueError(
            f"{error}. A rank had a micro-batch of 1 sample; if that is too small to train on, "
            "give a larger global_batch_size or micro_batch_size, or use fewer devices"
        ) from error
