"""Lightning's loggers (W&B, MLflow, Comet, CSV, TensorBoard, ...), used as they are."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.launching import attempt
from trainer.loggers.base import Logger
from trainer.loggers.delivery import Call, Delivery
from trainer.loggers.dialects import SUCCESS, dialect_of, is_lightning_logger
from trainer.messages import warn
from trainer.provenance import code_version, environment
from trainer.watch import watch

if TYPE_CHECKING:
    from trainer.run import Run

FILENAME = "external_runs.json"
"""In a run's folder: what each logger calls the run.

Checkpoints know it too, unless they came before the logger had opened its run.
"""

_noting = threading.Lock()
_SOON_S = 10.0  # where somebody waits for the process to end: after a failure or a signal
_NOT_HERE = {
    "_log_model": "checkpoints are not uploaded by a logger here; leave log_model out and upload "
    "them in a callback's on_save(run, path), through run.loggers (see docs/loggers.md)",
    "_log_graph": "the model's graph is not logged here; leave log_graph out and log it in a "
    "callback's on_fit_start(run), through run.loggers (see docs/loggers.md)",
}


class LightningLogger(Logger):
    """Writes to a logger of Lightning's, in a thread: it may be slow or fail, training goes on.

    The logger gets the run's config, the version of its code and its environment, then the metrics
    and at the end the status. A logger that is given to the `Trainer` is wrapped in this by itself.

    Args:
        logger: The logger.
        capacity: The most events that wait for it; beyond that the oldest are dropped.
        wait_s: The longest that the end of the run waits for it; at most 10 s after a failure or a
            signal.
    """

    def __init__(self, logger: Any, capacity: int = 1000, wait_s: float = 60.0) -> None:
        if not is_lightning_logger(logger):
            raise ValueError(
                f"LightningLogger(logger={logger!r}): it must be an object whose class derives "
                "from lightning.pytorch.loggers.Logger"
            )
        for name, advice in _NOT_HERE.items():
            if getattr(logger, name, False):
                raise ValueError(f"{type(logger).__name__}({name[1:]}=...): {advice}")
        if capacity < 1 or not wait_s >= 0:
            raise ValueError(
                f"LightningLogger(capacity={capacity}, wait_s={wait_s}): capacity must be at least "
                "1, and wait_s not negative"
            )
        self.logger = logger
        self.capacity = capacity
        self.wait_s = wait_s
        self._dialect = dialect_of(logger)
        self._built_in = os.getpid()
        self._is_named = False  # the external run, by a checkpoint
        self._is_silent = False  # about its state, of which a warning has told
        self._delivery = Delivery(self.label, capacity)

    @property
    def label(self) -> str:
        """The name of the logger's class."""
        return type(self.logger).__name__

    @property
    def own(self) -> Any:
        """The logger, once it is open; one that does not open keeps its user waiting, once."""
        self._delivery.wait_until_connected()
        return self.logger

    def open(self, run: Run) -> None:
        """Begin to open the logger, and to send what the run is made of."""
        _speak_for_all_ranks()
        if os.getpid() != self._built_in:
            self._dialect.renew()
            self._built_in = os.getpid()
        path = run.run_dir / FILENAME
        alike = [logger for logger in run._loggers if logger.label == self.label]
        self._key = f"{self.label}-{alike.index(self) + 1}"
        if not self._is_named and (run.step or attempt.current().is_restart):
            self._dialect.go_on(_names(path).get(self._key, {}))
        self._dialect.prepare(run.step)
        watch.tells(True)
        config = {key: value for key, value in run.run_config.items() if key != "logger"}
        described = Call("config", lambda: self._dialect.describe(_facts(run, config)))
        self._delivery = Delivery(self.label, self.capacity)
        self._delivery.start(lambda: self._connect(path), described)

    def log(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Hand one event over."""
        values = {**metrics, "epoch": run.epoch, "samples": run.samples}
        self._delivery.put(Call("event", partial(self._dialect.log, values, run.step)))

    def state_dict(self) -> dict[str, Any]:
        """Return what names the external run, so that a resumed run goes on in it.

        Where the logger cannot tell, that is warned of once, and the state is empty.
        """
        try:
            state = self._dialect.state()
            json.dumps(state)  # a checkpoint holds plain values only
        except Exception as error:
            with _noting:  # the loop asks, and the thread that opens the logger
                is_first, self._is_silent = not self._is_silent, True
            if is_first:
                cause = f"{type(error).__name__}: {error}"
                warn(
                    f"{self.label} has no state to keep in checkpoints ({cause}): a resumed "
                    "run may begin another external run"
                )
            return {}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        self._is_named = any(state.values())
        if self._is_named:
            self._dialect.go_on(state)

    def end(self, run: Run) -> None:
        """Have the status come last."""
        wait_s = self.wait_s if run.status == SUCCESS else min(self.wait_s, _SOON_S)
        self._delivery.end(Call("final status", partial(self._dialect.end, run.status)), wait_s)

    def close(self) -> None:
        """Wait until everything is there, and say what is not."""
        self._delivery.join()

    def _connect(self, path: Path) -> None:
        self._dialect.connect()
        state = self.state_dict()
        if not state:
            return
        with _noting:
            names = {**_names(path), self._key: state}
            part = path.with_suffix(".part")
            part.write_text(json.dumps(names, indent=1) + "\n")
            part.replace(path)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to another process without what belongs to this one."""
        return _rebuilt, (type(self.logger), self._dialect.portable(), self.capacity, self.wait_s)


def adopt(spec: Any) -> Any:
    """Wrap every Lightning logger in ``spec``: one, or several in a sequence or by name."""
    if is_lightning_logger(spec):
        return LightningLogger(spec)
    if isinstance(spec, Mapping) and "_target_" not in spec:
        return {name: adopt(entry) for name, entry in spec.items()}
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        return [adopt(entry) for entry in spec]
    return spec


def _rebuilt(
    cls: type, attributes: Mapping[str, Any], capacity: int, wait_s: float
) -> LightningLogger:
    logger: Any = object.__new__(cls)
    vars(logger).update(attributes)
    return LightningLogger(logger, capacity, wait_s)


def _names(path: Path) -> dict[str, dict[str, Any]]:
    """Return what the loggers call the run, as an earlier launch has noted it."""
    if not path.exists():
        return {}
    try:
        names: dict[str, dict[str, Any]] = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        warn(f"{path} is damaged ({error}): loggers may begin other external runs")
        return {}
    return names


def _facts(run: Run, config: Mapping[str, Any]) -> dict[str, Any]:
    own = {"code": code_version(run.task), "environment": environment(run)}
    return {**own, **config}


def _speak_for_all_ranks() -> None:
    """Have Lightning know that this is rank 0, which it has read from the environment."""
    module = sys.modules.get("lightning_utilities.core.rank_zero")
    if module is not None:
        module.rank_zero_only.rank = 0
