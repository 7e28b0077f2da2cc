"""One seed for the run, one stream for every micro-batch."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import Regression, assert_equal_bits, fit, samples

from trainer import Trainer, seed_everything
from trainer.seeding import OwnStream, Stream, seed_generators, stream_key


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_all_generators_are_seeded() -> None:
    seed_everything(3)
    first = draw()
    assert draw() != first
    seed_everything(3)
    assert draw() == first
    seed_everything(2**80 + 4)
    assert draw() != first


def test_a_trainer_seeds_when_it_is_constructed() -> None:
    Trainer(seed=5, max_steps=1)
    first = draw()
    Trainer(seed=5, max_steps=1)
    assert draw() == first


def test_a_stream_is_a_function_of_its_key() -> None:
    def stream(*key: Any) -> tuple[float, float, float]:
        seed_generators(stream_key(*key))
        return draw()

    uses = (Stream.FORWARD, Stream.UPDATE)
    keys: list[Any] = list(itertools.product((0, 1), uses, range(9), range(9)))
    streams = {key: stream(*key) for key in keys}
    for of_generator in zip(*streams.values(), strict=True):
        assert len(set(of_generator)) == len(keys)
    assert stream(1, Stream.FORWARD, 2, 3) == streams[1, Stream.FORWARD, 2, 3]


def test_no_two_uses_share_a_stream() -> None:
    places = [(), *((a,) for a in range(30)), *itertools.product(range(30), range(30))]
    keys = {stream_key(seed, use, *place) for seed in (0, 1) for use in Stream for place in places}
    assert len(keys) == 2 * len(Stream) * len(places)
    assert all(0 <= key < 2**63 for key in keys)
    # A run that goes on with a newer version needs the same streams.
    assert [use.value for use in Stream] == list(range(len(Stream)))
    assert stream_key(0, Stream.EPOCH_ORDER) == 6017775124710473527
    assert stream_key(3, Stream.SAMPLE, 1, 2) == 2804849083209431636


def test_an_own_stream_is_drawn_in_pieces_that_nobody_notices() -> None:
    seed_generators(7)
    whole = [draw() for _ in range(4)]
    seed_generators(1)
    outside = [draw() for _ in range(3)]
    seed_generators(1)
    own = OwnStream(7)
    found, between = [], [draw()]
    for count in (1, 3):
        with own:
            found += [draw() for _ in range(count)]
        between.append(draw())
    assert found == whole
    assert between == outside


def test_an_own_stream_ends_with_an_error_too() -> None:
    seed_generators(1)
    expected = draw()
    seed_generators(1)
    with pytest.raises(KeyError), OwnStream(7):
        raise KeyError(draw())
    assert draw() == expected


def test_another_seed_is_another_order(tmp_path: Path) -> None:
    found = []
    for number, seed in enumerate((1, 1, 2)):
        task = Regression()
        options = {"global_batch_size": 4, "max_epochs": 2, "shuffle": True, "seed": seed}
        fit(task, tmp_path / str(number), train=samples(13), **options)
        found.append(task)
    assert_equal_bits(found[0], found[1])
    assert not torch.equal(found[0].net[0].weight, found[2].net[0].weight)
