"""Which samples a step sees, and what is drawn at random, do not depend on the processes.

Each test takes one way in which trainers get this wrong, and compares 1, 2, 3 and 4 real ranks with
each other and with a closed form or a count: resumed runs that repeat or skip samples or draw other
masks, also with another number of ranks; augmentations that repeat in ranks and workers; streams
that every rank or worker reads; samplers that are not followed or never told the epoch.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from everywhere import WORLD_SIZES, Everywhere, train
from support import (
    Regression,
    adamw,
    assert_same,
    samples,
    weights,
)
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    WeightedRandomSampler,
)

from trainer import Trainer, distributed

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> Everywhere:
    experiments = (resumed, augmented, user_samplers)
    return Everywhere(tmp_path_factory.mktemp("ranks"), experiments)


def draw() -> list[float]:
    """One number of each generator that an augmentation may use."""
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


class Augmented(Dataset[Any]):
    """A sample is its index and what it drew."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return index, torch.tensor(draw(), dtype=torch.float64)


class AugmentedTogether(Augmented):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


class AugmentedNowAndThen(Augmented):
    """Draws for some samples only, the first of them not among them, and knows the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        if index % 4 == 3:
            return super().__getitem__(index)
        return index, torch.tensor([100.0 * self.epoch + index] * 3, dtype=torch.float64)


class AugmentedStream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.samples = Augmented(count)

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[index] for index in range(len(self.samples)))


class Noticing(Regression):
    """Has dropout, and notes what it sees: by step, (index, what the sample drew, its mask).

    The mask ends with what the generators gave in the forward, as for a mix of samples.
    """

    def __init__(self) -> None:
        super().__init__(adamw)
        self.seen: dict[int, list[Any]] = {}

    def forward(self, batch: Any) -> Tensor:
        index, drawn = batch
        mask = F.dropout(torch.ones(len(index), 64).double(), training=self.training)
        rows = zip(index.tolist(), drawn.tolist(), mask.tolist(), strict=True)
        own = draw()
        seen = [(number, tuple(numbers), (*row, *own)) for number, numbers, row in rows]
        if self.training:
            self.seen.setdefault(self.run.step, []).extend(seen)
        x = samples(20).tensors[0][index]
        return super().forward((x * mask[:, :3],))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, samples(20).tensors[1][batch[0]])

    def predict(self, batch: Any) -> Any:
        return batch[1]


def steps_of(ranks: list[dict[int, list[Any]]]) -> dict[int, list[Any]]:
    """What was seen in each step, over all ranks in order."""
    steps = sorted({step for seen in ranks for step in seen})
    return {step: [one for seen in ranks for one in seen.get(step, [])] for step in steps}


# Three steps per epoch; the run stops in the middle of the second epoch.
RESUMED: dict[str, Any] = {
    "train": Augmented(17),
    "global_batch_size": 6,
    "micro_batch_size": 2,
    "shuffle": True,
}
STOPPED_AT = 4
OTHERS = dict(zip(WORLD_SIZES[1:], WORLD_SIZES[:-1], strict=True))


def resumed(folder: Path) -> dict[str, Any]:
    tasks = {"through": Noticing()}
    train(tasks["through"], folder / "through", max_epochs=3, **RESUMED)
    train(Noticing(), folder / "stopped", max_steps=STOPPED_AT, **RESUMED)
    stopped = {"own": folder / "stopped"}
    if other := OTHERS.get(distributed.world_size()):
        stopped["others"] = folder.parents[1] / str(other) / folder.name / "stopped"
    tasks["validated"] = Noticing()
    also = {"val": Augmented(5), "validate_every_n_steps": 1, "log_every_n_steps": 2}
    train(tasks["validated"], folder / "validated", max_epochs=3, **RESUMED, **also)
    for name, place in stopped.items():
        tasks[name] = Noticing()
        checkpoint = place / "checkpoints" / f"step-{STOPPED_AT:08d}"
        train(tasks[name], folder / name, max_epochs=3, resume=str(checkpoint), **RESUMED)
    return {name: (task.seen, weights(task)) for name, task in tasks.items()}


def test_samples_and_dropout_masks_are_the_same_at_every_world_size(
    everywhere: Everywhere,
) -> None:
    by_size = {
        size: steps_of([found["through"][0] for found in ranks])
        for size, ranks in everywhere.outcomes(resumed).items()
    }
    found = {
        size: [[(index, mask) for index, _, mask in seen] for seen in steps.values()]
        for size, steps in by_size.items()
    }
    assert [len(step) for step in found[1]] == [6, 6, 5] * 3
    order = [index for step in found[1] for index, _ in step]
    epochs = [order[:17], order[17:34], order[34:]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(17))] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert len({mask for step in found[1] for _, mask in step}) == 3 * 17, "a mask is drawn twice"
    assert all(steps == found[1] for steps in found.values())


def assert_goes_on(ranks: list[Any], name: str) -> None:
    """From where it was stopped the run does what the one that ran through did."""
    through, found = (steps_of([rank[kind][0] for rank in ranks]) for kind in ("through", name))
    assert found == {step: seen for step, seen in through.items() if step >= STOPPED_AT}
    for rank in ranks:
        assert_same(rank[name][1], rank["through"][1])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_run_goes_on_in_mid_epoch_as_if_it_had_not_stopped(
    world_size: int, everywhere: Everywhere
) -> None:
    assert_goes_on(everywhere.outcomes(resumed)[world_size], "own")


@pytest.mark.parametrize("world_size", OTHERS)
def test_a_run_goes_on_with_another_number_of_ranks(
    world_size: int, everywhere: Everywhere
) -> None:
    assert_goes_on(everywhere.outcomes(resumed)[world_size], "others")


def test_validating_and_logging_in_between_changes_no_number(everywhere: Everywhere) -> None:
    for found in everywhere.outcome(resumed):
        assert found["validated"][0] == found["through"][0]
        assert_same(found["validated"][1], found["through"][1])


KINDS = {
    kind.__name__: kind
    for kind in (Augmented, AugmentedTogether, AugmentedNowAndThen, AugmentedStream)
}
WORKERS = {1: (0, 2), 2: (0, 2), 3: (0,), 4: (0, 1)}  # by world size


def augmented(folder: Path) -> dict[Any, Any]:
    found = {}
    for name, workers in itertools.product(KINDS, WORKERS[distributed.world_size()]):
        task, data = Noticing(), KINDS[name](13)
        options: Any = {"global_batch_size": 6, "micro_batch_size": 2, "num_workers": workers}
        train(task, folder / f"{name} {workers}", train=data, max_epochs=2, **options)
        trainer = Trainer(accelerator="cpu", callbacks=False, logger=False, **options)
        found[name, workers] = task.seen, trainer.predict(task, predict=data)
    return found


def loaded(name: str, everywhere: Everywhere) -> dict[Any, list[Any]]:
    """What was seen in each step, by world size and number of workers."""
    return {
        (size, key[1]): list(steps_of([rank[key][0] for rank in ranks]).values())
        for size, ranks in everywhere.outcomes(augmented).items()
        for key in ranks[0]
        if key[0] == name
    }


@pytest.mark.parametrize("name", KINDS)
def test_data_is_read_once_by_whatever_ranks_and_workers(name: str, everywhere: Everywhere) -> None:
    order = [*range(13)]
    for place, steps in loaded(name, everywhere).items():
        found = [[index for index, *_ in seen] for seen in steps]
        assert found == [order[:6], order[6:12], order[12:]] * 2, place


@pytest.mark.parametrize("name", KINDS)
def test_augmentations_are_new_for_every_sample_and_the_same_for_any_ranks_and_workers(
    name: str, everywhere: Everywhere
) -> None:
    found = {
        place: [drawn for seen in steps for _, drawn, _ in seen]
        for place, steps in loaded(name, everywhere).items()
    }
    expected = found[1, 0]
    assert len(expected) == 26
    for numbers in zip(*expected, strict=True):  # of Python's, NumPy's and torch's generator
        assert len(set(numbers)) == 26, "two samples drew the same"
    for place, drawn in found.items():
        assert drawn == expected, f"ranks and workers: {place}"


@pytest.mark.parametrize("name", KINDS)
def test_augmentations_in_prediction_are_the_same_for_any_ranks_and_workers(
    name: str, everywhere: Everywhere
) -> None:
    by_size = everywhere.outcomes(augmented)
    expected = by_size[1][0][name, 0][1]
    assert len(expected.unique(dim=0)) == 13
    for first, *_ in by_size.values():
        for key in [key for key in first if key[0] == name]:
            assert_same({name: first[key][1]}, {name: expected}, 0)


# A user's samplers


class Rotating:
    """Its order follows from the epoch that it is told."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self, epoch: int) -> list[int]:
        return [(index + 4 * epoch) % self.count for index in range(self.count)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.order(self.epoch))

    def __len__(self) -> int:
        return self.count


class Unseeded(Rotating):
    """Draws from where no seed reaches."""

    def order(self, epoch: int) -> list[int]:
        return random.SystemRandom().sample(range(self.count), self.count)


class Varying(Rotating):
    """A batch sampler with batches of 1, 2, 3, 4, 1, ... samples, and without length."""

    __len__ = None  # type: ignore[assignment]

    def batches(self, epoch: int) -> list[list[int]]:
        order, sizes = iter(self.order(epoch)), itertools.cycle((1, 2, 3, 4))
        return list(iter(lambda: list(itertools.islice(order, next(sizes))), []))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches(self.epoch))


def user_loaders() -> dict[str, DataLoader[Any]]:
    data = Augmented(17)
    nested: Any = Rotating(17)
    by_chance = WeightedRandomSampler([1.0] * 16 + [20.0], 17)
    return {
        "nested": DataLoader(data, batch_sampler=BatchSampler(nested, 6, drop_last=False)),
        "varying": DataLoader(data, batch_sampler=Varying(17)),
        "unseeded": DataLoader(data, sampler=Unseeded(17), batch_size=6),
        "by chance": DataLoader(data, sampler=by_chance, batch_size=6),
    }


def user_samplers(folder: Path) -> dict[str, Any]:
    torch.manual_seed(distributed.rank() + 99)  # nobody has made the ranks' generators alike
    found = {}
    for name, loader in user_loaders().items():
        task = Noticing()
        train(task, folder / name, train=loader, micro_batch_size=2, max_epochs=3)
        found[name] = task.seen
    return found


def test_a_users_sampler_is_followed_and_told_the_epoch(everywhere: Everywhere) -> None:
    by_chance = []
    orders = [Rotating(17).order(epoch) for epoch in range(3)]
    for ranks in everywhere.outcomes(user_samplers).values():
        found = {
            name: [[one[0] for one in seen] for seen in steps_of([r[name] for r in ranks]).values()]
            for name in ranks[0]
        }
        parts = [slice(0, 6), slice(6, 12), slice(12, 17)]
        assert found["nested"] == [order[part] for order in orders for part in parts]
        assert found["varying"] == [b for epoch in range(3) for b in Varying(17).batches(epoch)]
        by_chance.append(found["by chance"])
        for name in ("unseeded", "by chance"):
            assert [len(step) for step in found[name]] == [6, 6, 5] * 3
            drawn = list(itertools.chain(*found[name]))
            epochs = [drawn[:17], drawn[17:34], drawn[34:]]
            assert epochs[0] != epochs[1] != epochs[2], "the order does not change"
            if name == "unseeded":
                assert [sorted(epoch) for epoch in epochs] == [list(range(17))] * 3
    assert by_chance == by_chance[:1] * len(WORLD_SIZES)


def test_all_ranks_end_every_training_with_the_same_weights(everywhere: Everywhere) -> None:
    everywhere.assert_equal_weights()
