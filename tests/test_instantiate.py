from functools import partial
from typing import Any

import pytest
from omegaconf import OmegaConf

from trainer.callbacks.base import Callback
from trainer.callbacks.early_stopping import EarlyStopping
from trainer.callbacks.learning_rate import LearningRate
from trainer.instantiate import instantiate_all

STOPPING = {
    "_target_": "trainer.callbacks.early_stopping.EarlyStopping",
    "monitor": "val/loss",
    "patience": 7,
}


def build(spec: Any) -> list[Callback]:
    return instantiate_all(spec, Callback, "callbacks", lambda: [LearningRate()])


def test_none_means_defaults_and_false_none_at_all() -> None:
    assert [type(c) for c in build(None)] == [LearningRate]
    assert build(False) == build([]) == build({}) == []


def test_instances_keep_their_identity_and_order() -> None:
    one, two = LearningRate(), EarlyStopping("val/loss")
    assert build([one, None, two]) == [one, two]
    assert build((two, one, False)) == [two, one]
    assert build({"b": two, "off": None, "a": one, "no": False}) == [two, one]
    assert build(one) == [one]


@pytest.mark.parametrize("spec", [{"stop": STOPPING, "off": None}, [STOPPING, None], STOPPING])
@pytest.mark.parametrize("omega", [False, True])
def test_nodes(spec: Any, omega: bool) -> None:
    [built] = build(OmegaConf.create(spec) if omega else spec)
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
        ([{**STOPPING, "patience": 0}], "patience must be"),
        ({"x": {**STOPPING, "patient": 1}}, r"callbacks\.x cannot be built(.|\n)*'patient'"),
        (True, r"callbacks is of type builtins\.bool"),
    ],
)
def test_errors(spec: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(spec)
