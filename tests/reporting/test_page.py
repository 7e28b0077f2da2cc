from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from reporting.folders import end, start, trained, write_events

from trainer.reporting import journal
from trainer.reporting.page import page, write_report
from trainer.reporting.record import read_record

NASTY = "</script><script>alert(1)</script><img src=http://a.b onerror=alert(1)>"


class Tags(HTMLParser):
    """The tags of a page, and its text outside of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] != ["script"]:
            self.text += f"{data} "


def shown(folder: Path) -> Tags:
    return Tags(page(read_record(folder)))


def test_what_a_person_reads(tmp_path: Path) -> None:
    start(trained(tmp_path))
    end(tmp_path, 30, "failed", error="RuntimeError: no disk")
    start(tmp_path, 30, restarts=1)
    end(tmp_path, 60, limited_by="compute: 90 % of the step")
    text = " ".join(shown(tmp_path).text.split())
    for expected in [
        f"Net, {tmp_path.name} finished",
        "Limited by compute: 90 % of the step",
        "steps 60 of 100",
        "samples per second 1,000",
        "ranks 2 on cpu",
        "peak memory 306 MB",
        "from the beginning",
        "failed at step 30: RuntimeError: no disk",
        "resumed at step 30, started again (1)",
        "git commit abc123 with changes that are not committed",
        "devices: 2",
    ]:
        assert expected in text
    assert "The run failed" not in text  # it went on


def test_what_to_look_at(tmp_path: Path) -> None:
    write_events(tmp_path, {"step": 4, "train/loss": None})
    start(tmp_path)
    warned = {"step": 0, "text": "careful", "category": "UserWarning"}
    journal.note(tmp_path, "warning", warned)
    journal.note(tmp_path, "memory", {"step": 5, "by_rank_mb": [200.0, 900.0]})
    end(tmp_path, 4, "failed", error="RuntimeError: no disk")
    text = shown(tmp_path).text
    assert "The run failed: RuntimeError: no disk" in text
    assert "train/loss was NaN or infinite once, first at step 4." in text
    assert "rank 1 900 MB, rank 0 200 MB" in text
    assert "careful (UserWarning, step 0)" in text


def test_what_is_the_users_is_text(tmp_path: Path) -> None:
    write_events(tmp_path, {"step": 1, f"train/{NASTY}": 1.0, NASTY: 2.0})
    start(tmp_path, task=NASTY, config={NASTY: [NASTY]})
    journal.note(tmp_path, "warning", {"step": 0, "text": NASTY, "category": NASTY})
    end(tmp_path, 1, NASTY, error=NASTY)
    found = shown(tmp_path)
    assert "img" not in found.tags
    assert found.tags.count("script") == 3  # plotly, the values, and what draws them
    assert NASTY in found.text


def test_it_refers_to_nothing_outside(tmp_path: Path) -> None:
    start(trained(tmp_path))
    found = shown(tmp_path)
    assert not {"src", "href", "action"} & {name for name, _ in found.attributes}
    assert ("content", "width=device-width") in found.attributes
    (policy,) = [v for _, v in found.attributes if v is not None and "script-src" in v]
    assert policy.startswith("default-src 'none';")


def test_secrets_stay_where_they_are(tmp_path: Path) -> None:
    logger = {"api_key": "s3cr3t", "nested": [{"password": "s3cr3t"}], "pad_token": "<pad>"}
    start(trained(tmp_path), config={"logger": logger, "num_tokens": 5})
    text = page(read_record(tmp_path))
    assert "s3cr3t" not in text
    assert "api_key: (not shown)" in text
    assert "pad_token: &lt;pad&gt;" in text


def test_a_folder_with_metrics_alone_is_enough(tmp_path: Path) -> None:
    path = write_report(trained(tmp_path), tmp_path / "other.html")
    assert {p.name for p in tmp_path.iterdir()} == {"metrics.jsonl", "other.html"}
    assert "60" in Tags(path.read_text(encoding="utf-8")).text


def test_without_plotly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install plotly"):
        write_report(trained(tmp_path))
