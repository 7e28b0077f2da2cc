"""What a logger is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.run import Run


class Logger:
    """Writes a run's metrics somewhere. Lives on rank 0 only.

    ``__init__`` must only store its arguments: files and connections are opened in ``open``, which
    runs on rank 0 after the ranks have started.
    """

    @property
    def label(self) -> str:
        """The name in messages and checkpoints."""
        return type(self).__name__

    @property
    def own(self) -> Any:
        """The entry of ``run.loggers``: what the user gave."""
        return self

    def open(self, run: Run) -> None:
        """Open files under ``run.run_dir``; ``run.step`` is not 0 when the run resumes."""

    def log(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Write one event: the values of ``metrics`` at ``run.step``."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on in the same place, such as a run id."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned; called before ``open``."""

    def end(self, run: Run) -> None:
        """Note how the run has ended, which is ``run.status``; called before any is closed."""

    def close(self) -> None:
        """Flush and close; called once, also when the run fails."""
