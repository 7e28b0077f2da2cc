import time
from collections.abc import Callable

import pytest

from trainer.callbacks import Throughput
from trainer.run import Run


def test_speed_without_validation(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    run, throughput = make_run(), Throughput()
    run._state.step, run._state.samples = 30, 3000  # a resumed run
    throughput.on_fit_start(run)

    def log() -> dict[str, float]:
        metrics: dict[str, float] = {}
        throughput.on_log(run, metrics)
        return metrics

    now, run._state.step, run._state.samples = 102.0, 40, 4000
    assert log() == {"perf/samples_per_s": 500.0, "perf/steps_per_s": 5.0}
    now += 50.0  # validation
    throughput.on_validation_end(run, {})
    now, run._state.step, run._state.samples = now + 1.0, 50, 5000
    assert log() == {"perf/samples_per_s": 1000.0, "perf/steps_per_s": 10.0}
    now += 1.0
    assert log() == {}  # no step since
