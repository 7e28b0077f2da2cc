"""The scripts in docs/multi-node.md: every option in them exists, and what can run here has run."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from running import ENV, PIPED, TESTS, Running
from torch.distributed.run import get_args_parser

from benchmarks.networking.hosts import Network, Unavailable
from trainer.hydra.command_line import Place, check_command_line
from trainer.hydra.composition import register_configs

ROOT = TESTS.parent
PAGE = (ROOT / "docs" / "multi-node.md").read_text(encoding="utf-8")
BLOCKS = {kind: re.findall(rf"```{kind}\n(.*?)```", PAGE, re.S) for kind in ("bash", "yaml")}
ELASTIC = "--rdzv-backend=c10d"


def plain(script: str) -> str:
    """A script as lines without breaks, and with values where the reader is to fill one in."""
    filled = script.replace("\\\n", " ").replace("<first machine>", "host0")
    return filled.replace(r"\$SLURM_NODEID", "0").replace("$first", "host0")


def commands() -> Iterator[list[str]]:
    """Every command of the page that runs a recipe, from the program on."""
    for script in BLOCKS["bash"]:
        for line in plain(script).splitlines():
            found = re.search(r"(torchrun|python) .*", line)
            if found and not line.startswith("#"):
                yield shlex.split(found[0].rstrip('"'))
    for manifest in BLOCKS["yaml"]:
        for node in containers(yaml.safe_load(manifest)):
            yield [*node["command"], *node["args"]]


def containers(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if "command" in node:
            yield node
        for value in node.values():
            yield from containers(value)
    elif isinstance(node, list):
        for value in node:
            yield from containers(value)


@pytest.mark.parametrize("command", list(commands()), ids=" ".join)
def test_commands_are_accepted(command: list[str]) -> None:
    if command[0] == "torchrun":
        args = get_args_parser().parse_args(command[1:])
        assert args.module
        module, overrides = args.training_script, args.training_script_args
    else:
        assert command[1] == "-m"
        module, overrides = command[2], command[3:]
    package, _, recipe = module.partition(".")
    assert package == "recipes"
    # A folder that can be written here.
    overrides = [override.replace("/shared/", "runs/") for override in overrides]
    try:
        check_command_line(Place(str(ROOT / "conf"), recipe), overrides, multirun=False)
    finally:
        register_configs()


def test_all_launchers_have_a_script() -> None:
    programs = [" ".join(command) for command in commands()]
    assert sum(text.startswith("torchrun") for text in programs) >= 4
    assert any(ELASTIC in text for text in programs)
    kinds = [yaml.safe_load(manifest)["kind"] for manifest in BLOCKS["yaml"]]
    assert kinds == ["PyTorchJob", "TrainJob"]


SMALL = ["experiment=smoke", "trainer.devices=1", "trainer.max_steps=4", "trainer.timeout_s=30"]


def runnable(script: str, host: int, folder: Path) -> str:
    """A script as somebody with two machines of one rank each would fill it in."""
    text = (
        plain(script)
        .replace("/shared/", f"{folder}/")
        .replace("nproc-per-node=8", "nproc-per-node=1")
    )
    text = text.replace("node-rank=0", f"node-rank={host}").replace(
        "NODE_RANK=0", f"NODE_RANK={host}"
    )
    python = shlex.quote(sys.executable)
    text = re.sub(r"\btorchrun\b", f"{python} -m torch.distributed.run", text)
    text = re.sub(r"^python\b", python, text, flags=re.M).replace(" trainer.devices=8", "")
    return text.rstrip() + " " + " ".join(SMALL)


ON_TWO_MACHINES = [
    script
    for script in BLOCKS["bash"]
    if "recipes.mnist" in script and "#SBATCH" not in script and "<first machine>" in script
]


@pytest.mark.opt_in
@pytest.mark.timeout(200)
@pytest.mark.parametrize("script", ON_TWO_MACHINES, ids=["static", "elastic", "by hand"])
def test_scripts_run_on_two_machines(script: str, tmp_path: Path) -> None:
    try:
        with Network(2) as network:
            machines = [
                Running(
                    network.popen(
                        host,
                        ["bash", "-ec", runnable(script, host, tmp_path)],
                        env=ENV,
                        cwd=tmp_path,
                        **PIPED,
                    )
                )
                for host in range(2)
            ]
            assert [each.end() for each in machines] == [0, 0], machines[0].said + machines[1].said
    except Unavailable as error:
        pytest.skip(str(error))
    assert "done        4 steps" in machines[0].said
    assert "done" not in machines[1].said
