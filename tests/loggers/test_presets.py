"""The files of ``trainer/conf/logger`` name what there is."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "trainer" / "conf" / "logger"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_preset_is_a_logger_with_arguments_that_it_takes(path: Path) -> None:
    [(name, node)] = yaml.safe_load(path.read_text()).items()
    assert name == path.stem
    module, _, cls = node.pop("_target_").rpartition(".")
    inspect.signature(getattr(import_module(module), cls)).bind(**node)
