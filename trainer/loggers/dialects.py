"""What Lightning's loggers do not do alike: a run's name, how it goes on, and how it ends."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

SUCCESS = "finished"  # the `Run.status` of a run that came to its end

_csv = threading.RLock()


class Dialect:
    """How to speak to a logger of Lightning's; this one keeps to what they have in common.

    ``state`` and ``prepare`` are called by the loop and must not wait for anything, the others by
    the thread that delivers.
    """

    def __init__(self, logger: Any) -> None:
        """Note the logger."""
        self.logger = logger

    def state(self) -> dict[str, Any]:
        """Return what names the external run, as far as that is known."""
        find = getattr(self.logger, "state_dict", dict)
        return find() or {}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Go on in the external run that ``state`` names, unless the user has named another."""
        take_back = getattr(self.logger, "load_state_dict", None)
        if take_back is not None and state:
            take_back(dict(state))

    def prepare(self, step: int) -> None:
        """Make ready for `connect`; ``step`` is not 0 when the run resumes."""

    def connect(self) -> None:
        """Open the external run."""
        if hasattr(type(self.logger), "experiment"):
            _ = self.logger.experiment

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Send the config, the code's version and the environment."""
        self.logger.log_hyperparams(facts)
        self.logger.save()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the values of one event."""
        self.logger.log_metrics(metrics, step)
        self.logger.save()

    def end(self, status: str) -> None:
        """Send how the run ended."""
        self.logger.finalize("success" if status == SUCCESS else "failed")

    def portable(self) -> dict[str, Any]:
        """Return the logger's attributes without what belongs to this process alone."""
        return dict(vars(self.logger))

    def renew(self) -> None:
        """Let go of what a process that forked this one has open."""


class MLFlow(Dialect):
    """MLflow: a run has an id that the server gives, a status, and parameters that never change."""

    _step = 0

    def state(self) -> dict[str, Any]:
        """Return the id of the run."""
        return {"run_id": self.logger._run_id}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Take that back."""
        self.logger._run_id = self.logger._run_id or state.get("run_id")

    def prepare(self, step: int) -> None:
        """Note the step."""
        self._step = step

    def connect(self) -> None:
        """Open the run; one that goes on is running again."""
        goes_on = self.logger._run_id is not None
        if self.logger._mlflow_client is None:
            from mlflow.tracking import MlflowClient

            self.logger._mlflow_client = MlflowClient(self.logger._tracking_uri)
        super().connect()
        if goes_on:
            self.logger.experiment.update_run(self.logger._run_id, status="RUNNING")

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Send what is new as parameters, and what has changed since as tags."""
        client, run_id = self.logger.experiment, self.logger._run_id
        known = client.get_run(run_id).data.params
        flat = dict(_flat(facts))
        self.logger.log_hyperparams({key: v for key, v in flat.items() if key not in known})
        for key in known.keys() & flat.keys():
            if not str(flat[key]).startswith(known[key]):  # which may be cut
                client.set_tag(run_id, f"since step {self._step}/{key}", str(flat[key]))

    def end(self, status: str) -> None:
        """Send the status: MLflow has a word for a run that was stopped, and a tag says by what."""
        client, run_id = self.logger.experiment, self.logger._run_id
        client.set_tag(run_id, "status", status)
        words = {SUCCESS: "success", "failed": "failed"}
        self.logger.finalize(words.get(status, "KILLED"))

    def portable(self) -> dict[str, Any]:
        """Leave the connection out."""
        return {**vars(self.logger), "_mlflow_client": None, "_initialized": False}

    def renew(self) -> None:
        """Leave connections to a database to the process that has opened them."""
        store = self.logger._mlflow_client._tracking_client.store
        if hasattr(store, "engine"):
            store.engine.dispose(close=False)


class Wandb(Dialect):
    """W&B: we give a run its id, and end it, unless the user has opened it."""

    _is_ours = True

    def state(self) -> dict[str, Any]:
        """Return the id of the run."""
        return {"id": self.logger.version}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Take that back."""
        if self.logger.version is None and state:
            self._name(state["id"])

    def prepare(self, step: int) -> None:
        """Give the run an id, for a checkpoint may come before it is open."""
        self._is_ours = self.logger._experiment is None
        if self.logger._wandb_init.get("anonymous") is None:
            self.logger._wandb_init.pop("anonymous", None)  # W&B warns of it, whatever it says
        if self.logger.version is None:
            self._name(uuid.uuid4().hex[:8])

    def end(self, status: str) -> None:
        """Send the status and, if we have opened the run, wait until everything is sent."""
        self.logger.finalize("success" if status == SUCCESS else "failed")
        experiment = self.logger.experiment
        experiment.summary["status"] = status
        if not self._is_ours:
            return
        if status not in (SUCCESS, "failed"):
            experiment.mark_preempting()
        experiment.finish(exit_code=0 if status == SUCCESS else 1)
        self.logger._experiment = None  # if it is used again, it goes on in the same run

    def portable(self) -> dict[str, Any]:
        """Leave a run that is open to the logger itself, which would open one."""
        if self.logger._experiment is not None:
            state: dict[str, Any] = self.logger.__getstate__()
            return state
        return super().portable()

    def _name(self, run_id: str) -> None:
        self.logger._id = self.logger._wandb_init["id"] = run_id


class Comet(Dialect):
    """Comet: an experiment has a key. It is opened when the logger is built."""

    def state(self) -> dict[str, Any]:
        """Return the key."""
        return {"experiment_key": self.logger._experiment_key}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Go on under the key, not in the experiment that was just opened."""
        if state and state["experiment_key"] != self.logger._experiment_key:
            self.logger._experiment = None
            self.logger._experiment_key = state["experiment_key"]

    def end(self, status: str) -> None:
        """Send the status, and wait until everything is sent."""
        self.logger.experiment.log_other("status", status)
        super().end(status)
        self.logger.experiment.end()
        self.logger._experiment = None

    def portable(self) -> dict[str, Any]:
        """Keep the key."""
        return {**vars(self.logger), "_experiment": None}

    def renew(self) -> None:
        """Connect anew, under the same key."""
        self.logger._experiment = None


class TensorBoard(Dialect):
    """TensorBoard: a run is a folder."""

    def state(self) -> dict[str, Any]:
        """Return its version, which names the folder."""
        return {"version": self.logger._version}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Take that back."""
        if self.logger._version is None:
            self.logger._version = state.get("version")

    def prepare(self, step: int) -> None:
        """Have what was logged beyond the step disappear from the charts."""
        if step:
            self.logger._kwargs["purge_step"] = step + 1

    def portable(self) -> dict[str, Any]:
        """Leave the writer out, as the logger itself does."""
        state: dict[str, Any] = self.logger.__getstate__()
        return state

    def renew(self) -> None:
        """Write to a file of this process's own."""
        self.logger._experiment = None


class Csv(Dialect):
    """CSV: a resumed run begins a new version, for the logger would delete the old one.

    What it is given while it writes would be lost. The run's loop may give it something, too, in a
    callback, so one has to wait for the other.
    """

    def connect(self) -> None:
        """Open the file, and have its methods be called one at a time."""
        super().connect()
        writer = self.logger.experiment
        for name in ("log_metrics", "save"):
            setattr(writer, name, partial(_one_at_a_time, getattr(type(writer), name), writer))

    def end(self, status: str) -> None:
        """Write the status beside the config."""
        self.logger.log_hyperparams({"status": status})
        super().end(status)


DIALECTS: dict[str, type[Dialect]] = {
    "MLFlowLogger": MLFlow,
    "WandbLogger": Wandb,
    "CometLogger": Comet,
    "TensorBoardLogger": TensorBoard,
    "CSVLogger": Csv,
}


def dialect_of(logger: Any) -> Dialect:
    """Return the dialect of a logger's class, or of the nearest class that it derives from."""
    names = (cls.__name__ for cls in type(logger).__mro__ if _is_lightning(cls))
    return next((DIALECTS[name] for name in names if name in DIALECTS), Dialect)(logger)


def is_lightning_logger(logger: Any) -> bool:
    """Whether this is a Lightning logger; does not import Lightning."""
    return any(cls.__name__ == "Logger" and _is_lightning(cls) for cls in type(logger).__mro__)


def _one_at_a_time(method: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    with _csv:
        method(*args, **kwargs)


def _is_lightning(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in (
        "lightning",
        "lightning_fabric",
        "pytorch_lightning",
    )


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value with its path, as Lightning names them."""
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value
