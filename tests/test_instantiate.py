from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping as TheirStopping
from lightning.pytorch.callbacks import ModelCheckpoint as TheirCheckpoint
from lightning.pytorch.callbacks import Timer as TheirTimer
from omegaconf import OmegaConf

from trainer.callbacks.base import Callback
from trainer.callbacks.early_stopping import EarlyStopping
from trainer.callbacks.learning_rate import LearningRate
from trainer.callbacks.throughput import Throughput
from trainer.instantiate import check_targets, instantiate_all

STOPPING = {
    "_target_": "trainer.callbacks.early_stopping.EarlyStopping",
    "monitor": "val/loss",
    "patience": 7,
}


def build(spec: Any) -> list[Callback]:
    return instantiate_all(spec, Callback, "callbacks", lambda: [LearningRate()])


def test_none_means_defaults_and_false_none_at_all() -> None:
    assert [type(c) for c in build(None)] == [type(c) for c in build([])] == [LearningRate]
    assert build(False) == build({}) == []


def test_a_mapping_is_the_whole_set_in_its_order() -> None:
    one, two = LearningRate(), EarlyStopping("val/loss")
    assert build({"b": two, "off": None, "a": one, "no": False}) == [two, one]


def test_others_are_added_to_the_defaults_or_take_the_place_of_one() -> None:
    defaults = [LearningRate(), Throughput()]
    rate, own, stop = LearningRate(), Own(), EarlyStopping("val/loss")

    def added(spec: Any) -> list[Callback]:
        return instantiate_all(spec, Callback, "callbacks", lambda: defaults)

    assert added(own) == added([None, own, False]) == [*defaults, own]
    assert added((stop, rate)) == [rate, defaults[1], stop]
    assert added([rate, own, LearningRate()])[:2] == [rate, defaults[1]]
    assert [type(c) for c in added([rate, own, LearningRate()])][2:] == [Own, LearningRate]
    assert added([Subclass()])[0] is defaults[0]


class Own(Callback):
    pass


class Subclass(LearningRate):
    pass


@pytest.mark.parametrize("spec", [{"stop": STOPPING, "off": None}, [STOPPING, None], STOPPING])
@pytest.mark.parametrize("omega", [False, True])
def test_nodes(spec: Any, omega: bool) -> None:
    built = build(OmegaConf.create(spec) if omega else spec)[-1]
    assert isinstance(built, EarlyStopping)
    assert (built.monitor, built.patience) == ("val/loss", 7)


def test_interpolation_reaches_the_whole_config() -> None:
    cfg = OmegaConf.create({"metric": "val/x", "callbacks": {"stop": dict(STOPPING)}})
    cfg.callbacks.stop.monitor = "${metric}"
    [built] = build(cfg.callbacks)
    assert isinstance(built, EarlyStopping)
    assert built.monitor == "val/x"


def test_nested_arguments_are_plain() -> None:
    node = {"_target_": f"{__name__}.Mine", "options": {"a": [1]}}
    [built] = instantiate_all([OmegaConf.create(node)], Mine, "callbacks", list)
    assert type(built.options) is dict
    assert type(built.options["a"]) is list


class Mine(Callback):
    def __init__(self, options: Any) -> None:
        self.options = options


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ([LearningRate], r"callbacks\[0\] is the class LearningRate.*LearningRate\(\.\.\.\)"),
        ({"bar": "progress"}, r"callbacks\.bar is the string 'progress'.*_target_"),
        ("progress", r"callbacks is the string 'progress'"),
        ([LearningRate(), {"monitor": 1}], r"callbacks\[1\] is a mapping without _target_"),
        (OmegaConf.create({"stop": {"patience": 1}}), r"callbacks\.stop is a mapping without"),
        ([object()], r"callbacks\[0\] is of type builtins\.object.*derive .* trainer\.Callback"),
        ([partial(LearningRate)], r"of type functools\.partial"),
        ([{"_target_": "builtins.dict"}], r"callbacks\[0\] is a mapping"),
        ([{"_target_": "trainer.no.Such"}], r"callbacks\[0\] cannot be built.*trainer\.no\.Such"),
        (
            {"x": {"_target_": "trainer.callbacks.EarlyStoping"}},
            r"trainer\.callbacks has no 'EarlyStoping'; did you mean .*\.EarlyStopping\?",
        ),
        ({"x": {"_target_": "trainr.Callback"}}, "there is no module 'trainr'"),
        ({"x": {"_target_": "json"}}, "from json, which is a module; give the path of a class"),
        ({"x": {"_target_": "math.pi"}}, "from math.pi, which is of type float"),
        ({"x": {"_target_": None}}, "callbacks.x._target_ is None; give the import path"),
        ([{**STOPPING, "patience": 0}], "patience must be"),
        ({"x": {**STOPPING, "patient": 1}}, r"callbacks\.x cannot be built(.|\n)*'patient'"),
        (True, r"callbacks is True; .* leave it out for the default ones"),
        ([TheirStopping("val/loss")], r"EarlyStopping is trainer\.callbacks\.EarlyStopping here"),
        ([TheirCheckpoint()], r"ModelCheckpoint is the options checkpoint\.\* here"),
        ([TheirTimer()], r"Timer.*: Lightning's callbacks act on its own loop"),
    ],
)
def test_errors(spec: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(spec)


def test_targets_below_a_node_are_looked_at_too() -> None:
    node = {"_target_": "torch.nn.Linear", "parts": [{"_target_": "torch.nn.Linaer"}, "${x}"]}
    with pytest.raises(
        ValueError, match=r"task\.parts\.0 .*torch\.nn has no 'Linaer'.*nn\.Linear\?"
    ):
        check_targets(node, "task")
    check_targets({"_target_": "${name}"}, "task")
    check_targets({"_target_": "torch.nn.Embedding.from_pretrained"}, "task")  # a method of a class


def test_an_import_that_fails_inside_a_module_is_not_taken_for_a_wrong_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacks_something.py").write_text("import not_installed_anywhere")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        check_targets({"_target_": "lacks_something.Task"}, "task")
