import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.loggers import JsonlLogger, TensorBoardLogger, default_loggers, jsonl
from trainer.run import Run


def log_steps(run: Run, first: int, last: int) -> JsonlLogger:
    logger = JsonlLogger()
    run._state.step = first - 1
    logger.open(run)
    for step in range(first, last + 1):
        run._state.step = step
        logger.log(run, {"train/loss": 1 / step})
    return logger


def lines(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (path / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_a_line(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run, logger = make_run(), JsonlLogger()
    logger.open(run)
    run._state.step, run._state.epoch, run._state.samples = 50, 1, 6400
    run._state.time_s = 1.23456
    logger.log(run, {"train/loss": 0.1, "train/lr": 3e-05})
    expected = (
        '{"step": 50, "epoch": 1, "samples": 6400, "time_s": 1.235, '
        '"train/loss": 0.1, "train/lr": 3e-05}\n'
    )
    assert (tmp_path / "metrics.jsonl").read_text() == expected  # without a flush or close
    logger.close()


def test_what_json_does_not_have(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run, logger = make_run(), JsonlLogger()
    logger.open(run)
    logger.log(run, {"a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 1})
    logger.close()
    [line] = lines(tmp_path)
    assert [line[name] for name in "abcd"] == [None, None, None, 1]


@pytest.mark.parametrize("torn", ["", '{"step": 6, "ep', '{"step": 2}', "\n"])
def test_resume(make_run: Callable[..., Run], tmp_path: Path, torn: str) -> None:
    log_steps(make_run(), 1, 5).close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    log_steps(make_run(), 4, 7).close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    log_steps(make_run(), 8, 9).close()
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 10))


def test_several_events_at_the_step_of_the_checkpoint_stay(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    run = make_run()
    logger = log_steps(run, 1, 3)
    logger.log(run, {"val/loss": 0.5})
    logger.close()
    log_steps(make_run(), 4, 4).close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 3, 4]


def test_events_at_the_step_of_the_checkpoint_that_came_after_it_go(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    run = make_run()
    logger = log_steps(run, 1, 3)
    state = logger.state_dict()
    logger.log(run, {"val/loss": 0.5})
    logger.close()
    again = JsonlLogger()
    again.load_state_dict(state)
    again.open(run)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    again.log(run, {"val/loss": 0.25})
    assert again.state_dict() == {"num_lines": 4}
    again.close()


def test_resume_where_there_is_no_file(make_run: Callable[..., Run], tmp_path: Path) -> None:
    log_steps(make_run(), 4, 5).close()
    assert [line["step"] for line in lines(tmp_path)] == [4, 5]


def test_a_new_run_starts_a_new_file_and_sets_the_old_one_aside(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    log_steps(make_run(), 1, 5).close()
    log_steps(make_run(), 1, 2).close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert [line["step"] for line in lines(tmp_path / "aside")] == [1, 2, 3, 4, 5]


def test_close_without_open() -> None:
    for logger in default_loggers():
        logger.close()


def test_defaults() -> None:
    assert [type(logger) for logger in default_loggers()] == [JsonlLogger, TensorBoardLogger]


def test_a_line_for_which_there_is_no_room_is_left_out(
    make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[:10])  # as the kernel does

    run = make_run()
    logger = log_steps(run, 1, 2)
    logger.close()
    monkeypatch.setattr(jsonl.io, "FileIO", Full)
    logger.open(run)
    with pytest.raises(OSError, match=r"No space left on device: .*metrics.jsonl"):
        logger.log(run, {"train/loss": 1.0})
    logger.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
