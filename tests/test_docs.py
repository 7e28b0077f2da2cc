import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from trainer import Trainer
from trainer.hydra.command_line import Place, check_command_line
from trainer.hydra.composition import register_configs

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
CHINESE = ROOT / "README.zh.md"
PAGES = [ROOT / "README.md", CHINESE, *DOCS, *(ROOT / "docs").glob("*/README.md")]
FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.S | re.M)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def links(page: Path) -> list[str]:
    """The targets of a page's links; what stands in code is no link."""
    prose = re.sub(r"`[^`\n]*`", "", FENCED.sub("", page.read_text(encoding="utf-8")))
    return re.findall(r"\]\(([^)\s]+)\)", prose)


def anchors(page: Path) -> set[str]:
    """What ``page#...`` may name: its headings, as GitHub spells them, and marks of its own."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+?)$", re.sub(r"\]\([^)]*\)", "", text).lower(), re.M)
    slugs = [re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings]
    assert len(slugs) == len(set(slugs)), f"{page.name} has two headings of the same words"
    return {*slugs, *re.findall(r'<a id="([^"]+)">', text)}


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere; of those to other sites only the form is looked at."""
    found = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" in link:
            is_right = re.fullmatch(r"https?://[\w-]+(\.[\w-]+)+(/[\w./%~-]*)?(#[\w.-]+)?", link)
        else:
            is_right = target.exists() and (not anchor or anchor in anchors(target))
        found += [] if is_right else [link]
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken(page)


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text('# The `first` part\n<a id="mark"></a>\n', encoding="utf-8")
    right = "[a](other.md) [b](other.md#the-first-part) [c](other.md#mark) [d](https://a.org/b)"
    wrong = ["missing.md", "other.md#the-last-part", "#nowhere", "https:/a.org"]
    page = tmp_path / "page.md"
    page.write_text(right + "".join(f" [x]({link})" for link in wrong), encoding="utf-8")
    assert broken(page) == wrong


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_nothing_is_left_to_fill_in(page: Path) -> None:
    open_places = re.findall(r"^[A-Z]+(?:_[A-Z]+)+$", page.read_text(encoding="utf-8"), re.M)
    assert not open_places


def test_every_page_is_reached_from_the_readme() -> None:
    linked = {link.partition("#")[0] for link in links(ROOT / "README.md")}
    assert {str(page.relative_to(ROOT)) for page in DOCS} <= linked


def test_the_chinese_readme_has_the_same_code_and_links() -> None:
    english = ROOT / "README.md"
    assert FENCED.findall(CHINESE.read_text("utf-8")) == FENCED.findall(english.read_text("utf-8"))
    others = [[link for link in links(page) if "README" not in link] for page in (english, CHINESE)]
    assert sorted(others[0]) == sorted(others[1])
    assert CHINESE.name in links(english)
    assert english.name in links(CHINESE)


def test_the_program_in_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    program = next(b for b in re.findall(r"```python\n(.*?)```", text, re.S) if "fit(" in b)
    (tmp_path / "line.py").write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "line.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    loss = float(done.stdout.splitlines()[-1].split()[0])
    assert loss < 1e-3
    assert "2 processes on this machine" in done.stdout


def test_the_task_in_its_page_trains_and_predicts(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "task.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", text, re.S)[0], names)
    data = TensorDataset(torch.randn(20, 5), torch.randint(0, 3, (20,)))
    task = names["Classifier"](features=5, classes=3)
    trainer = Trainer(max_epochs=1, run_dir=str(tmp_path))
    metrics = trainer.fit(task, train=data, val=data).metrics
    assert {"train/accuracy", "train/confidence", "val/accuracy", "val/loss"} <= set(metrics)
    assert trainer.predict(task, predict=data).shape == (20,)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_programs_are_python(page: Path) -> None:
    for program in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
        compile(textwrap.dedent(program), page.name, "exec")


SHOWN = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("callbacks", "loggers"))]
SHELL = "".join("".join(FENCED.findall(page.read_text(encoding="utf-8"))) for page in SHOWN)


@pytest.mark.parametrize("command", re.findall(r"^.*python -m recipes\..*$", SHELL, re.M))
def test_the_commands_are_accepted(command: str) -> None:
    recipe, *overrides = command.partition("python -m recipes.")[2].split()
    overrides = [re.sub(r"[<>]", "", override) for override in overrides]  # <date>
    place = Place(str(ROOT / "conf"), recipe)
    multirun = "--multirun" in overrides
    if multirun:
        overrides.remove("--multirun")
    try:
        if command.startswith("$"):  # shown for what it answers
            with pytest.raises(ValueError, match="there is no option"):
                check_command_line(place, overrides, multirun)
        else:
            check_command_line(place, overrides, multirun)
    finally:
        register_configs()


def test_the_callback_in_its_page_watches_a_fit(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "callbacks.md").read_text(encoding="utf-8")
    program = next(b for b in re.findall(r"```python\n(.*?)```", text, re.S) if "class " in b)
    names: dict[str, Any] = {}
    exec(program, names)
    task_page = (ROOT / "docs" / "task.md").read_text(encoding="utf-8")
    exec(re.findall(r"```python\n(.*?)```", task_page, re.S)[0], names)
    data = TensorDataset(torch.randn(20, 5), torch.zeros(20, dtype=torch.long))
    callback = names["SaveWhenGood"](accuracy=-1.0)
    trainer = Trainer(max_epochs=3, callbacks={"good": callback}, run_dir=str(tmp_path))
    result = trainer.fit(names["Classifier"](features=5, classes=3), train=data, val=data)
    assert result.epoch == 1
    assert result.stop_reason == "accuracy above -1.0"
    assert result.metrics["train/perplexity"] > 1
    assert (
        float((tmp_path / "best.txt").read_text()) == callback.best == callback.state_dict()["best"]
    )


def test_importing_the_package_loads_nothing_beside_torch_and_numpy() -> None:
    program = (
        "import sys, numpy, torch\n"
        "before = set(sys.modules)\n"
        "import trainer, trainer.callbacks, trainer.checkpoint\n"
        "import trainer.instantiate, trainer.loggers\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - {'trainer', 'numpy'} - set(sys.stdlib_module_names)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr
