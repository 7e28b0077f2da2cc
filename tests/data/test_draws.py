"""Drawing is noticed, whichever generator it is from, and not drawing too."""

import random

import numpy as np
import pytest
import torch

from trainer.data import draws


def test_nothing_drawn_is_nothing_drawn():
    for _ in range(2):
        draws.watch()
        torch.arange(5).sum()
        np.random.default_rng(0).random()  # a generator of one's own
        assert not draws.anything_drawn()


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        lambda: random.gauss(0, 1),
        lambda: random.getrandbits(1),
        lambda: random.shuffle([1, 2]),
        lambda: random.seed(3),
        lambda: np.random.randint(2, dtype=np.uint8),
        lambda: np.random.randn(),
        lambda: np.random.permutation(2),
        lambda: np.random.seed(3),
        lambda: torch.rand(()),
        lambda: torch.randn(1),
        lambda: torch.randperm(2),
        lambda: torch.randint(2, (1,), dtype=torch.uint8),
        lambda: torch.nn.functional.dropout(torch.ones(1)),
        lambda: torch.manual_seed(3),
    ],
)
def test_every_kind_of_draw_is_noticed(draw):
    draws.watch()
    draw()
    assert draws.anything_drawn()


def test_the_users_default_format_plays_no_part():
    torch.set_default_dtype(torch.float64)
    try:
        draws.watch()
        assert not draws.anything_drawn()
    finally:
        torch.set_default_dtype(torch.float32)
