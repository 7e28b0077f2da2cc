"""What a callback is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.run import Run


class Callback:
    """Observes a run on rank 0. Subclasses override what they need.

    Callbacks get plain numbers; a collective raises, as no other rank takes part. They run in the
    order in which they are given; a value that ``on_log`` adds to ``metrics`` reaches the callbacks
    after it and the loggers. ``state_dict`` travels in every checkpoint.
    """

    def on_fit_start(self, run: Run) -> None:
        """Run before the first step."""

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        """Run every ``log_every_n_steps`` steps with the values since the last time."""

    def on_validation_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Run after each validation with its metrics (``val/loss``, ...)."""

    def on_save(self, run: Run, path: Path) -> None:
        """Run when the checkpoint in ``path`` is complete."""

    def on_fit_end(self, run: Run) -> None:
        """Run once after the last step, also when the run was stopped early."""

    def close(self) -> None:
        """Let go of what ``on_fit_start`` took (threads, files); called once, after errors too."""

    def state_dict(self) -> dict[str, Any]:
        """Return what has to survive a resume: tensors and plain values only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""
