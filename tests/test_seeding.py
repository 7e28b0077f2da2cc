"""One seed for the run, one stream for every micro-batch."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from support import Regression, assert_equal_bits, fit, samples

from trainer import Trainer, seed_everything
from trainer.seeding import seed_stream

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_all_generators_are_seeded() -> None:
    seed_everything(3)
    first = draw()
    assert draw() != first
    seed_everything(3)
    assert draw() == first
    seed_everything(2**40 + 3)
    assert draw() != first


def test_a_trainer_seeds_when_it_is_constructed() -> None:
    Trainer(seed=5, max_steps=1)
    first = draw()
    Trainer(seed=5, max_steps=1)
    assert draw() == first


def test_a_stream_is_a_function_of_seed_step_and_number() -> None:
    def stream(*key: int) -> list[float]:
        seed_stream(CPU, *key)
        return torch.rand(4).tolist()

    keys = [(seed, step, number) for seed in (0, 1) for step in range(9) for number in range(9)]
    streams = {key: tuple(stream(*key)) for key in keys}
    assert len(set(streams.values())) == len(keys)
    assert tuple(stream(1, 2, 3)) == streams[1, 2, 3]


def test_another_seed_is_another_order(tmp_path: Path) -> None:
    found = []
    for number, seed in enumerate((1, 1, 2)):
        task = Regression()
        options = {"global_batch_size": 4, "max_epochs": 2, "shuffle": True, "seed": seed}
        fit(task, tmp_path / str(number), train=samples(13), **options)
        found.append(task)
    assert_equal_bits(found[0], found[1])
    assert not torch.equal(found[0].net[0].weight, found[2].net[0].weight)
