"""The page of ``--help``."""

import re
import string
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import recipes.mnist
from trainer.config import option_names
from trainer.hydra.composition import register_configs
from trainer.hydra.help import help_page, program

CONF = str(Path(__file__).parents[2] / "conf")


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLUMNS", "100")
    register_configs()
    yield
    register_configs()


def page(*overrides: str) -> str:
    """The page as Hydra prints it."""
    with initialize_config_dir(CONF, version_base="1.3"):
        cfg = compose("mnist", overrides=list(overrides))
        return string.Template(help_page(recipes.mnist.main, cfg)).substitute()


def test_it_says_what_the_program_is_and_how_to_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/mnist"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert page().startswith(
        "A small convolutional net on the original MNIST files: over 99 % in well under a minute.\n"
        "\nusage: mnist [key=value ...] [flags]\n"
    )
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert program() == "python train.py"


def test_it_has_the_choices_the_values_and_what_they_mean() -> None:
    text = page("trainer.devices=3", "+mine=${mode}")
    for line in (
        r"  callbacks +early_stopping, .*none.*",
        r"  experiment +.*smoke",
        r"  mode=fit +fit, validate, test, predict, .* or .*",
        r"data: MnistData - Trains on 55,000 images, .*",
        r"  data.num_val=5000 +How many training images, counted from the end, are held out.*",
        r"  mine=\$\{mode\}",
        r"  trainer.devices=3 +Ranks \(processes\) per machine; auto: all devices",
        r"  --multirun, -m +a job for each value .*",
    ):
        assert re.search(f"^{line}$", text, re.M), line
    assert "plan.steps" not in text
    assert "plan.steps=10" in page("mode=plan")


def test_every_option_has_one_line_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    lines = page().splitlines()
    for name in option_names():
        found = [line for line in lines if line.startswith(f"  trainer.{name}=")]
        assert len(found) == 1, name
        assert len(found[0].split()) > 1, name  # it says something
    assert max(map(len, lines[2:])) <= 90


def test_options_stand_below_the_titles_they_belong_to() -> None:
    below, title = {}, ""
    for line in page().splitlines():
        if line and not line.startswith(" "):
            title = line
        elif line.startswith("  trainer."):
            below[line.split("=")[0].removeprefix("  trainer.")] = title
    assert set(below) == set(option_names())
    assert below["devices"] == "Ranks"
    assert below["num_threads"] == below["profile"] == below["compile"] == "Speed"
    folder = "The run's folder and checkpoints"
    assert below["run_dir"] == below["checkpoint.keep"] == below["resume"] == folder
    assert below["max_restarts"] == "Failures"
