"""Training data over real ranks: who loads what, and what it adds up to."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from support import (
    Regression,
    assert_same,
    fit,
    fit_on,
    on_ranks,
    samples,
    train_by_hand,
    weights,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    default_collate,
)

from trainer import Callback, DataModule, Trainer, distributed
from trainer.data import orders

pytestmark = pytest.mark.timeout(60)


class Recorder(Regression):
    """Keeps, per step, which samples this rank trained on; batches are indices."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, list[int]] = {}

    def forward(self, batch: Any) -> Any:
        self.seen.setdefault(self.run.step, []).extend(batch.tolist())
        return super().forward((torch.ones(len(batch), 3, dtype=torch.float64),))

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.mean()


class Loaded(Dataset):
    """Knows what was loaded here."""

    def __init__(self, size: int, bad: int = -1) -> None:
        self.size, self.bad, self.loaded = size, bad, []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if index == self.bad:
            raise OSError(f"cannot read file {index}")
        self.loaded.append(index)
        return index


class FetchedTogether(Loaded):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


class Unseeded:
    """A sampler that no seed reaches; keeps what it drew."""

    def __init__(self, size: int) -> None:
        self.size, self.drawn = size, []

    def __iter__(self) -> Any:
        order = list(range(self.size))
        random.SystemRandom().shuffle(order)
        self.drawn.append(order)
        return iter(order)

    def __len__(self) -> int:
        return self.size


class VaryingBatches(Unseeded):
    """A batch sampler without length: batches of 1, 2, 3, 4, 1, 2, ... samples."""

    __len__ = None

    def __iter__(self) -> Any:
        order = super().__iter__()
        for size in itertools.cycle((1, 2, 3, 4)):
            if not (batch := list(itertools.islice(order, size))):
                return
            yield batch


def steps_of(every: list[dict[int, list[int]]]) -> list[list[int]]:
    """The samples of each step, over all ranks in order."""
    count = 1 + max(step for seen in every for step in seen)
    return [[i for seen in every for i in seen.get(step, [])] for step in range(count)]


def train_on_user_loaders(folder: Path) -> Any:
    found = []
    for kind, workers in ((Unseeded, 0), (Unseeded, 2), (VaryingBatches, 0)):
        sampler, data = kind(19), Loaded(19)
        own: Any = (
            {"sampler": sampler, "batch_size": 5}
            if kind is Unseeded
            else {"batch_sampler": sampler}
        )
        task = Recorder()
        loader = DataLoader(data, num_workers=workers, **own)
        result = fit(task, folder, train=loader, micro_batch_size=2, max_epochs=2)
        found.append((task.seen, data.loaded, sampler.drawn, result.step, result.samples))
    return found


def test_a_users_sampler_says_what_a_global_batch_is(tmp_path: Path) -> None:
    sizes = [[5, 5, 5, 4], [5, 5, 5, 4], [1, 2, 3, 4, 1, 2, 3, 3]]
    for world_size in (2, 3):
        every = on_ranks(world_size, train_on_user_loaders, tmp_path)
        for number, ranks in enumerate(zip(*every, strict=True)):
            seen, loaded, drawn, steps, counts = zip(*ranks, strict=True)
            # Iterated once per epoch, on rank 0 only, and followed in order.
            assert [len(orders) for orders in drawn] == [2] + [0] * (world_size - 1)
            found = steps_of(list(seen))
            assert [i for step in found for i in step] == [i for order in drawn[0] for i in order]
            assert [len(step) for step in found] == sizes[number] * 2
            assert set(steps) == {len(found)}
            assert set(counts) == {2 * 19}
            # No sample is loaded on two ranks, or twice. (Workers keep their count to themselves.)
            if number != 1:
                everything = sorted(i for part in loaded for i in part)
                assert everything == sorted([*range(19), *range(19)])


def train_on_many_batches(folder: Path) -> Any:
    orders.SHARED_BATCHES = 4
    task = Recorder()
    endless = ([i % 9, (i + 1) % 9, (i + 2) % 9] for i in itertools.count())
    loader = DataLoader(
        Loaded(9), batch_sampler=BatchesOf(endless), num_workers=2, prefetch_factor=2
    )
    fit(task, folder, train=loader, micro_batch_size=1, max_steps=23)
    return task.seen


class BatchesOf:
    def __init__(self, found: Any) -> None:
        self.found = found

    def __iter__(self) -> Any:
        return iter(self.found)


def test_loader_workers_that_run_ahead_by_different_amounts_do_not_hang(tmp_path: Path) -> None:
    # Rank 0 has two micro-batches per step and rank 1 one: it asks for batches much earlier.
    found = steps_of(on_ranks(2, train_on_many_batches, tmp_path))
    assert found == [[i % 9, (i + 1) % 9, (i + 2) % 9] for i in range(23)]


class Ordered(DataModule):
    def __init__(self, data: Any) -> None:
        self.data = data
        self.asked: list[int] = []

    def train_dataset(self) -> Any:
        return self.data

    def train_indices(self, seed: int, epoch: int) -> list[int]:
        self.asked.append(epoch)
        order = list(range(7))
        random.SystemRandom().shuffle(order)
        return order


def train_in_own_order(folder: Path) -> Any:
    task, data = Recorder(), Ordered(Loaded(7))
    quiet: Any = {"callbacks": False, "logger": False, "accelerator": "cpu", "run_dir": str(folder)}
    Trainer(global_batch_size=4, max_epochs=2, **quiet).fit(task, data)
    return task.seen, data.asked


def test_an_own_order_is_asked_for_on_rank_0(tmp_path: Path) -> None:
    every = on_ranks(2, train_in_own_order, tmp_path)
    found = steps_of([seen for seen, _ in every])
    assert [len(step) for step in found] == [4, 3, 4, 3]
    for epoch in (found[:2], found[2:]):
        assert sorted(i for step in epoch for i in step) == list(range(7))
    assert set(every[0][1]) == {0, 1}
    assert every[1][1] == []


class Stream(IterableDataset):
    """The samples of ``support.samples``, one by one or in ready batches."""

    def __init__(self, count: int, batch: int | None = None) -> None:
        self.count, self.batch = count, batch

    def __iter__(self) -> Any:
        data = samples(self.count)
        if self.batch is None:
            return iter(data)
        return (data[i : i + self.batch] for i in range(0, self.count, self.batch))


class UnevenShards(Stream):
    """Rank 0 has most of it and the last rank nothing; loader workers share a rank's part."""

    def shard(self, rank: int, world_size: int) -> Any:
        parts = [[], *([] for _ in range(world_size - 1))]
        for index in range(self.count):
            parts[0 if index % 5 else min(1, world_size - 1)].append(index)
        data = samples(self.count)
        return (data[index] for index in parts[rank])


def train_on_streams(folder: Path) -> Any:
    found = []
    for workers, data in itertools.product((0, 2), (Stream(23), Stream(23, batch=6))):
        task = Regression()
        loader: Any = data
        own: dict[str, Any] = {"num_workers": workers, "global_batch_size": 6}
        if data.batch is not None:
            loader, own = DataLoader(data, batch_size=None, num_workers=workers), {}
        result = fit(task, folder, train=loader, max_epochs=2, micro_batch_size=2, **own)
        found.append((result.step, result.epoch, result.samples, task.state_dict()))
    task = Regression()
    loader = DataLoader(Stream(23), batch_size=6, num_workers=1)
    result = fit(task, folder, train=loader, max_epochs=2)
    return [*found, (result.step, result.epoch, result.samples, task.state_dict())]


def test_streams_train_like_the_dataset_that_they_are(tmp_path: Path) -> None:
    expected = Regression()
    train_by_hand(expected, samples(23), global_batch_size=6, epochs=2)
    for ranks in on_ranks(3, train_on_streams, tmp_path):
        for steps, epochs, count, state in ranks:
            assert (steps, epochs, count) == (8, 2, 46)
            assert_same(state, expected)


def train_on_shards(folder: Path) -> Any:
    task = Regression()
    result = fit(task, folder, train=UnevenShards(23), max_epochs=1, global_batch_size=6)
    return result.step, result.samples, task.state_dict()


def test_uneven_shards_end_together_with_the_right_weights(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    every = on_ranks(3, train_on_shards, tmp_path)
    assert capfd.readouterr().out.count("UnevenShards is asked for its shards") == 1
    # An even share of 6 on 3 ranks is 2: a step has two samples of each shard while they last.
    shards = [[i for i in range(23) if i % 5], [i for i in range(23) if i % 5 == 0]]
    parts = [[shard[i : i + 2] for shard in shards] for i in range(0, len(shards[0]), 2)]
    expected = Regression()
    optimizer = expected.configure_optimizers()
    x, y = samples(23).tensors
    for part in parts:
        index = [i for of_rank in part for i in of_rank]
        optimizer.zero_grad()
        expected.loss(expected((x[index], y[index])), (x[index], y[index])).backward()
        optimizer.step()
    for steps, count, state in every:
        assert (steps, count) == (len(parts), 23)
        assert_same(state, expected)


@pytest.mark.parametrize(("kind", "workers"), [(Loaded, 1), (FetchedTogether, 0)])
def test_an_item_that_raises_on_one_rank_ends_the_run(
    tmp_path: Path, kind: Any, workers: int
) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match=rf"{kind.__name__}\[7\] raised OSError: cannot read fil"):
        fit_on(
            2,
            Recorder(),
            tmp_path,
            train=kind(8, bad=7),
            num_workers=workers,
            global_batch_size=4,
            max_epochs=1,
        )
    assert time.monotonic() - started < 25


class Workers(Callback):
    """Notes which loader workers run when a validation ends, and where it is to stop."""

    def __init__(self, fails: bool = False) -> None:
        self.running: list[set[int | None]] = []
        self.fails = fails

    def on_validation_end(self, run: Any, metrics: Any) -> None:
        self.running.append({child.pid for child in multiprocessing.active_children()})
        if self.fails:
            raise OSError("no space left")


@pytest.mark.parametrize("kind", ["indexed", "stream"])
def test_loader_workers_end_with_what_they_were_started_for(tmp_path: Path, kind: str) -> None:
    data: Any = samples(8) if kind == "indexed" else Stream(8)
    workers, failing = Workers(), Workers(fails=True)
    options: Any = {"num_workers": 1, "global_batch_size": 4, "accelerator": "cpu"}
    own: Any = {"train": data, "val": data, "validate_every_n_steps": 1, "max_steps": 5, **options}
    gc.collect()
    gc.disable()  # nothing may wait for it
    try:
        fit(Regression(), tmp_path / "1", callbacks=[workers], num_sanity_val_steps=1, **own)
        assert multiprocessing.active_children() == []
        with pytest.raises(OSError, match="no space"):
            fit(Regression(), tmp_path / "2", callbacks=[failing], **own)
        assert multiprocessing.active_children() == []
        trainer = Trainer(**options, callbacks=False, logger=False)
        trainer.validate(Regression(), val=data)
        trainer.predict(Regression(), predict=data)
        assert multiprocessing.active_children() == []
    finally:
        gc.enable()
    if kind == "indexed":  # one that trains and one that validates, again and again
        assert len(workers.running) == 5
        assert len(set.union(*workers.running)) == 2


class Prepared(DataModule):
    def __init__(self, folder: Path, fails: bool) -> None:
        self.folder, self.fails = folder, fails

    def prepare(self) -> None:
        with (self.folder / "log").open("a") as file:
            file.write(f"prepare on {distributed.rank()}\n")
        if self.fails:
            raise OSError("the mirror is down")

    def train_dataset(self) -> Any:
        with (self.folder / "log").open("a") as file:
            file.write("dataset\n")
        return samples(4)


def test_data_is_prepared_once_before_it_is_read(tmp_path: Path) -> None:
    options: Any = {"callbacks": False, "logger": False, "accelerator": "cpu", "max_steps": 1}
    trainer = Trainer(devices=2, run_dir=str(tmp_path / "run"), **options)
    trainer.fit(Regression(), Prepared(tmp_path, fails=False))
    log = (tmp_path / "log").read_text().splitlines()
    assert log == ["prepare on 0", "dataset", "dataset"]
    with pytest.raises(OSError, match="the mirror is down"):
        trainer.fit(Regression(), Prepared(tmp_path, fails=True))
    assert (tmp_path / "log").read_text().splitlines() == [*log, "prepare on 0"]


def refused(run: Any) -> str:
    """The error that every rank raises alike."""
    try:
        run()
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def make_mistakes(folder: Path) -> list[str]:
    def go(train: Any, **options: Any) -> Any:
        return lambda: fit(Regression(), folder, train=train, max_epochs=1, **options)

    return [
        refused(go(samples(5), global_batch_size=2)),
        refused(go(DataLoader(samples(5), batch_size=2))),
        refused(go(Stream(0), global_batch_size=4)),
        refused(go(DataLoader(Stream(0, batch=3), batch_size=None))),
        refused(go(UnevenShards(0), global_batch_size=4)),
        refused(go(TensorDataset(torch.ones(0, 3)))),
        refused(go(DataLoader(samples(5), batch_sampler=BatchSampler(range(0), 5, False)))),
        refused(go(samples(5), global_batch_size=8, drop_last=True)),
    ]


def test_mistakes_are_told_on_every_rank(tmp_path: Path) -> None:
    every = on_ranks(3, make_mistakes, tmp_path)
    assert every[1:] == every[:-1]
    size, loader, *streams, empty, sampler, dropped = every[0]
    assert "global_batch_size=2 is smaller than the world size of 3" in size
    assert "lower devices to at most 2" in size
    assert loader == size
    assert len(streams) == 3
    assert all("the training stream yields no sample in epoch 0" in text for text in streams)
    assert "the training set is empty: its length is 0" in empty
    assert "the training DataLoader yields no batch: 5 samples" in sampler
    assert "an epoch has no global batch: the training set has 5 samples" in dropped


class DifferentOnEachRank(DataModule):
    def train_dataset(self) -> Any:
        return samples(8 + distributed.rank())


def test_data_that_differs_between_ranks_is_an_error(tmp_path: Path) -> None:
    trainer = Trainer(devices=2, accelerator="cpu", max_steps=1, run_dir=str(tmp_path))
    with pytest.raises(ValueError, match="the train data has 8, 9 samples on the ranks"):
        trainer.fit(Regression(), DifferentOnEachRank())


def shuffled(_: Any) -> Any:
    """Two epochs of a user's loader that shuffles by the global generator."""
    loader = DataLoader(samples(12), batch_size=6, shuffle=True)
    task = Regression()
    with TemporaryDirectory() as folder:
        fit(task, Path(folder), train=loader, max_epochs=3, micro_batch_size=2)
    return weights(task)


def test_an_unseeded_loader_has_the_same_order_at_any_world_size() -> None:
    alone = shuffled(None)
    for found in on_ranks(2, shuffled, None):
        assert_same(found, alone)


class Augmented(Dataset):
    """Adds noise that it draws from all global generators."""

    def __init__(self, count: int) -> None:
        self.data = samples(count)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + torch.randn(3, dtype=x.dtype) + random.random(), y + np.random.rand()


class AugmentedTogether(Augmented):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class AugmentedStream(IterableDataset):
    """Shuffles and adds noise as it goes, and can be taken up again where it was."""

    def __init__(self, count: int) -> None:
        self.data, self.state = Augmented(count), None

    def __iter__(self) -> Any:
        if self.state is None:
            self.state = {"order": torch.randperm(len(self.data)).tolist(), "done": 0}
        while self.state["done"] < len(self.data):
            self.state["done"] += 1
            yield self.data[self.state["order"][self.state["done"] - 1]]
        self.state = None

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class ForgetfulStream(IterableDataset):
    def __init__(self, count: int) -> None:
        self.data = Augmented(count)

    def __iter__(self) -> Any:
        return (self.data[index] for index in torch.randperm(len(self.data)).tolist())


def mixing(batch: list[Any]) -> Any:
    x, y = default_collate(batch)
    share = random.random()
    return share * x + (1 - share) * x.flip(0), y


def varying_loader(count: int) -> Any:
    """Batches of different sizes, drawn from a generator that goes on from epoch to epoch."""
    sampler = RandomSampler(range(count), generator=torch.Generator().manual_seed(3))
    return DataLoader(Augmented(count), batch_sampler=ByOneToFour(sampler))


class ByOneToFour:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        order = iter(self.sampler)
        for size in itertools.cycle((4, 3, 2, 1)):
            if not (batch := list(itertools.islice(order, size))):
                return
            yield batch


class Owning(Augmented):
    """Draws from generators of its own, which each process has a copy of."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.rng, self.transforms = np.random.default_rng(0), [random.Random(0)]

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + self.rng.random() + self.transforms[0].random(), y


KINDS: dict[str, Any] = {
    "samples": Augmented,
    "own": Owning,
    "together": AugmentedTogether,
    "collated": lambda count: DataLoader(Augmented(count), 6, shuffle=True, collate_fn=mixing),
    "varying": varying_loader,
    "stream": AugmentedStream,
    "forgetful stream": ForgetfulStream,
}


def train_on_chance(folder: Path, **options: Any) -> Any:
    """Weights and validation loss by kind of data."""
    found = {}
    for name, make in KINDS.items():
        torch.manual_seed(distributed.rank())  # what was drawn before plays no part
        data, own = make(23), {}
        if not isinstance(data, DataLoader):
            own = {"global_batch_size": 6, "num_workers": distributed.world_size() - 1}
        task = Regression()
        result = fit(
            task,
            folder / name,
            train=data,
            val=Owning(5) if name == "own" else Augmented(5),
            micro_batch_size=2,
            max_epochs=2,
            **{"shuffle": True, **own, **options},
        )
        found[name] = {**weights(task), "val/loss": torch.tensor(result.metrics["val/loss"])}
    return found


def train_and_stop(folder: Path) -> Any:
    found = train_on_chance(folder / "whole")
    train_on_chance(folder / "stopped", max_steps=6, num_workers=0)
    return found


def test_what_data_draws_is_the_same_at_any_world_size_and_after_a_resume(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    alone = train_on_chance(tmp_path / "alone")
    for found in on_ranks(2, train_and_stop, tmp_path):
        assert_same(found, alone)
    capfd.readouterr()
    assert_same(train_on_chance(tmp_path / "stopped", resume="auto"), alone)
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("resume: read")]
    assert len(said) == 1
    assert "past the first 2 global batches of epoch 1" in said[0]
    assert "give ForgetfulStream state_dict and load_state_dict" in said[0]
