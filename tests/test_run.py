"""What a run leaves behind."""

from pathlib import Path

from trainer import FitResult


def test_a_result_is_shown_in_one_line() -> None:
    metrics = {f"val/metric_{number}": 1.0 for number in range(30)}
    checkpoint = Path("runs/one/checkpoints/step-00000010")
    result = FitResult(10, 2, 80, metrics, Path("runs/one"), checkpoint, checkpoint, "max_steps=10")
    shown = repr(result)
    assert shown.startswith("FitResult(step=10, epoch=2, samples=80, run_dir=")
    assert len(shown) < 120
