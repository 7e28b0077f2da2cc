"""From a config to a run: what composes, what is refused and how, and what each mode does."""

from __future__ import annotations

import inspect
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from trainer import DataModule, TaskModule, cli, load_predictions, load_task
from trainer.config import TrainerConfig
from trainer.hydra.command_line import Place, check_command_line
from trainer.hydra.composition import PRESETS, check_config, register_configs
from trainer.hydra.flags import check_flags, read_arguments

ROOT = Path(__file__).resolve().parents[1]

# CONFIG leaves _self_ out, as projects may: hydra_main fixes the order and silences this.
pytestmark = pytest.mark.filterwarnings("ignore:.*Defaults list is missing `_self_`")

CONFIG = """\
defaults:
  - trainer: default
task:
  _target_: test_cli.Line
  width: ${width}
data:
  _target_: test_cli.Points
trainer:
  max_epochs: 2
  global_batch_size: 64
  checkpoint: {keep: 1}
width: 1
"""

built: list[str] = []


class Line(TaskModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        built.append("task")
        self.layer = torch.nn.Linear(width, 1)

    def forward(self, batch):
        return self.layer(batch)

    def loss(self, outputs, batch):
        return (outputs - 2 * batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Points(DataModule):
    def __init__(self) -> None:
        built.append("data")

    def train_dataset(self):
        return [torch.tensor([float(i)]) for i in range(8)]

    val_dataset = test_dataset = predict_dataset = train_dataset


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A config folder with one config, which lacks nothing."""
    conf = tmp_path / "conf"
    conf.mkdir()
    (conf / "app.yaml").write_text(CONFIG)
    (conf / "group").mkdir()
    (conf / "group" / "there.yaml").write_text("a: 1")
    return str(conf)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register_configs()
    yield
    register_configs()


def composed(folder: str, *overrides: str, name: str = "app") -> DictConfig:
    with initialize_config_dir(folder, version_base="1.3"):
        return compose(name, overrides=list(overrides))


def check(folder: str, *overrides: str, multirun: bool = False) -> None:
    check_command_line(Place(folder, "app"), list(overrides), multirun)


def refusal(folder: str, *overrides: str, multirun: bool = False) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the callers look at the message
        check(folder, *overrides, multirun=multirun)
    return str(caught.value)


def test_a_config_gets_every_option_typed_and_the_defaults(folder: str) -> None:
    cfg = composed(folder, "mode=test", "trainer.devices=2")
    assert OmegaConf.get_type(cfg.trainer) is TrainerConfig
    assert (cfg.trainer.max_epochs, cfg.trainer.devices, cfg.trainer.seed) == (2, 2, 0)
    assert (cfg.trainer.checkpoint.keep, cfg.trainer.checkpoint.mode) == (1, "min")
    assert (cfg.mode, cfg.test, cfg.ckpt_path, cfg.optimized_metric) == ("test", False, None, None)
    assert list(cfg.callbacks) == ["learning_rate", "throughput", "progress"]
    assert list(cfg.logger) == ["jsonl", "tensorboard"]
    assert check_config(cfg)["global_batch_size"] == 64


def test_callbacks_are_added_switched_off_and_left_out(folder: str) -> None:
    adding = ["+callbacks=early_stopping", "+callbacks.mine={_target_: my.Callback}"]
    cfg = composed(folder, *adding, "callbacks.progress=null", "~logger.tensorboard")
    assert [*cfg.callbacks][2:] == ["progress", "early_stopping", "mine"]
    assert cfg.callbacks.progress is None
    assert list(cfg.logger) == ["jsonl"]
    assert cfg.callbacks.early_stopping == {
        "_target_": "trainer.callbacks.early_stopping.EarlyStopping",
        "monitor": "val/loss",
        "mode": "min",
        "patience": 3,
        "min_delta": 0.0,
    }


def test_none_drops_those_of_the_project_too(folder: str) -> None:
    Path(folder, "app.yaml").write_text(CONFIG + "callbacks: {mine: {_target_: my.Callback}}\n")
    assert "mine" in composed(folder).callbacks
    cfg = composed(folder, "+callbacks=none", "+logger=none")
    assert (cfg.callbacks, cfg.logger) == (None, None)
    assert (cli._nodes(cfg, "callbacks"), cli._nodes(cfg, "logger")) == (False, False)
    cfg = composed(folder, "+callbacks=none", "+callbacks.one={_target_: my.Callback}")
    assert list(cfg.callbacks) == ["one"]


@pytest.mark.parametrize("choice", ["callbacks=early_stopping", "+callbacks=early_stopping"])
def test_a_choice_adds_to_what_is_there(folder: str, choice: str) -> None:
    Path(folder, "app.yaml").write_text(CONFIG + "callbacks: {mine: {_target_: my.Callback}}\n")
    there = ["learning_rate", "throughput", "progress", "mine"]
    assert sorted(composed(folder, choice).callbacks) == sorted([*there, "early_stopping"])
    Path(folder, "logger").mkdir()
    for name in "one", "other":
        Path(folder, "logger", f"{name}.yaml").write_text(f"{name}: {{_target_: my.Logger}}")
    cfg = composed(folder, "logger=[one,other]")
    assert list(cfg.logger) == ["jsonl", "tensorboard", "one", "other"]


@pytest.mark.parametrize("path", sorted(PRESETS.glob("*/*.yaml")), ids=lambda path: path.stem)
def test_a_preset_names_arguments_that_its_class_has(path: Path) -> None:
    nodes: Any = OmegaConf.to_container(OmegaConf.load(path))
    assert list(nodes) == [path.stem]
    for node in nodes.values():
        parameters = inspect.signature(get_class(node.pop("_target_"))).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        assert takes_any or set(node) <= set(parameters)


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "conf").glob("*.yaml")))
def test_the_recipes_compose(name: str) -> None:
    cfg = composed(str(ROOT / "conf"), name=name)
    assert check_config(cfg)["max_epochs"] > 0
    assert cfg.task._target_.startswith("recipes.")


@pytest.mark.parametrize("name", sorted(p.stem for p in (ROOT / "conf/experiment").glob("*.yaml")))
def test_the_experiments_compose(name: str) -> None:
    check_config(composed(str(ROOT / "conf"), f"experiment={name}", name="mnist"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.devcies=4"], "trainer: there is no option 'devcies'; did you mean devices?"),
        (["+trainer.devcies=4"], "did you mean devices?"),
        (["trainer.devices=four"], "devices='four' is not allowed; it must be a whole number"),
        (["trainer.devices=0"], "devices=0 is not allowed"),
        (["trainer.max_epochs=abc"], "max_epochs='abc' is a string; it must be a whole number"),
        (["trainer.max_epochs=1.5"], "max_epochs=1.5 is a floating-point number"),
        (["trainer.shuffle=3"], "shuffle=3 is a whole number; it must be true or false"),
        (["trainer.checkpoint.kep=4"], "'checkpoint.kep'; did you mean checkpoint.keep?"),
        (
            ["trainer.accumulate_grad_batches=4", "trainer.devices=2"],
            "set micro_batch_size=8 (global_batch_size 64 / (4 x world size 2))",
        ),
        (["trainer.strategy=ddp_spawn"], "set strategy=ddp; how the ranks are started"),
        (["trainer.max_epochs=null"], "neither max_epochs nor max_steps is given"),
        (["trainer.max_epochs=???"], "the config leaves trainer.max_epochs open (???)"),
        (["trainer.max_epochs=${nothing}"], "Interpolation key 'nothing' not found"),
        (["trainer=other"], "Could not find 'trainer/other'"),
        (["trainer.resume=auto"], "set run_dir=<folder of the run to go on with>"),
        (["mdoe=test"], "there is no key 'mdoe' in the config; did you mean mode?"),
        (["devices=2"], "it is an option of the trainer: write trainer.devices."),
        (["checkpoint.keep=2"], "it is an option of the trainer: write trainer.checkpoint.keep=2"),
        (["trainer.devices=5000"], "it must be a whole number of at least 1 and at most 512 or a"),
        (["gpus=2"], "it is called devices here: set devices='2'"),
        (["task.widht=2"], "did you mean task.width? (+task.widht=... adds a key of your own)"),
        (["task.zzz=2", "task.yyy=3"], "there are: _target_, width."),
        (["mode=Fit"], "did you mean mode=fit?"),
        (["plan.steps=3"], "plan.steps=3 with mode=fit has no effect; set mode=plan, or leave it"),
        (["mode=verify", "plan.steps=3"], "plan.steps=3 with mode=verify has no effect"),
        (["mode=test", "trainer.profile=startup"], "set mode=fit, or leave it out"),
        (["mode=validate", "test=true"], "test=true with mode=validate has no effect"),
        (["mode=train"], "mode=train is not known; it must be one of fit, validate, test, predict"),
        (["test=maybe"], "it must be true or false"),
        (["ckpt_path=best"], "ckpt_path=best with mode=fit"),
        (["mode=test", "ckpt_path=best"], "name the folder of the run that trained"),
        (["task=null"], "the config's task has no _target_"),
        (["~task._target_"], "the config's task has no _target_"),
        (["data=3"], "the config's data has no _target_"),
        (["+max_epochs=3"], "it is an option of the trainer: write trainer.max_epochs."),
        (["+callback=3"], "nothing reads the config's key 'callback'; did you mean callbacks?"),
        (["trainer.lr=0.1"], "the optimizer belongs to the task"),
        (["trainer.steps=10"], "it is called max_steps here: set max_steps=10"),
        (
            ["+experiment=smoke"],
            "there is no config group 'experiment'; there are: callbacks, group",
        ),
        (["logger=null"], "to have none at all, write logger=none"),
        (["callbacks=[]"], "to have none at all, write callbacks=none"),
        (
            ["task._target_=test_cli.Lime"],
            "task cannot be built from test_cli.Lime: test_cli has n",
        ),
        (["task._target_=null"], "task._target_ is None; give the import path of a class"),
        (["+callbacks.x={_target_: trainer.Calback}"], "did you mean trainer.Callback?"),
        (["~trainer.max_epochs"], "cannot be taken out; write trainer.max_epochs=null"),
        (["callbacks=nothing"], "Could not find 'callbacks/nothing'"),
        (["trainer.devices=1,2"], "is several values; add --multirun"),
        (["trainer.run_dir=/dev/null/x"], "run_dir /dev/null/x cannot be written: /dev/null is"),
        (["hydra.run.dir=/dev/null/y"], "run_dir /dev/null/y cannot be written: /dev/null is"),
    ],
)
def test_a_mistake_on_the_command_line(folder: str, overrides: list[str], words: str) -> None:
    assert words in refusal(folder, *overrides)


def test_a_mistake_in_a_file(folder: str) -> None:
    Path(folder, "app.yaml").write_text(CONFIG + "trainr: {devices: 2}\n")
    assert "the config's key 'trainr'; did you mean trainer?" in refusal(folder)
    Path(folder, "app.yaml").write_text(CONFIG.replace("max_epochs", "num_train_epochs"))
    assert "it is called max_epochs here: set max_epochs=2" in refusal(folder)
    Path(folder, "app.yaml").write_text(CONFIG.replace("max_epochs: 2", "max_epochs: two"))
    assert "max_epochs='two' is a string" in refusal(folder)
    Path(folder, "app.yaml").write_text(CONFIG + "task: {a: b: c}\n")
    assert re.search(r'a config is not YAML: .*app.yaml", line \d+, column \d+', refusal(folder))
    Path(folder, "app.yaml").write_text(CONFIG + "# café\n", encoding="latin-1")
    assert re.search(r"app.yaml: .* codec can't decode byte 0xe9 .*; save it as U", refusal(folder))


def test_a_typed_group_of_the_project_is_checked(folder: str) -> None:
    from hydra.core.config_store import ConfigStore

    @dataclass
    class Typed:
        _target_: str = "test_cli.Line"
        width: int = 1

    ConfigStore.instance().store(group="task", name="typed", node=Typed)
    check(folder, "+task=typed", "task.width=3")
    assert refusal(folder, "+task=typed", "task.width=abc") == (
        "task.width=abc: Value 'abc' of type 'str' could not be converted to Integer"
    )


def test_a_file_holds_options_for_every_mode(folder: str) -> None:
    Path(folder, "app.yaml").write_text(CONFIG + "plan: {steps: 3}\ntest: true\n")
    check(folder)
    check(folder, "mode=validate")


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["+own=3"],
        ["++own=word"],
        ["+own=word", "trainer.run_dir=${own}"],
        ["+group=there"],
        ["+seed=3", "trainer.seed=${seed}"],
        ["+own=word-${task.width}"],
        ["+own=word", "hydra.run.dir=runs/${own}"],
        ["hydra.mode=MULTIRUN", "task.width=1,2"],
        ["trainer.run_dir=${hydra:runtime.cwd}/runs"],
        ["mode=validate", "trainer.max_epochs=null"],
        ["mode=validate", "test=false", "trainer.profile=null"],
        ["mode=plan", "plan.steps=3"],
        ["trainer.profile=startup", "test=true"],
        ["mode=test", "ckpt_path=last", "trainer.run_dir=runs/mine"],
    ],
)
def test_not_a_mistake(folder: str, overrides: list[str]) -> None:
    check(folder, *overrides)


def test_each_value_of_a_sweep_is_checked(folder: str) -> None:
    check(folder, "trainer.devices=1,2", "task.width=1,2", "trainer.seed=range(3)", multirun=True)
    message = refusal(folder, "trainer.devices=1,2", "trainer.max_steps=1,two", multirun=True)
    assert "max_steps='two' is a string" in message


def test_a_sweep_that_stands_in_a_file_is_checked(folder: str) -> None:
    params = "hydra: {mode: MULTIRUN, sweeper: {params: {trainer.max_steps: 'choice(1,two)'}}}\n"
    Path(folder, "app.yaml").write_text(CONFIG + params)
    assert "max_steps='two' is a string" in refusal(folder)
    check(folder, "trainer.max_steps=1,3")
    assert "every job would write there" in refusal(
        folder, "trainer.max_steps=1", "trainer.run_dir=x"
    )


@pytest.mark.parametrize("values", ["glob(*)", "there,other"])
def test_a_sweep_over_files(folder: str, values: str) -> None:
    Path(folder, "group", "other.yaml").write_text("a: 2")
    check(folder, f"+group={values}", multirun=True)


def test_more_configs_in_another_folder(folder: str, tmp_path: Path) -> None:
    more = tmp_path / "more"
    more.mkdir()
    (more / "own.yaml").write_text("defaults: [app, _self_]\ntrainer: {max_epochs: 0}\n")
    with pytest.raises(ValueError, match="max_epochs=0 is not allowed"):
        check_command_line(Place(folder, "own", str(more)), [], False)
    with pytest.raises(ValueError, match=r"--config-dir .*nowhere: there is no such folder"):
        check_command_line(Place(folder, "app", str(more / "nowhere")), [], False)


def test_ranks_of_torchrun_do_not_change_folder(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    check(folder)
    assert "only rank 0 knows the folder" in refusal(folder, "hydra.job.chdir=true")


def arguments(monkeypatch: pytest.MonkeyPatch, *argv: str) -> list[str]:
    """What Hydra reads for a command line."""
    monkeypatch.setattr(sys, "argv", ["program", *argv])
    check_flags(read_arguments())
    return sys.argv[1:]


def test_flags_may_stand_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["a=1", "--multirun", "~b", "--config-name", "other", "c='d e'"]
    expected = ["a=1", "~b", "c='d e'", "--multirun", "--config-name", "other"]
    assert arguments(monkeypatch, *given) == expected
    assert arguments(monkeypatch, "a=1", "--info") == ["a=1", "--info"]
    assert arguments(monkeypatch, "logger=none", "a=1") == ["+logger=none", "a=1"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--cfg", "job", "--multirun"], "--multirun and --cfg: only one of them at a time"),
        (["--resolve"], "add --cfg job"),
        (["-sc", "install=bash"], "a shell completes the arguments of a command, and not of py"),
        (["a=1", "--trainer.devices=2"], "has no dashes; write trainer.devices=2"),
        (["--task.width", "2"], "has no dashes; write task.width=..."),
    ],
)
def test_flags_that_cannot_be_taken(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], words: str
) -> None:
    monkeypatch.setattr("trainer.hydra.flags.program", lambda: "python -m recipes.mnist")
    with pytest.raises(ValueError, match=words):
        arguments(monkeypatch, *argv)


def test_a_sweep_under_torchrun_is_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    assert "every rank would run a sweep" in refusal(folder, "task.width=1,2", multirun=True)


@pytest.fixture
def cfg(folder: str, tmp_path: Path) -> DictConfig:
    return composed(folder, f"trainer.run_dir={tmp_path}/run", "+callbacks=none", "+logger=none")


def test_fit_gives_the_result_or_the_optimized_metric(cfg: DictConfig, tmp_path: Path) -> None:
    result = cli.run(cfg)
    assert (result.step, result.epoch, result.run_dir) == (2, 2, tmp_path / "run")
    assert isinstance(load_task(result.last_checkpoint), Line)  # its width was ${width}
    cfg.optimized_metric = "val/loss"
    assert cli.run(cfg) == result.metrics["val/loss"]
    cfg.optimized_metric = ["val/loss", "train/loss"]
    assert cli.run(cfg) == [result.metrics[name] for name in cfg.optimized_metric]
    assert "test/loss" not in result.metrics
    cfg.test, cfg.optimized_metric = True, "val/accuracy"
    with pytest.raises(ValueError, match=r"val/accuracy was not measured; there are: .*test/loss"):
        cli.run(cfg)


def test_validate_and_test_print_their_metrics(
    cfg: DictConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    cfg.mode, cfg.optimized_metric = "validate", "test/loss"
    metrics = cli.run(cfg)
    shown = capfd.readouterr().out
    assert f"val/loss  {metrics['val/loss']:.6g}\n" in shown
    assert "weights: as the task is built (no ckpt_path)\n" in shown
    cfg.mode = "test"
    assert cli.run(cfg) == pytest.approx(metrics["val/loss"])  # the same weights and data


def test_the_weights_that_are_tested_are_named(
    cfg: DictConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = cli.run(cfg)
    capfd.readouterr()
    cfg.mode = "validate"
    assert result.best_checkpoint != result.last_checkpoint
    cfg.ckpt_path = "last"
    assert cli.run(cfg) == {"val/loss": result.metrics["val/loss"]}
    assert f"weights: {result.last_checkpoint}, step 2\n" in capfd.readouterr().out
    cfg.ckpt_path = str(tmp_path / "run")  # a run stands for its best
    cli.run(cfg)
    assert f"weights: {result.best_checkpoint}, step 1\n" in capfd.readouterr().out
    cfg.ckpt_path = str(result.last_checkpoint / "model.safetensors")
    cli.run(cfg)
    assert f"weights: {cfg.ckpt_path}\n" in capfd.readouterr().out
    cfg.ckpt_path = "step-7"
    with pytest.raises(ValueError, match="step-7 is no checkpoint"):
        cli.run(cfg)


def test_predict_keeps_the_predictions(cfg: DictConfig, tmp_path: Path) -> None:
    cfg.mode = "predict"
    predictions = cli.run(cfg)
    assert predictions.shape == (8, 1)
    assert torch.equal(torch.load(tmp_path / "run" / "predictions.pt"), predictions)


def test_predictions_may_go_into_a_folder(
    cfg: DictConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg.mode, cfg.predictions_dir = "predict", str(tmp_path / "new")
    assert cli.run(cfg) == tmp_path / "new"
    assert load_predictions(tmp_path / "new").shape == (8, 1)
    assert f"predictions: {tmp_path / 'new'}\n" in capsys.readouterr().out
    assert not (tmp_path / "run" / "predictions.pt").exists()
    cfg.mode = "fit"
    with pytest.raises(ValueError, match=r"predictions_dir=.* with mode=fit: it is the folder"):
        cli.run(cfg)


def test_the_trainer_comes_first_and_gets_nodes(
    cfg: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fake:
        run_config: ClassVar[dict[str, Any]] = {}

        def __init__(self, **options: Any) -> None:
            built.append("trainer")
            self.options = options

        def fit(self, task: Any, data: Any, test_best: bool) -> None:
            assert type(task) is Line
            assert type(data) is Points
            given.append(self.options)

    given: list[dict[str, Any]] = []
    monkeypatch.setattr("trainer.api.Trainer", Fake)
    built.clear()
    cfg.logger = {"mine": {"_target_": "my.Logger", "path": "${mode}"}}
    assert cli.run(cfg) is None  # as on a rank other than 0
    assert built == ["trainer", "data", "task"]
    assert given[0]["logger"] == {"mine": {"_target_": "my.Logger", "path": "fit"}}
    assert given[0]["max_epochs"] == 2
    assert given[0]["checkpoint"]["keep"] == 1
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict)
    del plain["callbacks"], plain["logger"]
    cli.run(plain)
    assert (given[1]["callbacks"], given[1]["logger"]) == (None, None)


def test_a_program_passes_a_config_on_and_finds_its_own_folder(folder: str) -> None:
    @cli.hydra_main("../conf", "mnist")
    def main(cfg: Any) -> Any:
        return cfg

    assert main({"a": 1}) == {"a": 1}


PROGRAM = """\
import sys
from trainer import hydra_main, run
from trainer.diagnosis.failures import RankError
@hydra_main("conf", "app")
def main(cfg):
    if cfg.get("fail"):
        raise RuntimeError("broken")
    if cfg.get("kill"):
        raise RankError("rank 1 was killed by SIGKILL")
    print("step", run(cfg).step)
    if cfg.get("interrupt"):
        raise KeyboardInterrupt
if __name__ == "__main__":
    main()
"""


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def program(folder: str, *arguments: str, is_heard: bool = True) -> Ended:
    """Run PROGRAM in a fork, which has its imports; its output may be one that nobody reads."""
    Path(folder).with_name("program.py").write_text(PROGRAM)
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        if (pid := os.fork()) == 0:
            try:
                os.chdir(Path(folder).parent)
                reader, writer = os.pipe()
                os.close(reader)
                os.dup2(out.fileno() if is_heard else writer, 1)
                os.dup2(err.fileno(), 2)
                for name, number in (("stdout", 1), ("stderr", 2)):
                    setattr(sys, name, os.fdopen(number, "w", closefd=False))
                sys.argv, status = ["program.py", *arguments], 0
                try:
                    runpy.run_path("program.py", run_name="__main__")
                except SystemExit as end:
                    status = int(str(end.code))
                sys.stdout.flush()  # as at the end of every program
                sys.stderr.flush()
                os._exit(status)
            finally:
                os._exit(99)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0)
        err.seek(0)
        return Ended(status, out.read(), err.read())


def test_a_mistake_is_one_line_and_leaves_no_folder(folder: str) -> None:
    done = program(folder, "trainer.devices=four", "hydra.run.dir=made")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        "error: trainer: devices='four' is not allowed; it must be a whole number of at least 1 "
        "and at most 512 or auto\n"
    )
    assert sorted(os.listdir(Path(folder).parent)) == ["conf", "program.py"]


def test_a_run_has_one_folder_and_no_noise(folder: str) -> None:
    script = Path(folder).with_name("program.py")
    script.write_text(PROGRAM)
    done = subprocess.run(  # as users start it
        [sys.executable, script, "trainer.run_dir=made", "+logger=none"],
        cwd=script.parent,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("step 2\n")
    assert sorted(os.listdir(Path(folder).parent)) == ["conf", "made", "program.py"]
    made = os.listdir(Path(folder).parent / "made")
    assert sorted(made) == [".hydra", ".lock", "checkpoints", "run.json"]


@pytest.mark.parametrize("flags", [["--help"], ["--cfg", "job"]])
def test_what_only_prints_ends_in_silence_when_nobody_reads(folder: str, flags: list[str]) -> None:
    done = program(folder, *flags, is_heard=False)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_a_run_whose_output_nobody_reads_says_so(folder: str) -> None:
    done = program(folder, is_heard=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ended, because whoever read the output has closed it")
    assert done.stderr.count("\n") == 1


def test_a_failure_is_printed_once_without_hydra(folder: str) -> None:
    done = program(folder, "+fail=true")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.endswith("RuntimeError: broken\n")
    assert done.stderr.count("Traceback") == 1
    assert "hydra/" not in done.stderr


def test_a_killed_rank_is_one_line(folder: str) -> None:
    done = program(folder, "++kill=true")
    assert (done.returncode, done.stderr) == (1, "error: rank 1 was killed by SIGKILL\n")


def test_an_interrupt_ends_with_130(folder: str) -> None:
    done = program(folder, "+interrupt=true", "trainer.run_dir=made")
    run_dir = Path(folder).parent / "made"
    go_on = f"interrupted; to go on: trainer.run_dir={run_dir} trainer.resume=auto\n"
    assert (done.returncode, done.stderr) == (130, go_on)
