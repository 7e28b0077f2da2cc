from __future__ import annotations

from pathlib import Path

import pytest
from reporting.folders import trained

from trainer.report import main


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(trained(tmp_path))])
    path = Path(capsys.readouterr().out.strip())
    assert path == tmp_path / "report.html"
    assert "train/loss" in path.read_text(encoding="utf-8")


def test_a_mistake_is_told_without_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"error: .* holds no run"):
        main([str(tmp_path)])
