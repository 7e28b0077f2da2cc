"""What datasets and samplers hold: who wants to know the epoch, and random generators.

They are looked for in instance attributes, lists, tuples and dicts, of objects of any kind. Code is
left alone: no closures, globals or class attributes.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from types import MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from trainer import distributed
from trainer.data.loading import Source
from trainer.seeding import Stream, seed_generators, stream_key

# A set of samples may be a long list of objects: looking through it must not take long.
MOST = 10_000  # things, the nearest first
MOST_IN_ONE = 1_000  # the first entries of one list or dict


def set_epoch(thing: Any, epoch: int) -> None:
    """Call ``set_epoch(epoch)`` on a dataset, or a loader's sampler, and on all that it holds."""
    for node in _of_sampler(thing) if isinstance(thing, DataLoader) else _held(thing):
        if callable(getattr(node, "set_epoch", None)):
            node.set_epoch(epoch)


def sampler_generators(loader: DataLoader[Any]) -> list[Any]:
    """Return the random generators that a loader's sampler holds, if they can be seeded."""
    found = filter(_is_generator, _of_sampler(loader))
    return [node for node in found if _can_be_seeded(node)]


def generator_state(generator: Any) -> Any:
    """Return where a generator is, as a checkpoint can hold it: a tensor or plain values."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return _as_lists(generator.get_state(legacy=False))
    return _as_lists(generator.bit_generator.state)


def set_generator_state(generator: Any, state: Any) -> None:
    """Put a generator where it was when `generator_state` returned ``state``."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def kind_of_state(state: Any) -> str:
    """Return which generators can be put where ``state`` says."""
    if isinstance(state, dict):
        return str(state["bit_generator"])
    return "torch.Generator" if isinstance(state, torch.Tensor) else "random.Random"


class Generators:
    """What a dataset draws from: the global random generators, and those that it holds.

    The latter are copied with it into ranks and loader workers, where every copy would draw the
    same. So they are seeded whenever the global ones are, each with a stream of its own. One that a
    sampler holds, too, is the sampler's.

    Attributes:
        own: Those that the dataset or the collate function holds.
    """

    def __init__(self, source: Source) -> None:
        """Look for them, and say which of them no seed reaches."""
        self._holders = (source.dataset, source.collate)
        self._not_own = [] if source.loader is None else sampler_generators(source.loader)
        for node in filter(_is_generator, _held(*self._holders)):
            if not _can_be_seeded(node) and distributed.rank() == 0:
                print(
                    f"note: {type(source.dataset).__name__} holds a {type(node).__name__} that no "
                    "seed reaches: what it draws differs from run to run; np.random.default_rng() "
                    "would not",
                    flush=True,
                )
        self.look()

    def look(self, *more: Any) -> None:
        """Look again, also in ``more``: ``set_epoch`` and ``iter`` may have made new ones."""
        found = filter(_is_generator, _held(*self._holders, *more))
        self.own = [node for node in found if _can_be_seeded(node) and node not in self._not_own]

    def seed(self, key: int) -> None:
        """Put all of them at the start of their streams of ``key``."""
        seed_generators(key)
        for number, generator in enumerate(self.own):
            _seed(generator, stream_key(key, Stream.OWN_GENERATOR, number))


def _of_sampler(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield the sampler and all that it holds, but for datasets: many know theirs."""
    return _held(
        loader.batch_sampler, skip=lambda node: node is loader.dataset or isinstance(node, Dataset)
    )


def _held(*things: Any, skip: Callable[[Any], bool] = lambda node: False) -> Iterator[Any]:
    """Yield ``things`` and all that they hold, each once, the nearest first."""
    seen: set[int] = set()
    ahead = deque(things)
    while ahead and len(seen) < MOST:
        node = ahead.popleft()
        if id(node) not in seen and not skip(node):
            seen.add(id(node))
            yield node
            ahead += filter(_is_of_interest, _parts(node))


def _parts(node: Any) -> list[Any]:
    if isinstance(node, MethodType):
        return [node.__self__]
    parts = list(vars(node).values()) if hasattr(node, "__dict__") else []
    if isinstance(node, list | tuple | dict):
        parts += islice(node.values() if isinstance(node, dict) else node, MOST_IN_ONE)
    return parts


def _is_of_interest(thing: Any) -> bool:
    if isinstance(thing, type | ModuleType):
        return False
    is_holder = hasattr(thing, "__dict__") or isinstance(thing, list | tuple | dict)
    return is_holder or _is_generator(thing)


def _is_generator(thing: Any) -> bool:
    kinds = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)
    return isinstance(thing, kinds)


def _can_be_seeded(generator: Any) -> bool:
    if isinstance(generator, np.random.RandomState):
        state: Any = generator.get_state(legacy=False)
        return bool(state["bit_generator"] == "MT19937")
    return not isinstance(generator, random.SystemRandom)


def _as_lists(state: Any) -> Any:
    """Return NumPy's nested state without arrays; NumPy takes it back like that, too."""
    if isinstance(state, dict):
        return {name: _as_lists(part) for name, part in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


def _seed(generator: Any, key: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(key)
    elif isinstance(generator, random.Random):
        generator.seed(key)
    elif isinstance(generator, np.random.RandomState):
        generator.seed(key & 0xFFFFFFFF)
    else:
        generator.bit_generator.state = type(generator.bit_generator)(key).state
