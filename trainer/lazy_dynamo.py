"""Torch's compiler, `torch._dynamo`, is loaded when something compiles, and not before.

Torch's optimizers and DDP import it in every process, only to name functions that it must leave
alone; that takes a second of processor time and 100 MB. While nothing compiles they can be answered
without it. So a stand-in takes its place, knows these few answers, and makes room for the real
module as soon as it is asked for anything else.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"
_KNOWN_TORCH = ("2.11.", "2.12.", "2.13.")  # whose questions are answered right; else it is loaded
_DISABLED = "__dynamo_disable"  # where torch keeps what `disable` returned for a function


def defer_dynamo() -> None:
    """Let torch do without its compiler in this process until something compiles."""
    if _NAME not in sys.modules and torch.__version__.startswith(_KNOWN_TORCH):
        sys.modules[_NAME] = torch._dynamo = _StandIn()


def load_dynamo() -> ModuleType:
    """Load torch's compiler; before ranks are forked that compile, so that they share it."""
    found = importlib.import_module(_NAME)
    return found.real() if isinstance(found, _StandIn) else found


class _StandIn(ModuleType):
    """Answers what torch asks although nothing compiles."""

    def __init__(self) -> None:
        super().__init__(_NAME, __doc__)
        self.__spec__ = find_spec(_NAME)
        # `inspect` asks every module for its file, also while torch is importing something else.
        self.__file__ = getattr(self.__spec__, "origin", None)
        self.utils = _Part(self, "utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
        self.trace_rules = _Part(self, "trace_rules", clear_lru_cache=lambda: None)
        self._left_alone: list[Callable[..., Any]] = []
        self._lock = threading.Lock()

    def graph_break(self) -> None:
        """End the graph here: there is none."""

    def disable(self, *args: Any, **options: Any) -> Any:
        """Return the function as it is, for torch to keep; others get what they ask for."""
        if options != {"wrapping": False} or not isinstance(args[0], FunctionType):
            return self.real().disable(*args, **options)
        self._left_alone.append(args[0])
        return args[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real(), name)

    def real(self) -> ModuleType:
        """Make room for the real module, and return it."""
        with self._lock:
            if sys.modules.get(_NAME) is self:
                del sys.modules[_NAME]
                del torch._dynamo
            while self._left_alone:  # torch asks again
                vars(self._left_alone.pop()).pop(_DISABLED, None)
        return importlib.import_module(_NAME)


class _Part:
    """A module in it that knows one answer."""

    def __init__(self, whole: _StandIn, name: str, **answers: Callable[[], Any]) -> None:
        self._whole, self._name = whole, name
        vars(self).update(answers)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self._whole.real(), self._name), name)
