"""Does the Trainer compute what a hand-written loop computes? Loss by loss, weight by weight.

    python -m benchmarks.parity               # about a minute; exit code 1 if a bound is broken
    python -m benchmarks.parity --markdown    # the table of docs/performance.md

The net of the MNIST recipe is trained by a plain loop, by hand-written DDP on 2 and 4 ranks, and by
the Trainer on 1, 2 and 4, from the same first weights and with the same global batches, of which
the last one of an epoch is smaller and leaves ranks 1 to 3 of 4 without a sample. The loops by hand
take two things from the Trainer: the order of the samples (`trainer.data.plan.epoch_order`), and
what a batch and a net are (`recipes.mnist`). Dropout is off: its masks belong to a micro-batch, and
one rank has one of 128 samples where four have four of 32.

Where two trainings do the same sums in the same order, their bits are compared, in float32. Where
they do not, they train in float64: in float32 a unit whose input is 0 but for rounding is now and
then on for one and off for the other, and from there on they part as much as after a mistake.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from benchmarks.common import at_least, scratch, table
from recipes.mnist import PIXEL_MEAN, PIXEL_STD, Batch, Digits, MnistData, MnistTask
from trainer import Trainer
from trainer.data.plan import epoch_order
from trainer.loggers import JsonlLogger

BATCH_SIZE = 128
LEARNING_RATE = 0.004
WEIGHT_DECAY = 0.01
SEED = 0

EQUAL_BITS = 0.0
ROUNDING = 1e-12  # of float64, magnified by fifty steps


@dataclass(frozen=True)
class Length:
    """How long to train: ``epochs`` times the first ``images`` of the training set."""

    images: int = 3_088
    epochs: int = 2

    @property
    def steps(self) -> int:
        """Optimizer steps, the smaller batch at the end of each epoch included."""
        return self.epochs * -(-self.images // BATCH_SIZE)


@dataclass(frozen=True)
class Outcome:
    """What a training left behind: the mean loss of every global batch, and the last weights."""

    losses: list[float]
    weights: dict[str, Tensor]


class Net(MnistTask):
    """The net of the recipe, without dropout, in float32 or float64."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(LEARNING_RATE, WEIGHT_DECAY, dropout=0.0)
        self.dtype = dtype
        self.to(dtype)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits."""
        images = batch[0].unsqueeze(1).to(self.dtype)
        logits: Tensor = self.net((images - PIXEL_MEAN) / PIXEL_STD)
        return logits


def by_plain_loop(length: Length, dtype: torch.dtype) -> Outcome:
    """Train in this process, as anybody would write it."""
    torch.set_num_threads(1)
    net, optimizer, schedule = _start(length, dtype)
    losses = []
    for images, labels in _global_batches(length):
        optimizer.zero_grad()
        loss = F.cross_entropy(net((images, labels)), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return Outcome(losses, net.state_dict())


def by_ddp(length: Length, dtype: torch.dtype, world_size: int) -> Outcome:
    """Train on ``world_size`` processes with hand-written DDP over gloo."""
    with scratch() as folder:
        args = (world_size, length, dtype, folder)
        spawn(_ddp_rank, args, nprocs=world_size)  # type: ignore[no-untyped-call]
        losses, weights = torch.load(folder / "outcome.pt")
    return Outcome(losses, weights)


def _ddp_rank(rank: int, world_size: int, length: Length, dtype: torch.dtype, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    net, optimizer, schedule = _start(length, dtype)
    ddp = nn.parallel.DistributedDataParallel(net)
    share = BATCH_SIZE // world_size
    losses = []
    for images, labels in _global_batches(length):
        count = len(labels)
        images, labels = (part[rank * share : (rank + 1) * share] for part in (images, labels))
        optimizer.zero_grad()
        if len(labels):
            # DDP averages over the ranks, so this makes the mean over the samples of all of them.
            loss = F.cross_entropy(ddp((images, labels)), labels)
            (loss * (len(labels) * world_size / count)).backward()  # type: ignore[no-untyped-call]
        else:
            loss = torch.zeros(())
            # DDP waits for this rank's gradients too: zeros, out of a sample that does not count.
            (ddp((torch.zeros(1, 28, 28), None)).sum() * 0).backward()
        optimizer.step()
        schedule.step()
        total = loss.detach().double() * len(labels)
        dist.all_reduce(total)
        losses.append(float(total) / count)
    if rank == 0:
        torch.save((losses, net.state_dict()), folder / "outcome.pt")
    dist.destroy_process_group()


def by_trainer(length: Length, dtype: torch.dtype, world_size: int) -> Outcome:
    """Train with the Trainer; the losses are those that it writes to ``metrics.jsonl``."""
    with scratch() as folder:
        trainer = Trainer(
            accelerator="cpu",
            launcher="self",
            devices=world_size,
            num_threads=1,
            global_batch_size=BATCH_SIZE,
            max_epochs=length.epochs,
            seed=SEED,
            log_every_n_steps=1,
            run_dir=str(folder),
            callbacks=False,
            logger={"jsonl": JsonlLogger()},
        )
        task = Net(dtype)
        trainer.fit(task, train=_first_images(length))
        events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Outcome([event["train/loss"] for event in events], task.state_dict())


def _start(
    length: Length, dtype: torch.dtype
) -> tuple[Net, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(SEED)
    net = Net(dtype)
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, length.steps)
    return net, optimizer, schedule


def _first_images(length: Length) -> Digits:
    digits = MnistData().train
    return Digits(digits.images[: length.images], digits.labels[: length.images])


def _global_batches(length: Length) -> Iterator[Batch]:
    digits = _first_images(length)
    for epoch in range(length.epochs):
        order = epoch_order(len(digits), SEED, epoch, shuffle=True)
        for start in range(0, len(order), BATCH_SIZE):
            indices = order[start : start + BATCH_SIZE]
            yield digits.images[indices], digits.labels[indices]


@dataclass(frozen=True)
class Comparison:
    """How far one training is from another.

    Attributes:
        what: Which two.
        loss: The largest difference between the losses of a step.
        weight: The largest difference between two weights at the end.
        bits: Whether all losses and weights are the same to the last bit.
        bound: What neither difference may exceed.
    """

    what: str
    loss: float
    weight: float
    bits: bool
    bound: float

    @property
    def holds(self) -> bool:
        """Whether the bound is kept; NaN keeps none."""
        if self.bound == EQUAL_BITS:
            return self.bits
        return self.loss <= self.bound and self.weight <= self.bound


def compare(what: str, one: Outcome, other: Outcome, bound: float) -> Comparison:
    """Compare step by step and weight by weight."""
    assert one.weights.keys() == other.weights.keys()
    assert len(one.losses) == len(other.losses)
    losses = [torch.tensor(it.losses, dtype=torch.float64) for it in (one, other)]
    pairs = [losses, *((one.weights[name], other.weights[name]) for name in one.weights)]
    # Torch's maximum, and not Python's, is NaN where one of the numbers is.
    loss, *weights = torch.stack([(a - b).abs().max().double() for a, b in pairs])
    return Comparison(
        what,
        loss=float(loss),
        weight=float(torch.stack(weights).max()),
        bits=all(torch.equal(a, b) for a, b in pairs),
        bound=bound,
    )


def comparisons(length: Length) -> list[Comparison]:
    """Train by all means and compare."""
    single, double = torch.float32, torch.float64
    found = [
        compare(
            "Trainer, 1 process : plain loop, float32",
            by_trainer(length, single, 1),
            by_plain_loop(length, single),
            EQUAL_BITS,
        ),
        compare(  # a + b = b + a; the order among more ranks depends on what a bucket holds
            "Trainer : hand-written DDP, 2 ranks, float32",
            by_trainer(length, single, 2),
            by_ddp(length, single, 2),
            EQUAL_BITS,
        ),
    ]
    plain = by_plain_loop(length, double)
    for ranks in (2, 4):
        for who, train in {"hand-written DDP": by_ddp, "Trainer": by_trainer}.items():
            what = f"{who}, {ranks} ranks : plain loop, float64"
            found.append(compare(what, train(length, double, ranks), plain, ROUNDING))
    return found


def report(found: Sequence[Comparison], markdown: bool) -> str:
    """Return the table of the comparisons."""
    header = ["compared", "loss of a step", "weight", "equal bits", "bound", "holds"]
    rows = [
        [
            one.what,
            f"{one.loss:.1e}",
            f"{one.weight:.1e}",
            "yes" if one.bits else "no",
            "equal bits" if one.bound == EQUAL_BITS else f"{one.bound:.0e}",
            "yes" if one.holds else "NO",
        ]
        for one in found
    ]
    return table(header, rows, markdown)


def main() -> int:
    """Compare, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument(
        "--images", type=at_least(1), default=Length.images, help="of the training set"
    )
    parser.add_argument(
        "--epochs", type=at_least(1), default=Length.epochs, help="over these images"
    )
    given = parser.parse_args()
    length = Length(given.images, given.epochs)
    with redirect_stdout(sys.stderr):  # what the Trainer says is no part of the table
        found = comparisons(length)
    print(f"Largest differences over {length.steps} steps and all weights:\n")
    print(report(found, given.markdown))
    return 0 if all(one.holds for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
