"""The loops that a user writes by hand: what everybody else is compared with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from benchmarks.overhead.work import Work
from recipes.mnist import Digits


def compute_alone(work: Work, folder: Path) -> None:
    """Repeat forward, backward and update with one batch."""
    net, optimizer = work.start()
    batch = [part[: work.batch_size] for part in _tensors(work)]
    for _ in range(work.total_steps):
        optimizer.zero_grad()
        work.loss(net(batch), batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def loop_over_tensors(work: Work, folder: Path) -> None:
    """Take each batch out of the tensors by one index operation."""
    net, optimizer = work.start()
    tensors = _tensors(work)
    order = torch.randperm(len(tensors[0]))[: work.total_steps * work.batch_size]
    for indices in order.view(-1, work.batch_size):
        batch = [part[indices] for part in tensors]
        optimizer.zero_grad()
        work.loss(net(batch), batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def train(work: Work, folder: Path) -> None:
    """Loop over a DataLoader."""
    net, optimizer = work.start()
    for batch in itertools.islice(work.loader(), work.total_steps):
        optimizer.zero_grad()
        loss = work.loss(net(batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def train_ddp(work: Work, folder: Path) -> None:
    """Loop over a DistributedSampler's DataLoader, with DDP and the Trainer's options for it."""
    net, optimizer = work.start()
    wrapped = DistributedDataParallel(net, gradient_as_bucket_view=True)
    for batch in itertools.islice(work.loader(), work.total_steps):
        optimizer.zero_grad()
        loss = work.loss(wrapped(batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def accumulate_ddp(work: Work, folder: Path) -> None:
    """Accumulate under ``no_sync``, all micro-batches but the last of a step."""
    net, optimizer = work.start()
    wrapped = DistributedDataParallel(net, gradient_as_bucket_view=True)
    batches = iter(work.loader())
    for _ in range(work.total_steps):
        optimizer.zero_grad()
        for left in reversed(range(work.accumulation)):
            batch = next(batches)
            with wrapped.no_sync() if left else nullcontext():
                loss = work.loss(wrapped(batch), batch) / work.accumulation
                loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def evaluate(work: Work, folder: Path) -> None:
    """Compute the mean loss and the accuracy."""
    evaluate_net(work.net(), work.loader(shuffle=False), work)


def evaluate_net(net: nn.Module, loader: Any, work: Work) -> tuple[float, float]:
    """Return the mean loss and the accuracy of ``net``."""
    accuracy = MulticlassAccuracy(num_classes=10, average="micro")
    total, count = 0.0, 0
    net.eval()
    with torch.inference_mode():
        for batch in loader:
            outputs = net(batch)
            total += work.loss(outputs, batch).item() * len(batch[1])
            count += len(batch[1])
            accuracy.update(outputs, batch[1])
    return total / count, accuracy.compute().item()


def predict(work: Work, folder: Path) -> None:
    """Compute the outputs for all samples."""
    predict_with(work.net(), work.loader(shuffle=False))


def predict_with(net: nn.Module, loader: Any) -> torch.Tensor:
    """Return the outputs of ``net`` for all samples."""
    net.eval()
    with torch.inference_mode():
        return torch.cat([net(batch) for batch in loader])


def _tensors(work: Work) -> Sequence[torch.Tensor]:
    if isinstance(work.data, Digits):
        return work.data.images, work.data.labels
    assert isinstance(work.data, TensorDataset)
    return work.data.tensors
