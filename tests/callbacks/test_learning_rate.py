from collections.abc import Callable

from trainer.callbacks import LearningRate, ProgressBar, Throughput, default_callbacks
from trainer.run import Run


def test_adds_the_rates(make_run: Callable[..., Run]) -> None:
    run = make_run(learning_rates={"train/lr/head": 0.1, "train/lr/body": 0.01})
    metrics = {"train/loss": 1.0}
    LearningRate().on_log(run, metrics)
    assert metrics == {"train/loss": 1.0, "train/lr/head": 0.1, "train/lr/body": 0.01}


def test_defaults() -> None:
    assert [type(c) for c in default_callbacks()] == [LearningRate, Throughput, ProgressBar]
