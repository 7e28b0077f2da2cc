"""Validation, test and prediction: exact for every dataset size, at every world size.

Every sample is computed once, by one rank, outside the strategy's wrapper.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from trainer.seeding import Stream, seed_generators, stream_key
from trainer.task import TaskModule, WeightedLoss
from trainer.trees import has_rows, joined, to_device
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
    dataset's order. The folder is made if it is not there.

    Raises:
        ValueError: If the predictions of a batch cannot be told apart by sample, or if
            ``output_dir`` cannot be made or holds predictions already.
    """
    if output_dir is not None:
        _make_output_dir(output_dir)
    distributed.share_buffers(task)
    mine: list[tuple[int, int, Any]] = []
    task._begin_evaluation("predict")
    with evaluating(task, "predict", None):
        for micro in watch.loading(batches.epoch(0), then=Phase.VALIDATION):
            if micro.batch is None:
                continue
            seed_generators(stream_key(seed, Stream.EVALUATION_FORWARD, micro.position), device)
            with precision.autocast():
                outputs = task.predict(to_device(micro.batch, device))
            outputs = to_device(outputs, torch.device("cpu"))
            if output_dir is None:
                mine.append((micro.position, micro.num_samples, outputs))
            else:
                torch.save(outputs, output_dir / f"predictions-{micro.position:012d}.pt")
    task._end_evaluation("predict", {})
    if output_dir is not None:
        distributed.barrier()
        return output_dir
    gathered = distributed.gather_object(mine)
    if gathered is None:
        return None
    parts = sorted((part for rank in gathered for part in rank), key=lambda part: part[0])
    return join([part for *_, part in parts], [size for _, size, _ in parts])


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


def _make_output_dir(folder: Path) -> None:
    """Make the folder on every machine, before any rank writes into it."""
    distributed.on_first_rank(lambda: _check_has_none(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"output_dir {folder} cannot be made: {error.strerror}; give a folder that can be "
            "written"
        ) from error


def _check_has_none(folder: Path) -> None:
    if folder.is_dir() and any(folder.glob("predictions-*.pt")):
        raise ValueError(
            f"output_dir {folder} holds predictions already, which would be mixed with the new "
            "ones; give another folder or remove them"
        )


def join(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Concatenate the predictions for micro-batches of ``sizes`` samples into those for all.

    A list has one entry per sample, even where these have as many entries themselves.

    Raises:
        ValueError: If anything does not belong to samples.
    """
    if not parts:
        return []
    return joined(parts, sizes, _join_leaves, "the prediction", fields_in_lists=False)


def _join_leaves(parts: Sequence[Any], sizes: Sequence[int], path: str) -> Any:
    first = parts[0]
    if all(part is None for part in parts):
        return None
    if isinstance(first, torch.Tensor) and all(map(has_rows, parts, sizes)):
        return torch.cat(list(parts))
    shape = f" of shape {tuple(first.shape)}" if isinstance(first, torch.Tensor) else ""
    raise ValueError(
        f"predict returned a {type(first).__name__}{shape} for a batch of {sizes[0]} samples; it "
        "must return tensors whose first dimension is the samples, lists with one entry per "
        "sample, or tuples or dicts of these"
    )
