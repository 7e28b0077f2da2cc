"""The page in a real browser, where there is one."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Page, browser
from reporting.folders import end, start, trained, write_events

from trainer.reporting import journal
from trainer.reporting.page import write_report

pytestmark = [
    pytest.mark.opt_in,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
    pytest.mark.timeout(120),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = trained(tmp_path_factory.mktemp("run"), num_events=3000)
    write_events(folder, {"step": 30_000, "train/<b onclick=alert(1)>a</b>": 1.0})
    start(folder)
    start(folder, 9000)
    journal.note(folder, "memory", {"step": 5, "by_rank_mb": [200.0, 210.0]})
    end(folder, 30_000)
    return write_report(folder)


@pytest.fixture(scope="module")
def tab(report: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page, opened once for all tests."""
    with browser(tmp_path_factory.mktemp("profile")) as page:
        page.open(report)
        yield page


def test_it_draws_without_complaint_and_without_a_network(report: Path, tab: Page) -> None:
    drawn = (
        "[...document.querySelectorAll('.picture')].map((div) => div.querySelectorAll({}).length)"
    )
    plots = tab.run(drawn.format("'.main-svg'"))
    assert len(plots) == 10
    assert min(plots) > 0
    assert min(tab.run(drawn.format("'.trace path'"))) > 0
    assert tab.complaints == []
    asked = [address for address in tab.requests if not address.startswith("data:")]
    assert asked == [report.resolve().as_uri()]
    buttons = tab.run("[...document.querySelectorAll('.modebar-btn')].map((b) => b.dataset.title)")
    assert not any("hare" in title or "loud" in title for title in buttons)
    legends = tab.run("[...document.querySelectorAll('.legendtext')].map((t) => t.textContent)")
    assert "train/<b onclick=alert(1)>a</b>" in legends


def test_axes_can_be_chosen(tab: Page) -> None:
    def axes() -> Any:
        return tab.run(
            "(({xaxis, yaxis}) => [xaxis.title.text, yaxis.type, xaxis.range[1] > 1e6])"
            "(document.getElementById('chart-0')._fullLayout)"
        )

    assert axes() == ["step", "linear", False]
    tab.run("clock.value = 'samples'; clock.dispatchEvent(new Event('change'))")
    tab.run("log.checked = true; log.dispatchEvent(new Event('change'))")
    assert axes() == ["samples", "log", True]
    (resumed,) = tab.run("document.getElementById('chart-0').layout.shapes.map((s) => s.x0)")
    assert resumed == 9000 * 128
    assert tab.complaints == []


def test_light_and_dark(tab: Page) -> None:
    colors = []
    for scheme in ("light", "dark"):
        tab.prefer(scheme)
        colors.append(
            tab.run(
                "['.xtick text', '.legendtext', 'body', 'pre'].map((name) =>"
                "getComputedStyle(document.querySelector(name))).flatMap((style) =>"
                "[style.fill, style.color, style.backgroundColor])"
            )
        )
    light, dark_ones = colors
    assert all(a != b for a, b in zip(light[:2], dark_ones[:2], strict=True))
    assert light[8] != dark_ones[8]  # the page
    assert light[3] != dark_ones[3]  # a legend


def test_it_prints(tab: Page) -> None:
    tab.prefer("dark")
    tab.run(
        "window.widths = []; addEventListener('beforeprint', () => widths.push("
        "...[...document.querySelectorAll('.main-svg')].map((svg) => svg.getAttribute('width'))))"
    )
    pdf = base64.b64decode(tab.call("Page.printToPDF", preferCSSPageSize=True)["data"])
    assert pdf.startswith(b"%PDF")
    assert set(tab.run("widths")) == {"320"}  # drawn anew for half of a page
    tab.call("Emulation.setEmulatedMedia", media="print")
    style = "getComputedStyle(document.querySelector('{}')).{}"
    assert tab.run(style.format(".controls", "display")) == "none"
    assert tab.run(style.format("h1", "color")) == "rgb(29, 33, 41)"  # dark on white, always
    assert tab.complaints == []
