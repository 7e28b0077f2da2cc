"""What the project adds to a run."""

from __future__ import annotations

import torch

from trainer import Callback
from trainer.run import Run


class Picture(Callback):
    """Draws what the net has learned, with characters, into ``picture.txt`` of the run's folder.

    Args:
        width: Characters in a line.
    """

    def __init__(self, width: int = 48) -> None:
        self.width = width

    def on_fit_end(self, run: Run) -> None:
        """Ask the net about a grid of points."""
        y, x = torch.meshgrid(
            torch.linspace(1, -1, self.width // 2), torch.linspace(-1, 1, self.width), indexing="ij"
        )
        points = torch.stack([x, y], dim=-1).reshape(-1, 2).to(run.device)
        arms = (run.task((points, None)) > 0).reshape(x.shape).tolist()
        lines = ("".join("#" if arm else "." for arm in row) for row in arms)
        (run.run_dir / "picture.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
