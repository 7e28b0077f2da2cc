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
from trainer.command_line import Place, check_command_line
from trainer.composition import register_configs

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_nothing_is_left_to_fill_in(page: Path) -> None:
    open_places = re.findall(r"^[A-Z]+(?:_[A-Z]+)+$", page.read_text(encoding="utf-8"), re.M)
    assert not open_places


def test_every_page_is_reached_from_the_readme() -> None:
    linked = set(re.findall(r"\]\(docs/([\w.-]+)\)", (ROOT / "README.md").read_text("utf-8")))
    assert linked == {page.name for page in PAGES[1:]}


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs_are_python(page: Path) -> None:
    for program in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
        compile(textwrap.dedent(program), page.name, "exec")


README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL = "".join(re.findall(r"^```\w*\n(.*?)^```", README, re.S | re.M))


@pytest.mark.parametrize("command", re.findall(r"^.*python -m recipes\..*$", SHELL, re.M))
def test_the_commands_in_the_readme_are_accepted(command: str) -> None:
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


def test_importing_the_package_loads_nothing_beside_torch_and_numpy() -> None:
    program = (
        "import sys, numpy, torch\n"
        "before = set(sys.modules)\n"
        "import trainer\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - {'trainer', 'numpy'} - set(sys.stdlib_module_names)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr
