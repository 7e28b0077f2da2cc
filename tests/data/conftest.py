"""A rank is played by this process wherever no collective is needed."""

import pytest

from trainer import distributed


@pytest.fixture
def play(monkeypatch):
    """Become ``play(rank, world_size)``."""

    def become(rank, world_size):
        monkeypatch.setattr(distributed, "rank", lambda: rank)
        monkeypatch.setattr(distributed, "world_size", lambda: world_size)

    return become
