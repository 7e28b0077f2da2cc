"""Random numbers: one seed for the whole run, and from it a stream of its own for every use.

A stream is named by what it is for and by where in the run that is, such as (sample, epoch,
position). So what is drawn depends neither on the rank or process that draws nor on what was drawn
before, and a run that resumes has nothing to restore.
"""

from __future__ import annotations

import random
from enum import IntEnum
from typing import Any

import numpy as np
import torch

_CPU = torch.device("cpu")


class Stream(IntEnum):
    """What random numbers are used for. No two uses share a number, so none follows another.

    The comments say which numbers follow in the key. A number that a release has used stays.
    """

    EPOCH_ORDER = 0  # epoch: the shuffle
    SAMPLER = 1  # epoch: what a user's sampler or train_indices draws
    SAMPLE = 2  # epoch, position: what a dataset draws for one sample
    MICRO_BATCH = 3  # epoch, position of the first sample: for __getitems__ and collate_fn
    GLOBAL_BATCH = 4  # epoch, number: what an iterable dataset draws while it is read
    SHARD = 5  # epoch, shard, number: likewise, where it shards itself
    LOADER = 6  # rank: where loader workers start, whatever they do before their first batch
    FORWARD = 7  # step, number of the micro-batch: dropout
    GLOBAL_LOSS = 8  # step: a loss over the whole global batch
    EVALUATION = 9  # the seed of everything that datasets draw in evaluation and prediction
    EVALUATION_FORWARD = 10  # position of the micro-batch: a forward in evaluation that samples
    EVALUATION_GLOBAL_LOSS = 11  # number of the global batch
    OWN_GENERATOR = 12  # its number; the seed is the key of the global ones: a dataset's own
    FIT_START = 13  # step: TaskModule.on_fit_start
    EPOCH_START = 14  # step: TaskModule.on_epoch_start
    UPDATE = 15  # step: the hooks before and after the optimizer's step, and the optimizer
    VALIDATION_END = 16  # step: TaskModule.on_validation_end
    EPOCH_END = 17  # step: TaskModule.on_epoch_end
    FIT_END = 18  # step: TaskModule.on_fit_end


def stream_key(seed: int, stream: Stream, *place: int) -> int:
    """Mix integers into one 63-bit seed, so that every use and place has its own stream.

    The mixing function is splitmix64's finalizer (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014), applied after adding each part.

    Args:
        seed: Seed of the run.
        stream: What the random numbers are for.
        place: Where in the run: epoch, position, ...
    """
    key = 0
    for part in (seed, stream, *place):
        key = (key + part + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        key ^= key >> 31
    return key >> 1


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global random generators.

    Args:
        seed: Any integer of at least 0.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**64)


def seed_generators(key: int, device: torch.device = _CPU) -> None:
    """Put the generators of Python, NumPy and torch at the start of the stream of ``key``.

    NumPy and torch look at 32 bits of the key, so two places in a run seldom, but not never, have
    the same numbers: among 100,000 samples about one pair.

    Args:
        key: From `stream_key`.
        device: Whose generator of torch is meant, beside that of the CPU.
    """
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)  # torch.manual_seed takes a hundred times as long
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(key)


class OwnStream:
    """A stream that is drawn from a piece at a time: each ``with`` goes on where the last ended.

    In between, Python's, NumPy's and torch's CPU generator are as if it were not there.
    """

    def __init__(self, key: int) -> None:
        self._key = key
        self._inner: tuple[Any, ...] | None = None

    def __enter__(self) -> None:
        self._outer = _states()
        if self._inner is None:
            seed_generators(self._key)
        else:
            _set_states(self._inner)

    def __exit__(self, *_: object) -> None:
        self._inner = _states()
        _set_states(self._outer)


def _states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _set_states(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])
