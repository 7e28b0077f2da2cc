from collections.abc import Callable, Sequence
from typing import Any

import pytest

from trainer.callbacks import EarlyStopping
from trainer.run import Run


def feed(callback: EarlyStopping, run: Run, values: Sequence[float]) -> int | None:
    """Return after how many validations the run was asked to stop."""
    for count, value in enumerate(values, start=1):
        callback.on_validation_end(run, {"val/x": value})
        if run.stop_reason is not None:
            return count
    return None


@pytest.mark.parametrize(
    ("options", "values", "stops_at"),
    [
        ({}, [3, 2, 1, 0.5, 0.4], None),
        ({"patience": 2}, [3, 2, 2, 2], 4),
        ({"patience": 2}, [3, 4, 2, 4, 4], 5),
        ({"patience": 1, "mode": "max"}, [1, 2, 3, 2.9], 4),
        ({"patience": 1, "min_delta": 0.5}, [3, 2.4, 2.0], 3),
        ({"patience": 1, "min_delta": 0.5, "mode": "max"}, [1, 1.6, 2.1], 3),
        ({"patience": 9}, [3, float("nan")], 2),
        ({"patience": 9}, [float("inf")], 1),
    ],
)
def test_when_it_stops(
    make_run: Callable[..., Run],
    options: dict[str, Any],
    values: list[float],
    stops_at: int | None,
) -> None:
    assert feed(EarlyStopping("val/x", **options), make_run(), values) == stops_at


def test_reasons(make_run: Callable[..., Run]) -> None:
    run = make_run()
    feed(EarlyStopping("val/x", patience=2), run, [0.25, 1, 1])
    assert run.stop_reason == "val/x has not improved on 0.25 in 2 validations"
    run = make_run()
    run._state.step = 7
    feed(EarlyStopping("val/x"), run, [float("nan")])
    assert run.stop_reason == "val/x is nan at step 7"


@pytest.mark.parametrize("cut", range(5))
def test_patience_survives_a_resume(make_run: Callable[..., Run], cut: int) -> None:
    values = [3.0, 1.0, 2.0, 2.0, 2.0]
    first, second = EarlyStopping("val/x"), EarlyStopping("val/x")
    assert feed(first, make_run(), values[:cut]) is None
    second.load_state_dict(first.state_dict())
    assert feed(second, make_run(), values[cut:]) == 5 - cut


def test_a_metric_of_this_validation_comes_before_an_older_one(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(metrics={"val/x": 0.0, "train/loss": 1.0})
    callback = EarlyStopping("val/x", patience=1)
    callback.on_validation_end(run, {"val/x": 2.0})
    callback.on_validation_end(run, {"val/x": 1.0})
    assert run.stop_reason is None
    EarlyStopping("train/loss").on_validation_end(run, {"val/x": 2.0})


def test_unknown_metric(make_run: Callable[..., Run]) -> None:
    run = make_run(metrics={"train/loss": 1.0})
    words = r"'val/acc', which nothing logs; monitor one of train/loss, val/loss"
    with pytest.raises(ValueError, match=words):
        EarlyStopping("val/acc").on_validation_end(run, {"val/loss": 1.0})


def test_a_run_without_validation(make_run: Callable[..., Run]) -> None:
    callback, run = EarlyStopping("val/x"), make_run()
    callback.on_fit_start(run)
    with pytest.warns(UserWarning, match="no effect: the run had no validation"):
        callback.on_fit_end(run)
    callback.on_validation_end(run, {"val/x": 1.0})
    callback.on_fit_end(run)


@pytest.mark.parametrize("wrong", [{"mode": "lowest"}, {"patience": 0}, {"min_delta": -1.0}])
def test_wrong_options(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must"):
        EarlyStopping("val/x", **wrong)
