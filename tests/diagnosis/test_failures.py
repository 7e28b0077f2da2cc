"""What is a mistake, what is no accident, and what is shown of either."""

import errno
from pathlib import Path

import pytest
from torch.utils.data import Dataset, default_collate

from trainer.checkpoint.store import LocalStore
from trainer.checkpoint.writer import CheckpointWriter
from trainer.config import CheckpointConfig, TrainerConfig
from trainer.data.fetching import Fetch, Request
from trainer.data.loading import Source
from trainer.diagnosis.failures import (
    Failure,
    RankError,
    ended_elsewhere,
    is_hopeless,
    is_mistake,
    shown,
)
from trainer.messages import first_line


def raised(raises):
    try:
        raises()
    except Exception as error:
        return error
    raise AssertionError


def from_rank(raises, rank=0, where="step 3"):
    try:
        raises()
    except Exception as error:
        return Failure.of(error, rank, where).error()
    raise AssertionError


def mistake():
    TrainerConfig(devices=0)


def own_error():
    raise ValueError("the user's own")


class Broken(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise OSError("the server does not answer")


def broken_sample():
    Fetch(Source(Broken(), default_collate, None), seed=0)[Request([1], 0, 0, 1, True, 0)]


class Stale(LocalStore):
    def open(self):
        raise OSError(errno.ESTALE, "Stale file handle")


def network_disk():
    CheckpointWriter(Stale(Path("run")), CheckpointConfig())


def accident(text="no space"):
    raise OSError(text)


@pytest.mark.parametrize("get", [raised, from_rank])
def test_mistake_is_one_line_and_another_error_shows_its_code(get):
    assert is_mistake(get(mistake))
    assert shown(get(mistake)).startswith("error: devices=0")
    assert shown(get(mistake)).count("\n") == 1
    for raises in (own_error, accident, broken_sample):
        assert not is_mistake(get(raises))
        assert f"in {raises.__name__}" in shown(get(raises))
    assert 'raise OSError("the server' in shown(get(broken_sample))
    killed = RankError("rank 1 was killed")
    assert shown(killed) == "error: rank 1 was killed\n"


def test_what_fails_the_same_way_twice_is_hopeless():
    first = from_rank(accident)
    assert not is_hopeless(first, None)
    assert is_hopeless(from_rank(accident, rank=1), first)
    assert not is_hopeless(from_rank(accident, where="step 4"), first)
    assert not is_hopeless(from_rank(lambda: accident("not found")), first)
    killed = RankError("rank 1 was killed")
    assert not is_hopeless(killed, killed)
    assert is_hopeless(from_rank(mistake), None)
    assert is_mistake(from_rank(network_disk))
    assert not is_hopeless(from_rank(network_disk), None)
    assert is_hopeless(from_rank(network_disk), from_rank(network_disk))


def silent():
    raise AssertionError


def test_an_error_that_says_nothing_is_named():
    told = str(ended_elsewhere(Failure.of(raised(silent), 2, "step 3")))
    assert told.startswith("rank 2 ends because")
    assert told.endswith("(AssertionError)")
    assert first_line(raised(silent)) == "AssertionError"
    assert first_line(OSError("one\ntwo")) == "one"
