"""What a run takes back from a checkpoint."""

from pathlib import Path

import pytest
import torch
from support import Regression, fit, samples


def test_going_on_from_the_folder_of_a_run_means_its_last_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def diverging() -> Regression:
        return Regression(lambda params: torch.optim.SGD(params, lr=3.0))

    data = {"train": samples(4), "val": samples(4)}
    first = fit(diverging(), tmp_path / "first", max_epochs=3, **data)
    assert first.best_checkpoint != first.last_checkpoint
    options = {"max_epochs": 4, "resume": str(tmp_path / "first")}
    second = fit(diverging(), tmp_path / "second", **data, **options)
    assert f"resuming from {first.last_checkpoint}" in capsys.readouterr().out
    assert second.step == 4
