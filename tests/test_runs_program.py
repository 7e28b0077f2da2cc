"""The list of runs, made of folders that never ran."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from reporting.folders import write_events

from trainer.lock import locked
from trainer.runs import main


def write_run(folder: Path, losses: list[float | None], **facts: Any) -> Path:
    """Write what a run leaves that has validated every ten steps; ``facts`` go into run.json."""
    folder.mkdir(parents=True)
    config = {"task": {"lr": 0.1}, "trainer": {"run_dir": str(folder), "devices": 1}}
    usual = {"status": "finished", "step": 0, "total_steps": 100, "world_size": 2}
    for number, loss in enumerate(losses, start=1):
        write_events(folder, {"step": 10 * number, "train/loss": 1.0, "val/loss": loss})
    (folder / "run.json").write_text(json.dumps({**usual, "config": config, **facts}))
    return folder


def config(lr: float, **checkpoint: Any) -> dict[str, Any]:
    return {"task": {"lr": lr}, "trainer": {"devices": 1, "checkpoint": checkpoint}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path / "sweep" / "2", [0.5, 0.3, 0.4], config=config(0.1))
    write_run(tmp_path / "sweep" / "10", [0.6, 0.2], config=config(0.01))
    error = "ValueError: the loss is NaN\nand more"
    write_run(tmp_path / "b", [], config=config(1.0), status="failed", error=error)
    return tmp_path


def rows(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    main([*map(str, arguments), "--json"])
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_the_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(folder)])
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines()] == [
        ["run", "state", "step", "epoch", "ranks", "time", "val/loss", "best", "lr"],
        ["b", "failed", "0/100", "-", "2", "-", "-", "-", "1"],
        ["sweep/2", "finished", "30", "0", "2", "0:00:08", "0.4", "0.3", "0.1"],
        ["sweep/10", "finished", "20", "0", "2", "0:00:05", "0.2", "0.2", "0.01"],
    ]
    assert err == f"note: {folder / 'b'} failed: ValueError: the loss is NaN\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["b", "sweep/2", "sweep/10"]),
        (["--sort", "val/loss"], ["sweep/10", "sweep/2", "b"]),
        (["--sort", "val/loss", "--reverse"], ["sweep/2", "sweep/10", "b"]),
        (["--sort", "val/loss", "--metric", "val/loss:max"], ["sweep/10", "sweep/2", "b"]),
        (["--sort", "lr"], ["sweep/10", "sweep/2", "b"]),
        (["--sort", "task.lr", "--reverse"], ["b", "sweep/2", "sweep/10"]),
        (["--sort", "state"], ["b", "sweep/2", "sweep/10"]),
    ],
)
def test_the_order(
    arguments: list[str], expected: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [row["run"] for row in rows(capsys, folder, *arguments)] == expected


def test_the_best_value_is_what_the_run_says_or_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a", [None, 0.5, 0.7, 0.6], config=config(1, monitor="val/loss"))
    (row,) = rows(capsys, tmp_path)
    assert [row[f"{what}val/loss"] for what in ("", "best ", "step of best ")] == [0.6, 0.5, 20]
    (row,) = rows(capsys, tmp_path, "--metric", "val/loss:max")
    assert [row[f"{what}val/loss"] for what in ("", "best ", "step of best ")] == [0.6, 0.7, 30]
    write_run(tmp_path / "m", [0.5], config=config(1, monitor="train/loss", mode="max"))
    monitored = rows(capsys, tmp_path)[1]
    assert (monitored["best train/loss"], monitored["best val/loss"]) == (1.0, 0.5)


def test_what_no_event_tells_is_in_run_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a", [], step=7, metrics={"val/loss": 0.25, "train/loss": None})
    (row,) = rows(capsys, tmp_path)
    assert (row["step"], row["val/loss"], row["best val/loss"]) == (7, 0.25, 0.25)


def test_a_run_that_validates_nothing_shows_its_training_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_events(tmp_path, {"step": 10, "train/loss": 2.0})
    (row,) = rows(capsys, tmp_path)
    assert (row["run"], row["train/loss"], row["state"]) == (tmp_path.name, 2.0, "unknown")


def test_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, status in (
        *(("a", "running"), ("b", "running"), ("c", "stopped by SIGTERM"), ("d", "finished")),
    ):
        write_run(tmp_path / name, [], status=status)
    write_events(tmp_path / "b", {"step": 50})  # newer than the file
    with locked(tmp_path / "a"):
        found = rows(capsys, tmp_path)
    assert [row["state"] for row in found] == ["running", "died", "stopped", "finished"]
    assert found[1]["step"] == 50


def test_what_is_no_run_is_left_out_and_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "images" / "deep").mkdir(parents=True)
    (folder / "images" / "deep" / "cat.png").write_bytes(b"")
    (folder / "empty" / "nested").mkdir(parents=True)
    (folder / "sweep" / "2" / "tensorboard").mkdir()
    (folder / "sweep" / "2" / "other").mkdir()
    (folder / "sweep" / "2" / "other" / "file").write_text("")
    (folder / "torn").mkdir()
    (folder / "torn" / "metrics.jsonl").write_text('{"loss": 1}\nnull\n{"step":')
    (folder / "torn" / "run.json").write_text("{")
    (folder / "half" / "checkpoints" / "step-00000010").mkdir(parents=True)
    main([str(folder), "--csv"])
    out, err = capsys.readouterr()
    assert [row["run"] for row in csv.DictReader(io.StringIO(out))] == ["b", "sweep/2", "sweep/10"]
    left_out = [line for line in err.splitlines() if "left out" in line]
    assert len(left_out) == 3
    assert any(f"{folder / 'images'}: no run in it" in line for line in left_out)
    assert any(f"{folder / 'torn' / 'run.json'} is damaged" in line for line in left_out)
    assert any("step-00000010 is no checkpoint" in line for line in left_out)


def test_a_broken_run_file_leaves_what_the_events_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (write_run(tmp_path / "a", [0.5]) / "run.json").write_text("{")
    main([str(tmp_path), "--json"])
    out, err = capsys.readouterr()
    (row,) = json.loads(out)
    assert (row["step"], row["val/loss"], row["state"]) == (10, 0.5, "unknown")
    assert "run.json is damaged" in err


@pytest.mark.parametrize(
    "facts",
    [
        {"metrics": [1]},
        {"metrics": {"val/loss": "low"}},
        {"time_s": "long"},
        {"time_s": 1e300},
        {"time_s": math.nan},
        {"status": None},
        {"error": {}},
    ],
)
def test_files_of_somebody_else_do_not_end_the_table(
    facts: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(folder / "other", [0.5], **facts)
    events = [{"step": None, "val/loss": 1.0}, {"step": 20, "val/loss": "bad", "größe": 2.0}]
    with (folder / "other" / "metrics.jsonl").open("a") as file:
        for event in events:
            file.write(json.dumps({"epoch": 0, "samples": 1, "time_s": 1.0, **event}) + "\n")
    main([str(folder), "--json", "--metric", "val/loss", "--metric", "größe"])
    out, err = capsys.readouterr()
    (row,) = (row for row in json.loads(out) if row["run"] == "other")
    assert (row["step"], row["val/loss"], row["größe"]) == (20, 0.5, 2.0)
    assert "is not of a run of this trainer" in err


def test_a_terminal_that_is_too_narrow_hides_no_column(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "30")
    main([str(folder)])
    first = capsys.readouterr().out.splitlines()[1]
    assert first.split()[0] == "b"
    assert "failed" in first


def test_options_of_several_tasks_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = {"_target_": "my.tasks.One", "a": {"lr": 1}, "b": {"lr": 1}, "s": []}
    other = {"_target_": "my.tasks.Other", "a": {"lr": 2}, "b": {"lr": 2}, "x": [1]}
    write_run(tmp_path / "a", [0.5], config={"task": one})
    write_run(tmp_path / "b", [0.5], config={"task": other})
    main([str(tmp_path)])
    heads, first, _ = (line.split() for line in capsys.readouterr().out.splitlines())
    assert heads[-5:] == ["task", "a.lr", "b.lr", "s", "x"]
    assert first[-5:] == ["One", "1", "1", "[]", "-"]


def test_two_runs_are_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = [str(folder / "sweep" / "10"), str(folder / "sweep" / "2")]
    main(two)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["10", "2", "difference"]
    assert ["task.lr", "0.01", "0.1"] in lines
    assert ["val/loss", "0.2", "0.4", "+0.2"] in lines
    assert ["best", "val/loss", "0.2", "0.3", "+0.1"] in lines
    assert ["train/loss", "1", "1"] in lines
    main([*two, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [row["run"] for row in found["runs"]] == ["10", "2"]
    assert found["options"] == {"task.lr": [0.01, 0.1]}
    assert found["metrics"]["best val/loss"] == [0.2, 0.3]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["{}/none"], "error: there is no folder .*/none"),
        (["{}/empty"], "error: there is no run in .*/empty"),
        (["{}", "--metric", "val/x"], "error: no run has measured val/x"),
        (["{}", "--sort", "val/x"], "error: cannot sort by val/x; there are: run, folder, state"),
    ],
)
def test_mistakes(arguments: list[str], match: str, folder: Path) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(SystemExit, match=match):
        main([argument.format(folder) for argument in arguments])
