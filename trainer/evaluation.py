"""Validation, test and prediction: exact for every dataset size, at every world size.

Every sample is computed once, by one rank, outside the strategy's wrapper.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer import distributed, metrics, stopping
from trainer.contract import weigh
from trainer.data.loading import Batches
from trainer.global_loss import TaskLoss
from trainer.logbook import Logbook, full_names
from trainer.precision import Precision
from trainer.predictions import Part, join, make_folder, write_index, write_part
from trainer.seeding import Stream, seed_generators, stream_key
from trainer.task import TaskModule, WeightedLoss
from trainer.trees import to_device
from trainer.watch import Phase, watch


class EvaluationSet(NamedTuple):
    """What is evaluated under one prefix, ``val`` or ``val/<set>``."""

    batches: Batches
    metrics: metrics.MetricSet


def evaluate(
    task: TaskModule,
    sets: Mapping[str, EvaluationSet],
    split: str,
    precision: Precision,
    device: torch.device,
    seed: int,
    can_stop: bool,
) -> dict[str, float]:
    """Return the loss, the logged values and the metrics of every set, over all ranks.

    Must be called on every rank; every rank gets the values. A set without samples has no entry.

    Args:
        task: The unwrapped module. Its mode and everything else is as before afterwards.
        sets: The data and metrics by prefix.
        split: ``val`` or ``test``.
        precision: For autocast.
        device: Where ``task`` is.
        seed: Seed of the run.
        can_stop: Whether a signal may cut it short.

    Raises:
        Stop: On every rank, if one did.
    """
    values: dict[str, float] = {}
    distributed.share_buffers(task)
    task._begin_evaluation(split)
    for prefix, (batches, set_metrics) in sets.items():
        logbook = Logbook()
        metrics.reset(set_metrics)
        name = prefix.partition("/")[2] or None
        with evaluating(task, split, logbook, name):
            number = 0
            task_loss = TaskLoss(task, logbook)
            for micro in watch.loading(batches.epoch(0), then=Phase.VALIDATION):
                batch, outputs = to_device(micro.batch, device), None
                with precision.autocast():
                    if batch is not None:
                        key = stream_key(seed, Stream.EVALUATION_FORWARD, micro.position)
                        seed_generators(key, device)
                        logbook.begin(task.run.step, micro.position, micro.num_samples)
                        outputs = task.eval_forward(batch)
                    if task.global_loss and micro.is_last:  # on every rank
                        number += 1
                        key = stream_key(seed, Stream.EVALUATION_GLOBAL_LOSS, number)
                        seed_generators(key, device)
                    loss = task_loss(
                        outputs,
                        batch,
                        micro.num_samples,
                        micro.global_size,
                        is_last=micro.is_last,
                    )
                size = micro.global_size if task.global_loss else micro.num_samples
                value, weight = weigh(loss, size, needs_grad=False)
                if value is not None:
                    logbook.add_loss(value, weight, is_total=isinstance(loss, WeightedLoss))
                if batch is not None:
                    metrics.update(task, set_metrics, outputs, batch, logbook.place)
                if can_stop and stopping.all_know() and not task.global_loss:  # no collectives
                    break
            watch.enter(Phase.VALIDATION)
            if can_stop:
                stopping.check()
            found = metrics.merged(logbook.reduce(finite_loss=False), metrics.compute(set_metrics))
        values.update(full_names(prefix, found))
    values.update(task._end_evaluation(split, values))
    return values


def predict(
    task: TaskModule,
    batches: Batches,
    precision: Precision,
    device: torch.device,
    seed: int,
    output_dir: Path | None,
) -> Any:
    """Return ``task.predict`` of every sample, in dataset order, on rank 0 (None elsewhere).

    With ``output_dir``, each rank writes ``predictions-<position of the first sample>.pt`` there
    for every micro-batch instead, and the folder is returned: file names in order are the
    dataset's order, and `load_predictions` reads them. The folder is made if it is not there.

    Raises:
        ValueError: If the predictions of a batch cannot be told apart by sample, or if
            ``output_dir`` cannot be made or holds predictions already.
    """
    if output_dir is not None:
        make_folder(output_dir)
    distributed.share_buffers(task)
    mine: list[tuple[Part, Any]] = []
    task._begin_evaluation("predict")
    with evaluating(task, "predict", None):
        for micro in watch.loading(batches.epoch(0), then=Phase.VALIDATION):
            if micro.batch is None:
                continue
            seed_generators(stream_key(seed, Stream.EVALUATION_FORWARD, micro.position), device)
            with precision.autocast():
                outputs = task.predict(to_device(micro.batch, device))
            outputs = to_device(outputs, torch.device("cpu"))
            part = micro.position, micro.num_samples
            if output_dir is not None:
                write_part(output_dir, part, outputs)
                outputs = None
            mine.append((part, outputs))
    task._end_evaluation("predict", {})
    gathered = distributed.gather_object(mine)
    parts = sorted(itertools.chain.from_iterable(gathered or ()), key=lambda part: part[0])
    if output_dir is not None:
        distributed.on_first_rank(lambda: write_index(output_dir, [part for part, _ in parts]))
        return output_dir
    if gathered is None:
        return None
    return join([outputs for _, outputs in parts], [size for (_, size), _ in parts])


@contextmanager
def evaluating(
    task: TaskModule, split: str, logbook: Logbook | None, name: str | None = None
) -> Iterator[None]:
    """Run ``task`` in eval mode, without gradients; afterwards every submodule is as it was."""
    modes = [(module, module.training) for module in task.modules()]
    run = task.run
    task.eval()
    task.run = replace(run, split=split, evaluated_set=name, _logbook=logbook)
    try:
        with torch.no_grad():
            yield
    finally:
        task.run = run
        for module, training in modes:
            module.training = training
