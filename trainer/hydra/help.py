"""What ``--help`` prints: the program, its choices, and what each option means in a line."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

from trainer.config import CheckpointConfig, TrainerConfig
from trainer.hydra.composition import MODES, OWN_OPTIONS
from trainer.options import option_fields, show

Rows = Iterator[tuple[str, str]]  # what stands on the left, and what it means

KEYS = {
    "mode": ", ".join(MODES[:-1]) + f" or {MODES[-1]}",
    "test": "after fit, test the best weights",
    "ckpt_path": "the weights to validate, test or predict with: best, last or a path",
    "predictions_dir": "write predictions there, a file per micro-batch; null: in one file",
    "optimized_metric": "the metric that a sweeper gets, or a list of them",
}
FLAGS = {
    "--multirun, -m": "a job for each value of trainer.devices=1,2 or task.x=3,4",
    "--cfg job": "print the config and end; with --resolve, all values filled in",
    "--info defaults-tree": "print which files make up the config and end",
    "--config-name, -cn": "another config than the usual one",
    "--config-dir, -cd": "a folder of more configs",
    "--hydra-help": "the rest of the flags, and Hydra's own options",
}


def help_page(main: Callable[..., Any], cfg: Mapping[str, Any]) -> str:
    """Return the page for Hydra's template of it.

    Args:
        main: The program; the page begins with the first paragraph of its module.
        cfg: The composed config, whose values are shown.
    """
    about = inspect.getdoc(inspect.getmodule(main)) or inspect.getdoc(main) or ""
    parts = [about.partition("\n\n")[0], f"usage: {program()} [key=value ...] [flags]"]
    for title, rows in _sections(cfg):
        parts.append("\n".join([title, *_table(list(rows))]).replace("$", "$$"))
    return "\n\n".join(part for part in parts if part)


def program() -> str:
    """Return how this program was called, without its arguments."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        return f"python -m {spec.name.removesuffix('.__main__')}"
    path = sys.argv[0]
    return f"python {path}" if path.endswith(".py") else os.path.basename(path)


def _sections(cfg: Mapping[str, Any]) -> Iterator[tuple[str, Rows]]:
    yield "Choices (group=name, or several: group=[one,other])", _choices("")
    yield "What to do", ((_given(cfg, key), text) for key, text in KEYS.items())
    for key in ("task", "data"):
        node = cfg.get(key)
        if isinstance(node, Mapping) and "_target_" in node:
            yield _node(key, node)
    known = ("task", "data", "trainer", "callbacks", "logger", "hydra", *OWN_OPTIONS, *KEYS)
    own = [key for key in cfg if key not in known]
    if own:
        yield "Keys of this project", ((_given(cfg, key), "") for key in own)
    yield (
        "Beside the training (callbacks.progress=null leaves one out)",
        ((key, ", ".join(cfg.get(key) or ["none"])) for key in ("callbacks", "logger")),
    )
    title = ""
    rows: list[tuple[str, str]] = []
    for name, spec in option_fields(TrainerConfig).items():
        if begins := spec.metadata.get("section"):
            if rows:
                yield title, iter(rows)
            title, rows = begins, []
        if name == "checkpoint":
            rows += _options(CheckpointConfig, cfg["trainer"]["checkpoint"], "trainer.checkpoint.")
        else:
            rows.append(_option(spec, cfg["trainer"], "trainer."))
    yield title, iter(rows)
    mode = cfg.get("mode")
    if mode in OWN_OPTIONS:
        yield f"mode={mode}", iter(_options(OWN_OPTIONS[mode], cfg[mode], f"{mode}."))
    yield "Flags", iter(FLAGS.items())


def _choices(parent: str) -> Rows:
    """List the groups that the config's folders, and we, have files for."""
    from hydra.core.global_hydra import GlobalHydra

    loader = GlobalHydra.instance().config_loader()
    for name in loader.list_groups(parent):
        group = f"{parent}/{name}" if parent else name
        if group not in ("hydra", "trainer"):
            if names := loader.get_group_options(group):
                yield group, ", ".join(sorted(names))
            yield from _choices(group)


def _node(key: str, node: Mapping[str, Any]) -> tuple[str, Rows]:
    """Describe the class of a node and the arguments that the node gives it."""
    module, _, name = str(node["_target_"]).rpartition(".")
    try:
        # Not getdoc: it would give the text of the class that this one is derived from.
        doc = inspect.cleandoc(getattr(import_module(module), name).__doc__ or "")
    except (ImportError, AttributeError, ValueError):
        doc = ""
    meanings = dict(re.findall(r"^    (\w+): (.*(?:\n     .*)*)", doc, re.M))
    rows = ((_given(node, k, key), meanings.get(k, "")) for k in node if k != "_target_")
    first = doc.partition("\n\n")[0].replace("\n", " ")
    title = f"{key}: {name}"
    return title + (f" - {_cut(first, _width() - len(title) - 3)}" if first else ""), rows


def _options(cls: type, values: Mapping[str, Any], prefix: str) -> list[tuple[str, str]]:
    return [_option(spec, values, prefix) for spec in option_fields(cls).values()]


def _option(spec: Any, values: Mapping[str, Any], prefix: str) -> tuple[str, str]:
    return _given(values, spec.name, prefix[:-1]), spec.metadata["doc"].replace("`", "")


def _given(values: Mapping[str, Any], key: Any, parent: str = "") -> str:
    from omegaconf import OmegaConf

    raw = OmegaConf.to_container(values, resolve=False)[key]  # type: ignore[index]
    text = show(raw).strip("'") if not isinstance(raw, dict) else "{...}"
    return f"{parent}.{key}={text}" if parent else f"{key}={text}"


def _table(rows: list[tuple[str, str]]) -> list[str]:
    """Lay out rows, each in one line of the terminal; the meaning is cut to what fits."""
    left = min(max((len(name) for name, _ in rows), default=0), 38)
    return [
        f"  {name:<{left}}  {_cut(meaning, _width() - max(left, len(name)) - 4)}".rstrip()
        for name, meaning in rows
    ]


def _width() -> int:
    return min(shutil.get_terminal_size((100, 24)).columns, 120)


def _cut(text: str, width: int) -> str:
    """Return the first sentence, or what fits of it, up to the end of a clause or word."""
    text = re.split(r"\.(?:\s|$)", " ".join(text.split()), maxsplit=1)[0]
    if len(text) <= width:
        return text
    clause = re.split(r"[;:] ", text, maxsplit=1)[0]
    if " " in clause and len(clause) <= width:
        return clause
    return text[: max(width - 4, 0)].rpartition(" ")[0] + " ..."
