"""The parts of the measurement, by the name that chooses them on the command line."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from benchmarks.nets import ConvTask, Graded, TextTask, TwoLayers
from benchmarks.overhead import by_hand, others, ours
from benchmarks.overhead.work import Work
from recipes.language_model import PADDING, PythonTopics, collate
from recipes.mnist import Digits, MnistData
from trainer import TaskModule

Contestant = Callable[[Work, Path], None]

REFERENCE = "hand-written loop"
EVERYTHING = "Trainer, everything on"
BARE = "Trainer, no callbacks or loggers"
LIGHTNING = "Lightning, defaults"
LIGHTNING_BARE = "Lightning, no extras"

PACKAGES = {"Ignite": "ignite", "Accelerate": "accelerate"}  # the others come with the project


@dataclass(frozen=True)
class Part:
    """One table.

    Attributes:
        ranks: How many processes do it together.
        work: Builds what they do.
        contestants: Who does it.
        to_the_end: Whether the clock runs until a contestant returns, with what follows the last
            batch (the metrics, the predictions in one piece); else until the last step.
    """

    ranks: int
    work: Callable[[], Work]
    contestants: Mapping[str, Contestant]
    to_the_end: bool = False

    @property
    def installed(self) -> dict[str, Contestant]:
        """The contestants that can be imported."""
        return {
            name: contestant
            for name, contestant in self.contestants.items()
            if importlib.util.find_spec(PACKAGES.get(name, "torch"))
        }


TRAINING: dict[str, Contestant] = {
    REFERENCE: by_hand.train,
    EVERYTHING: ours.train,
    LIGHTNING_BARE: partial(others.lightning, **others.NO_EXTRAS),
    LIGHTNING: others.lightning,
}
TINY_TRAINING: dict[str, Contestant] = {
    "compute alone": by_hand.compute_alone,
    "loop over tensors": by_hand.loop_over_tensors,
    REFERENCE: by_hand.train,
    EVERYTHING: ours.train,
    BARE: partial(ours.train, **ours.NO_EXTRAS),
    "Fabric": others.fabric,
    "Ignite": others.ignite,
    "Accelerate": others.accelerate,
    LIGHTNING_BARE: partial(others.lightning, **others.NO_EXTRAS),
    LIGHTNING: others.lightning,
}
DDP: dict[str, Contestant] = {**TRAINING, REFERENCE: by_hand.train_ddp}
TINY_DDP: dict[str, Contestant] = {
    REFERENCE: by_hand.train_ddp,
    EVERYTHING: ours.train,
    BARE: partial(ours.train, **ours.NO_EXTRAS),
    "Fabric": others.fabric,
    "Accelerate": others.accelerate,
    LIGHTNING_BARE: partial(others.lightning, **others.NO_EXTRAS),
    LIGHTNING: others.lightning,
}
ACCUMULATION: dict[str, Contestant] = {**TRAINING, REFERENCE: by_hand.accumulate_ddp}
EVALUATION: dict[str, Contestant] = {
    REFERENCE: by_hand.evaluate,
    "Trainer": ours.evaluate,
    "Fabric": others.fabric_evaluate,
    "Ignite": others.ignite_evaluate,
    "Accelerate": others.accelerate_evaluate,
    LIGHTNING_BARE: partial(others.lightning_evaluate, **others.NO_EXTRAS),
    LIGHTNING: others.lightning_evaluate,
}
PREDICTION: dict[str, Contestant] = {
    REFERENCE: by_hand.predict,
    "Trainer": ours.predict,
    "Fabric": others.fabric_predict,
    "Accelerate": others.accelerate_predict,
    LIGHTNING_BARE: partial(others.lightning_predict, **others.NO_EXTRAS),
    LIGHTNING: others.lightning_predict,
}


def tiny(
    name: str = "tiny MLP, batch 32",
    kind: type[TaskModule] = TwoLayers,
    steps: tuple[int, int] = (60, 460),
    accumulation: int = 1,
) -> Work:
    """Return the training of two small layers."""
    inputs = torch.randn(32 * accumulation * (steps[1] + 1), 32)
    data = TensorDataset(inputs, torch.randint(10, (len(inputs),)))
    return Work(name, kind, mean_loss, data, 32, steps, accumulation)


def mnist() -> Work:
    """Return the training of the MNIST recipe's net on its images."""
    digits = MnistData().train
    data = TensorDataset(digits.images, digits.labels)
    return Work("MNIST net, batch 128", ConvTask, mean_loss, data, 128, (60, 160))


def text() -> Work:
    """Return the training of the language model recipe's net on its text."""
    data = PythonTopics().train
    return Work("language model, batch 8", TextTask, byte_loss, data, 8, (60, 110), collate=collate)


def ready(work: Work) -> Work:
    """Return ``work`` with a dataset that fetches a batch in one call, for everybody."""
    assert isinstance(work.data, TensorDataset)
    return replace(
        work,
        name=f"{work.name}, ready batches",
        data=Digits(*work.data.tensors),
        collate=_as_it_is,
    )


def mean_loss(outputs: Tensor, batch: Any) -> Tensor:
    """Return the mean cross-entropy of a classifier."""
    return F.cross_entropy(outputs, batch[1])


def byte_loss(outputs: Tensor, batch: Any) -> Tensor:
    """Return the mean cross-entropy per byte."""
    targets = batch.text[:, 1:]
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=PADDING)


def _as_it_is(batch: Any) -> Any:
    return batch


PARTS: dict[str, Part] = {
    "tiny": Part(1, tiny, TINY_TRAINING),
    "tiny-ready": Part(1, lambda: ready(tiny()), TINY_TRAINING),
    "mnist": Part(1, mnist, TRAINING),
    "mnist-ready": Part(1, lambda: ready(mnist()), TRAINING),
    "text": Part(1, text, TRAINING),
    "evaluate": Part(
        1, lambda: tiny("evaluation, tiny MLP, batch 32", Graded), EVALUATION, to_the_end=True
    ),
    "predict": Part(1, lambda: tiny("prediction, tiny MLP, batch 32"), PREDICTION, to_the_end=True),
    "tiny-ddp": Part(2, tiny, TINY_DDP),
    "mnist-ddp": Part(2, mnist, DDP),
    "text-ddp": Part(2, text, DDP),
    "accumulate-ddp": Part(
        2,
        lambda: tiny("tiny MLP, 8 batches of 32 per step", steps=(60, 110), accumulation=8),
        ACCUMULATION,
    ),
}
