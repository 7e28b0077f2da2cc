from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint.checkpoints import snapshot, write
from reporting.folders import end, start, trained, write_events

from trainer.lock import locked
from trainer.reporting import journal
from trainer.reporting.record import read_record


def test_values_are_where_their_events_are(tmp_path: Path) -> None:
    write_events(
        tmp_path,
        {"step": 5, "train/loss": 2.0},
        {"step": 5, "val/loss": 3.0},
        {"step": 10, "train/loss": None},
    )
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 15, "train/lo')  # a kill
    record = read_record(tmp_path)
    assert record.clocks["step"].tolist() == [5, 5, 10]
    train, val = record.series["train/loss"], record.series["val/loss"]
    assert train.at.tolist() == [0, 2]
    assert train.values[0] == 2
    assert math.isnan(train.values[1])
    assert (val.at.tolist(), val.values.tolist()) == ([1], [3.0])


def test_what_happened_belongs_to_its_start(tmp_path: Path) -> None:
    start(tmp_path)
    warned = {"step": 3, "text": "careful", "category": "UserWarning"}
    journal.note(tmp_path, "warning", warned)
    journal.note(tmp_path, "memory", {"step": 5, "by_rank_mb": [200.0, 210.0]})
    journal.note(tmp_path, "memory", {"step": 9, "by_rank_mb": [300.0, 310.0]})
    end(tmp_path, 10, "failed", error="RuntimeError: no")
    start(tmp_path, 10)
    first, second = read_record(tmp_path).starts
    assert first.warnings == {"careful": "UserWarning, step 3"}
    assert first.memory_mb == [300, 310]
    assert first.end is not None
    assert first.end["error"] == "RuntimeError: no"
    assert (second.facts["step"], second.warnings, second.end) == (10, {}, None)
    assert read_record(tmp_path).memory_mb == [300, 310]


def test_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    write(folder, snapshot(2, metric=0.3), snapshot(4, metric=0.1), snapshot(6, metric=0.2))
    (folder / "step-00000002" / "manifest.json").write_text("{")
    damaged, best, last = read_record(tmp_path).checkpoints
    assert damaged.problem is not None
    assert "damaged" in damaged.problem
    assert (best.step, best.metric, best.marks) == (4, 0.1, ["best"])
    assert (last.step, last.metric, last.marks) == (6, 0.2, ["last"])
    assert last.num_bytes > 1000


def test_where_the_config_comes_from(tmp_path: Path) -> None:
    hydra = tmp_path / ".hydra" / "config.yaml"
    hydra.parent.mkdir()
    hydra.write_text("trainer: {max_epochs: 1}")
    write_events(tmp_path, {"step": 1, "train/loss": 1.0})
    assert read_record(tmp_path).config == {"trainer": {"max_epochs": 1}}
    write(tmp_path / "checkpoints", snapshot(1))
    assert read_record(tmp_path).config == {"trainer": {"max_epochs": 2}}
    start(tmp_path, config={"trainer": {"max_epochs": 3}})
    assert read_record(tmp_path).config == {"trainer": {"max_epochs": 3}}


def test_a_run_without_a_journal_says_how_it_ended(tmp_path: Path) -> None:
    def run_file(**facts: Any) -> None:
        usual = {"started": "2030-01-01T00:00:00+00:00", "task": "Net", "config": {"test": True}}
        (tmp_path / "run.json").write_text(json.dumps({**usual, **facts}))

    trained(tmp_path)
    run_file(status="failed", error="RuntimeError: no")
    record = read_record(tmp_path)
    assert record.end is not None
    assert (record.end["status"], record.task, record.config) == ("failed", "Net", {"test": True})
    run_file(status="running")
    assert read_record(tmp_path).end is None

    start(tmp_path)
    end(tmp_path, 60)
    assert read_record(tmp_path).end is None  # it has gone on later, with nobody to note it
    run_file(status="running", started="2020-01-01T00:00:00+00:00")
    record = read_record(tmp_path)
    assert record.end is not None
    assert record.end["status"] == "finished"


def test_a_run_at_work_is_told_from_a_dead_one(tmp_path: Path) -> None:
    trained(tmp_path)
    start(tmp_path)
    assert not read_record(tmp_path).is_running
    with locked(tmp_path):
        assert read_record(tmp_path).is_running
        end(tmp_path, 60)  # the last thing that a run does
        assert not read_record(tmp_path).is_running


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no run: it has no metrics.jsonl"):
        read_record(tmp_path)


def test_every_event_has_a_place_on_every_clock(tmp_path: Path) -> None:
    record: Any = read_record(trained(tmp_path))
    assert {len(values) for values in record.clocks.values()} == {8}
    assert np.all(np.diff(record.clocks["samples"]) >= 0)


def test_lines_of_somebody_else_are_left_out(tmp_path: Path) -> None:
    start(tmp_path)
    with (tmp_path / "journal.jsonl").open("a") as file:
        for line in ({}, {"event": "start"}, {"event": []}, {"event": "warning", "text": "x"}):
            file.write(json.dumps(line) + "\n")
    write_events(tmp_path, {"step": 1, "train/loss": 1.0})
    (found,) = read_record(tmp_path).starts
    assert found.warnings == {}
