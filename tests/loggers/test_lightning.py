"""Lightning's loggers, and one's own of their kind, as they are."""

from __future__ import annotations

import csv
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import yaml
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers import Logger as TheirLogger
from support import Regression, fit, fit_on, is_running, samples

from trainer import Callback, Trainer
from trainer.loggers import JsonlLogger, LightningLogger
from trainer.loggers.dialects import dialect_of
from trainer.loggers.lightning import adopt

# Theirs, on their way to the logs; some come at the first import of a library.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

OPTIONS: dict[str, Any] = {
    "train": samples(8),
    "val": samples(2),
    "global_batch_size": 2,
    "log_every_n_steps": 1,
}


class Elsewhere(TheirLogger):
    """A logger of a user's own; what it gets is in ``calls``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.opened_in: list[Any] = []

    @property
    def name(self) -> str:
        return "elsewhere"

    @property
    def version(self) -> str:
        return "1"

    @property
    @rank_zero_experiment
    def experiment(self) -> list[Any]:
        if not self.opened_in:
            self.opened_in = [os.getpid(), threading.current_thread().name]
        return self.calls

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.experiment.append(params)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.experiment.append((step, dict(metrics)))

    def finalize(self, status: str) -> None:
        self.experiment.append(status)


class Broken(Elsewhere):
    """Hangs or raises in one of its methods."""

    def __init__(self, method: str, free: threading.Event | None = None) -> None:
        super().__init__()
        self.method = method
        self.free = free

    def _at(self, method: str) -> None:
        if method == self.method:
            if self.free is None:
                raise ConnectionError("no route")
            self.free.wait(60)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._at("log_metrics")
        super().log_metrics(metrics, step)

    def finalize(self, status: str) -> None:
        self._at("finalize")
        super().finalize(status)


class Sees(Callback):
    """Notes the loggers of a run, and uses one."""

    def on_fit_start(self, run: Any) -> None:
        self.found = run.loggers
        for logger in run.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("sample", "hello")


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where MLflow keeps its runs; it takes two seconds to make."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


def known_loggers(folder: Path, database: str) -> dict[str, Any]:
    """Objects and nodes of every logger that is installed, as they are in a new process."""
    theirs = "lightning.pytorch.loggers"
    return {
        "json": JsonlLogger(),
        "mlflow": MLFlowLogger(folder.name, tracking_uri=database),
        "wandb": {
            "_target_": f"{theirs}.WandbLogger",
            "offline": True,
            "save_dir": str(folder),
            "settings": {"silent": True, "console": "off", "x_disable_stats": True},
        },
        "csv": {"_target_": f"{theirs}.CSVLogger", "save_dir": str(folder), "name": "csv"},
        "tensorboard": TensorBoardLogger(folder, name="tb"),
    }


class PutAside(LightningLogger):
    """Does all that it can without a service, which takes seconds to start."""

    def open(self, run: Any) -> None:
        self._dialect.prepare(run.step)

    def log(self, run: Any, metrics: Mapping[str, float]) -> None:
        pass

    def end(self, run: Any) -> None:
        pass


def children() -> set[int]:
    """The processes that this one and its children have started, and that run."""
    found, parents = {os.getpid()}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except FileNotFoundError:
            continue
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid for pid in found - {os.getpid()} if is_running(pid)}


@pytest.mark.timeout(120)
def test_all_of_them_at_once_and_a_resumed_run_goes_on_in_the_same_external_runs(
    tmp_path: Path,
    database: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = children()
    loggers = known_loggers(tmp_path, database)
    fit_on(2, Regression(), tmp_path / "run", logger=loggers, max_epochs=1, **OPTIONS)
    assert children() <= before  # W&B's service among them

    assert loggers["mlflow"]._run_id is None  # nothing was opened in this process
    client = loggers["mlflow"]._mlflow_client
    experiment = client.get_experiment_by_name(tmp_path.name)
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.tags["status"] == "finished"
    assert run.data.params["trainer/max_epochs"] == "1"
    assert run.data.params["environment/world_size"] == "2"
    assert len(run.data.params["code/commit"]) == 40
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert [loss.step for loss in losses] == [1, 2, 3, 4]

    [folder] = (tmp_path / "wandb").glob("offline-run-*")
    wandb_id = folder.name.rpartition("-")[2]
    recorded = (folder / f"run-{wandb_id}.wandb").read_bytes()
    for text in (b"train/loss", b"max_epochs", run.data.params["code/commit"].encode(), b"status"):
        assert text in recorded

    hparams = yaml.safe_load((tmp_path / "csv" / "version_0" / "hparams.yaml").read_text())
    assert hparams["trainer"]["max_epochs"] == 1
    assert hparams["status"] == "finished"
    with (tmp_path / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "4"]
    assert len(list((tmp_path / "tb" / "version_0").glob("events*"))) == 1

    again = known_loggers(tmp_path, database)  # as another process would build them
    again["wandb"] = PutAside(WandbLogger(offline=True, save_dir=tmp_path))
    seen = Sees()
    options = {**OPTIONS, "max_epochs": 2, "resume": "auto", "callbacks": [seen]}
    fit(Regression(), tmp_path / "run", logger=again, **options)

    assert again["wandb"].logger._wandb_init["id"] == wandb_id
    assert again["wandb"].logger._wandb_init["resume"] == "allow"
    own = [JsonlLogger, MLFlowLogger, WandbLogger, CSVLogger, TensorBoardLogger]
    assert [type(logger) for logger in seen.found] == own
    assert seen.found[1] is again["mlflow"]
    [resumed] = client.search_runs([experiment.experiment_id])
    assert resumed.info.run_id == run.info.run_id
    assert resumed.info.status == "FINISHED"
    assert resumed.data.params == run.data.params  # they never change
    assert resumed.data.tags["since step 4/trainer/max_epochs"] == "2"
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert [loss.step for loss in losses] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(list((tmp_path / "tb" / "version_0").glob("events*"))) == 2
    assert (tmp_path / "csv" / "version_1" / "metrics.csv").exists()
    assert "WARNING" not in capfd.readouterr().err.replace("WARNING: Experiment", "")


def test_csv_keeps_what_the_loop_logs_while_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialect = dialect_of(CSVLogger(tmp_path))
    dialect.connect()
    writes, logged = threading.Event(), threading.Event()

    class Slow(csv.DictWriter):  # type: ignore[type-arg]
        def writerows(self, rows: Any) -> None:
            super().writerows(rows)
            writes.set()
            logged.wait(0.2)  # which is in vain, unless it comes between

    def log() -> None:
        assert writes.wait(20)
        dialect.logger.log_metrics({"mine": 2.0}, 2)
        logged.set()

    monkeypatch.setattr(csv, "DictWriter", Slow)
    loop = threading.Thread(target=log)
    loop.start()
    dialect.log({"theirs": 1.0}, 1)
    loop.join()
    dialect.logger.save()
    with (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2"]


def test_a_logger_of_ones_own(tmp_path: Path) -> None:
    logger = Elsewhere()
    Trainer(
        max_epochs=1,
        global_batch_size=4,
        log_every_n_steps=2,
        callbacks=False,
        run_dir=str(tmp_path),
        logger=logger,
    ).fit(Regression(), train=OPTIONS["train"])
    facts, first, status = logger.calls
    assert facts["trainer"]["max_epochs"] == 1
    assert facts["environment"]["world_size"] == 1
    assert first[0] == 2
    assert first[1].keys() >= {"train/loss", "epoch", "samples"}
    assert status == "success"
    assert logger.opened_in == [os.getpid(), "Elsewhere"]  # in its thread
    assert (tmp_path / "metrics.jsonl").exists()  # it came beside the default ones


@pytest.mark.parametrize("method", ["log_metrics", "finalize"])
def test_one_that_hangs_or_fails_does_not_hold_up_others(
    tmp_path: Path, method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    free = threading.Event()
    hanging, failing, well = Broken(method, free), Broken(method), Elsewhere()
    loggers = [LightningLogger(hanging, wait_s=0.3), LightningLogger(failing, wait_s=0.3), well]
    alone = time.monotonic()
    fit(Regression(), tmp_path / "alone", logger=[Elsewhere()], max_epochs=1, **OPTIONS)
    started = time.monotonic()
    result = fit(Regression(), tmp_path / "run", logger=loggers, max_epochs=1, **OPTIONS)
    more = time.monotonic() - started - (started - alone)
    free.set()
    assert more < 0.3 + 2  # for a machine that has other things to do
    assert result.step == 4
    assert len(well.calls) == 7
    assert well.calls[-1] == "success"
    lost = "5 of 5 events and its final status" if method == "log_metrics" else "its final status"
    err = capfd.readouterr().err
    assert f"WARNING: Broken lost {lost} (ConnectionError: no route)\n" in err
    assert err.count("Broken failed (ConnectionError: no route); it is tried again") == 1
    assert f"WARNING: Broken lost {lost} (its " in err


class Stateless(Elsewhere):
    """Cannot tell its state."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        if isinstance(self.state, Exception):
            raise self.state
        return {"client": self.state}


@pytest.mark.parametrize("state", [ConnectionError("the service is away"), object()])
def test_a_state_that_cannot_be_kept_stops_nothing(
    state: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = tmp_path / "external_runs.json"
    names.write_text("{")  # as a full disk leaves it
    options: dict[str, Any] = {"train": samples(8), "global_batch_size": 4}
    for epochs, resume in ((1, None), (2, "auto")):
        logger = [Stateless(state)]
        options |= {"max_epochs": epochs, "resume": resume, "logger": logger}
        assert fit(Regression(), tmp_path, **options).epoch == epochs
        assert logger[0].calls[-1] == "success"  # everything arrives
    warned = capsys.readouterr().err
    assert warned.count("Stateless has no state to keep in checkpoints (") == 2
    assert f"{names} is damaged" in warned


class Fails(Regression):
    """Fails on one rank, or gets a signal there."""

    def __init__(self, failing: int, how: str) -> None:
        super().__init__()
        self.failing, self.how = failing, how

    def before_optimizer_step(self) -> None:
        if self.run.step == 1 and self.run.rank == self.failing:
            if self.how == "raise":
                raise ZeroDivisionError
            os.kill(os.getpid(), signal.SIGTERM)


class Tells(Elsewhere):
    """Writes what it is told into a file, and takes its time for the end."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.path.write_text("running")

    def finalize(self, status: str) -> None:
        time.sleep(0.3)
        self.path.write_text(status)


def test_a_failure_on_another_rank_is_told(tmp_path: Path) -> None:
    path = tmp_path / "status"
    with pytest.raises(ZeroDivisionError):
        fit_on(2, Fails(1, "raise"), tmp_path, logger=[Tells(path)], max_epochs=1, **OPTIONS)
    assert path.read_text() == "failed"


def test_a_stop_by_a_signal_is_told(tmp_path: Path) -> None:
    seen: list[str] = []

    class Status(Elsewhere):
        def finalize(self, status: str) -> None:
            seen.append(status)

    with pytest.raises(SystemExit):
        fit(Fails(0, "signal"), tmp_path, logger=[Status()], max_epochs=1, **OPTIONS)
    assert seen == ["failed"]  # Lightning has no better word


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^WandbLogger\(log_model=\.\.\.\): checkpoints are not"):
        Trainer(max_epochs=1, logger=WandbLogger(log_model="all"))
    with pytest.raises(ValueError, match=r"^TensorBoardLogger\(log_graph=\.\.\.\): the model's"):
        adopt(TensorBoardLogger(tmp_path, log_graph=True))
    with pytest.raises(ValueError, match=r"^LightningLogger\(logger=3\): it must be an object"):
        LightningLogger(3)
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        LightningLogger(Elsewhere(), capacity=0)


def test_they_travel_to_other_processes_unopened(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loggers = known_loggers(tmp_path, database)
    loggers["wandb"] = WandbLogger(offline=True, save_dir=tmp_path, id="mine")
    for logger in adopt(loggers).values():
        if isinstance(logger, LightningLogger):
            there = cloudpickle.loads(cloudpickle.dumps(logger))
            assert type(there.logger) is type(logger.logger)
            assert there.state_dict() == logger.state_dict()
            assert getattr(there.logger, "_experiment", None) is None
    assert not (tmp_path / "wandb").exists()
    reached = cloudpickle.loads(cloudpickle.dumps(adopt(loggers["mlflow"])))
    reached._dialect.connect()
    assert reached.logger.experiment.get_run(reached.logger.run_id).info.status == "RUNNING"


def test_what_is_no_lightning_logger_stays_as_it_is() -> None:
    given = {"a": None, "b": {"_target_": "x"}, "c": [False, JsonlLogger()], "d": "csv"}
    assert adopt(given) == given
