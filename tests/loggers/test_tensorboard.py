from collections.abc import Callable
from pathlib import Path

from trainer.loggers import TensorBoardLogger
from trainer.run import Run


def log_steps(run: Run, first: int, last: int, value: float) -> None:
    logger = TensorBoardLogger()
    run._state.step = first - 1
    logger.open(run)
    for step in range(first, last + 1):
        run._state.step = step
        logger.log(run, {"train/loss": value})
    logger.close()


def read(path: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    return [(e.step, e.value) for e in events.Scalars("train/loss")]


def test_resume_goes_on_without_what_lay_beyond(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    log_steps(make_run(), 1, 5, 0.5)
    assert read(tmp_path) == [(step, 0.5) for step in range(1, 6)]
    log_steps(make_run(), 4, 6, 0.25)
    assert read(tmp_path) == [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.25), (5, 0.25), (6, 0.25)]


def test_what_comes_before_a_checkpoint_outlives_a_kill(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    logger, run = TensorBoardLogger(), make_run()
    logger.open(run)
    logger.log(run, {"train/loss": 0.5})
    assert logger.state_dict() == {}
    assert read(tmp_path) == [(0, 0.5)]
    logger.close()


def test_a_new_run_sets_an_older_one_aside(make_run: Callable[..., Run], tmp_path: Path) -> None:
    log_steps(make_run(), 1, 5, 0.5)
    log_steps(make_run(), 1, 2, 0.25)
    assert read(tmp_path) == [(1, 0.25), (2, 0.25)]
    assert read(tmp_path / "aside") == [(step, 0.5) for step in range(1, 6)]


def test_writer_for_more_than_scalars(make_run: Callable[..., Run], tmp_path: Path) -> None:
    logger, run = TensorBoardLogger(), make_run()
    logger.open(run)
    assert not (tmp_path / "tensorboard").exists()  # nothing is imported or opened before
    logger.writer.add_text("sample", "hello", run.step)
    logger.close()
    [file] = (tmp_path / "tensorboard").iterdir()
    assert b"hello" in file.read_bytes()
