"""Calling the steps and hooks of a LightningModule."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from trainer.lightning.hooks import CALLED, defines

_ANY_NUMBER = 99


class Calls:
    """Calls what a module defines, with as many arguments as it takes.

    Attributes:
        running: The step or hook that runs now.
    """

    def __init__(self, module: Any, base: type) -> None:
        """Look at what the module defines.

        Args:
            module: The user's module.
            base: Lightning's class of it.
        """
        self.running: str | None = None
        self._module = module
        self._defined = frozenset(name for name in CALLED if defines(module, name, base))
        self._sizes: dict[str, int] = {}

    def defines(self, *names: str) -> bool:
        """Whether the module defines one of these."""
        return any(name in self._defined for name in names)

    def hook(self, name: str, *args: Any) -> Any:
        """Call a hook, if the module defines it."""
        return self.step(name, *args) if name in self._defined else None

    def step(self, name: str, *args: Any) -> Any:
        """Call a step, which may be Lightning's own."""
        method = getattr(self._module, name)
        if name not in self._sizes:
            self._sizes[name] = _most_arguments(method)
        outer, self.running = self.running, name
        try:
            return method(*args[: self._sizes[name]])
        finally:
            self.running = outer


def _most_arguments(method: Callable[..., Any]) -> int:
    """Return how many positional arguments ``method`` takes."""
    parameters = inspect.signature(method).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return _ANY_NUMBER
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
