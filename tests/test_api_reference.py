"""What the API reference is made of: every public name says what it is, and what it takes."""

import importlib
import inspect
import re
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from trainer import Trainer

PACKAGES = ("trainer", "trainer.callbacks", "trainer.loggers", "trainer.strategies")
PUBLIC = {
    f"{package}.{name}": getattr(importlib.import_module(package), name)
    for package in PACKAGES
    for name in importlib.import_module(package).__all__
}


README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def methods(cls: type) -> list[FunctionType]:
    """The public methods and properties that a class defines itself."""
    public = [value for name, value in vars(cls).items() if not name.startswith("_")]
    functions = [getattr(value, "fget", getattr(value, "__func__", value)) for value in public]
    return [function for function in functions if isinstance(function, FunctionType)]


def explained(thing: Any) -> set[str]:
    """The names below ``Args`` and ``Attributes`` of a docstring."""
    text = inspect.getdoc(thing) or ""
    return set(re.findall(r"^ {4}\*{0,2}(\w+):", text, re.M))


def unexplained(function: Any, *others: Any) -> set[str]:
    """The arguments of a function that neither it nor the others explain."""
    taken = {name for name in inspect.signature(function).parameters if not name.startswith("_")}
    return taken - {"self", "args", "kwargs"} - set().union(*map(explained, (function, *others)))


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_says_what_it_is(name: str) -> None:
    thing = PUBLIC[name]
    assert inspect.getdoc(thing)
    if inspect.isclass(thing):
        assert not [method.__name__ for method in methods(thing) if not inspect.getdoc(method)]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_says_what_its_arguments_mean(name: str) -> None:
    thing = PUBLIC[name]
    if inspect.isclass(thing) and not issubclass(thing, Exception):
        bases = [base for base in thing.__mro__ if base.__module__.startswith("trainer")]
        assert not unexplained(thing, *bases, thing.__init__)
    elif not inspect.isclass(thing):
        assert not unexplained(thing)


@pytest.mark.parametrize("method", methods(Trainer), ids=lambda method: method.__name__)
def test_a_method_of_the_trainer_says_what_its_arguments_mean(method: FunctionType) -> None:
    assert not unexplained(method)


def test_an_argument_that_is_not_explained_is_found() -> None:
    def half(told: int, untold: int) -> None:
        """Do a thing.

        Args:
            told: What it is.
        """

    assert unexplained(half) == {"untold"}


def test_the_command_in_the_readme_makes_pages_of_all_packages() -> None:
    command = next(line for line in README.splitlines() if line.startswith("pdoc "))
    assert [word for word in command.split() if word.startswith("trainer")] == list(PACKAGES)
