"""The options of the two runs that are compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import Regression, samples

from trainer.config import TrainerConfig
from trainer.data.module import GivenData
from trainer.launching.rank import Group, Work
from trainer.verify import runs


def test_a_config_that_resumes_is_verified_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[int, TrainerConfig]] = []

    def run(group: Group, work: Work) -> None:
        started.append((group.world_size, work.args[0].config))

    monkeypatch.setattr(runs.ranks, "run", run)
    config = TrainerConfig(
        accelerator="cpu",
        devices=2,
        global_batch_size=4,
        resume="auto",
        accept_changes=["data"],
        max_steps=2,
    )
    data = GivenData(train=samples(8))
    runs.run_both(config, lambda: None, Regression(), data, 2, tmp_path)
    assert [world_size for world_size, _ in started] == [2, 1]
    assert [(c.resume, c.accept_changes) for _, c in started] == [(None, []), (None, [])]
