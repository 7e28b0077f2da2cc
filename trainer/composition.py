"""What Hydra composes for a run, and the check of it before Hydra makes a folder.

On the command line a config is composed once without types, so that every mistake in it, wherever
it was written, gets our message; then by Hydra, with types.
"""

from __future__ import annotations

import inspect
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import migration
from trainer.config import TrainerConfig
from trainer.instantiate import check_targets
from trainer.launcher import find_launcher
from trainer.lock import check_free
from trainer.options import option_fields
from trainer.planning.options import PlanConfig
from trainer.run_dir import check_resume, check_writable, folder_of, slurm_run_dir

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

HYDRA_VERSION = "1.3"
MODES = ("fit", "validate", "test", "predict", "verify", "plan")
ONLY_IN = {"plan": "plan", "trainer.profile": "fit", "test": "fit"}  # keys, and the mode for them

# The top level of every config, with its defaults; `task` and `data` come from the project.
DEFAULTS: dict[str, Any] = {
    "task": None,
    "data": None,
    "mode": "fit",
    "plan": asdict(PlanConfig()),
    "test": False,
    "ckpt_path": None,
    "optimized_metric": None,
}
READ_KEYS = ("task", "data", "trainer", "callbacks", "logger", *list(DEFAULTS)[2:])


def register_configs(typed: bool = True) -> None:
    """Put the ``trainer`` group, the default callbacks and loggers into Hydra's ConfigStore.

    Args:
        typed: Whether ``trainer`` is checked by type and name while Hydra composes.
    """
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    from trainer.callbacks import EarlyStopping, default_callbacks
    from trainer.loggers import default_loggers

    store = ConfigStore.instance().store
    store(group="trainer", name="options", node=TrainerConfig if typed else asdict(TrainerConfig()))
    store(group="trainer", name="default", node={"defaults": ["options", "/trainer_app@_global_"]})
    groups = {
        "callbacks": dict(_named_node(type(each)) for each in default_callbacks()),
        "logger": dict(_named_node(type(each)) for each in default_loggers()),
    }
    for group, nodes in groups.items():
        store(group=group, name="default", node=nodes)
        # In place of the whole mapping, so that it drops the project's own as well.
        store(group=group, name="none", node={group: None}, package="_global_")
    early_stopping = dict([_named_node(EarlyStopping, monitor="val/loss")])
    store(group="callbacks", name="early_stopping", node=early_stopping)
    app = {
        "defaults": [{"override /hydra/job_logging": "stdout"}, "_self_"],
        **DEFAULTS,
        **({"plan": PlanConfig} if typed else {}),
        **groups,
        "hydra": {
            "run": {"dir": "${trainer_run_dir:${trainer.run_dir}}"},
            "output_subdir": "${trainer_hydra_dir:${mode}}",
        },
    }
    store(name="trainer_app", node=app)
    resolver = OmegaConf.register_new_resolver
    resolver("trainer_run_dir", _hydra_run_dir, use_cache=True, replace=True)
    resolver("trainer_hydra_dir", _hydra_dir, replace=True)


def check_config(cfg: DictConfig) -> dict[str, Any]:
    """Check the keys that `run` reads and return the Trainer's options as plain values.

    Raises:
        ValueError: For a missing or misspelt key, a bad value, or a mandatory one left open.
    """
    from omegaconf import OmegaConf

    _check_top_level(cfg)
    open_keys = _open_keys(OmegaConf.to_container(cfg, resolve=False))
    if open_keys:
        raise ValueError(
            f"the config leaves {', '.join(open_keys)} open (???); give the value on the command "
            f"line: {open_keys[0]}=..."
        )
    if cfg.get("mode", "fit") not in MODES:
        near = migration.nearest(str(cfg.mode), MODES)
        advice = f"; did you mean mode={near}?" if near else ""
        raise ValueError(
            f"mode={cfg.mode} is not known; it must be one of {', '.join(MODES)}{advice}"
        )
    if not isinstance(cfg.get("test", False), bool):
        raise ValueError(f"test={cfg.test} is not allowed; it must be true or false")
    if cfg.get("ckpt_path") is not None and cfg.get("mode", "fit") in ("fit", "verify", "plan"):
        raise ValueError(
            f"ckpt_path={cfg.ckpt_path} with mode={cfg.get('mode', 'fit')}: it names the weights "
            "to validate, test or predict with; to go on from a checkpoint set trainer.resume, to "
            "start a new run from its weights trainer.init_from"
        )
    for key in ("task", "data"):
        node = cfg.get(key)
        if node is None and key == "data":
            continue
        if not isinstance(node, Mapping) or "_target_" not in node:
            raise ValueError(
                f"the config's {key} has no _target_; name the class to build: "
                f"{key}._target_=package.module.Class"
            )
    options = _plain(cfg.get("trainer"))
    try:
        checked = TrainerConfig.from_options(options)
        check_resume(checked)
    except ValueError as mistake:
        raise ValueError(f"trainer: {mistake}") from None
    try:
        PlanConfig.from_options(_plain(cfg.get("plan"), "plan"))
    except ValueError as mistake:
        raise ValueError(f"plan: {mistake}") from None
    if cfg.get("ckpt_path") in ("best", "last") and checked.run_dir is None:
        raise ValueError(
            f"ckpt_path={cfg.ckpt_path} is looked for in run_dir, and this run has a new one; name "
            "the folder of the run that trained: trainer.run_dir=..., or give a path"
        )
    if cfg.get("mode", "fit") == "fit":
        checked.check_limits()
    return options


def check_command_line(
    folder: str, config_name: str, overrides: list[str], multirun: bool
) -> int | None:
    """Compose without types and check, for each single value of a sweep.

    Returns:
        This process's rank if a launcher started it as one of several.

    Raises:
        ValueError: With our message for what Hydra or `check_config` refuses.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    register_configs(typed=False)
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise ValueError(str(error)) from None
    _check_switched_off(parsed)
    for variant in _variants(parsed, multirun):
        try:
            cfg = _compose(folder, config_name, variant)
            options = check_config(cfg)
            _check_effect(parsed, cfg.get("mode", "fit"))
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(_explain(error, folder, config_name, variant)) from None
        _check_groups(parsed, cfg, folder)
        for key in ("task", "data", "trainer", "callbacks", "logger"):
            node = cfg.get(key)
            raw = OmegaConf.is_config(node)
            check_targets(OmegaConf.to_container(node, resolve=False) if raw else node, key)
        check_writable(options.get("run_dir") or slurm_run_dir() or _given_dir(parsed) or "outputs")
        rank = launched_rank(options)
        if cfg.get("mode") == "fit" and rank is None and not multirun:
            check_free(Path(_hydra_run_dir(options.get("run_dir"))))
        if cfg.get("mode") == "verify":
            from trainer.verify.runs import check_can_start

            check_can_start(TrainerConfig.from_options(options))
        if multirun and rank is not None:
            raise ValueError(
                "--multirun under torchrun or srun: every rank would run a sweep of its own; start "
                "the sweep without it, the Trainer starts the ranks of each job"
            )
    return rank


def _compose(folder: str, config_name: str, overrides: list[str]) -> DictConfig:
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(folder, version_base=HYDRA_VERSION):
        return compose(config_name, overrides=overrides)


def _variants(overrides: list[Override], multirun: bool) -> Iterator[list[str]]:
    """Yield the overrides of one job at a time, so that each value of each sweep occurs once."""
    choices = []
    for override in overrides:
        # An unknown option is to be added, so that it reaches our own check.
        option = not (override.is_add() or override.is_force_add() or override.is_delete())
        prefix = "++" if option and override.key_or_group.startswith(("trainer.", "plan.")) else ""
        if multirun and override.is_discrete_sweep():
            key = prefix + override.get_key_element()
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        elif not (multirun and override.is_sweep_override()):
            choices.append([f"{prefix}{override.input_line}"])
    first = [values[0] for values in choices]
    yield first
    for i, values in enumerate(choices):
        for value in values[1:]:
            yield [*first[:i], value, *first[i + 1 :]]


def _explain(error: Exception, folder: str, config_name: str, overrides: list[str]) -> str:
    """Name what was meant by a key that Hydra does not find."""
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    key = str(getattr(error.__cause__, "full_key", ""))
    culprit = [o for o in overrides if o.partition("=")[0] == key]
    if not culprit:
        return str(error)
    others = [o for o in overrides if o not in culprit]
    try:
        cfg = _compose(folder, config_name, others)
    except HydraException as another:
        return _explain(another, folder, config_name, others)
    parent, _, name = key.rpartition(".")
    advice = None if parent else _slip(name, culprit[0].partition("=")[2], cfg)
    if advice is None:
        node = OmegaConf.select(cfg, parent) if parent else cfg
        names = [str(n) for n in node] if isinstance(node, Mapping) else []
        near = get_close_matches(name, names, n=1)
        dotted = f"{parent}." if parent else ""
        advice = f"did you mean {dotted}{near[0]}?" if near else f"there are: {', '.join(names)}."
    return f"there is no key {key!r} in the config; {advice} (+{key}=... adds a key of your own)"


def _check_switched_off(overrides: list[Override]) -> None:
    """Say how to do without callbacks or loggers, for which Hydra has a message of its own."""
    for override in overrides:
        key = override.key_or_group
        if key in ("callbacks", "logger") and override.value() in (None, False, []):
            raise ValueError(f"{override.input_line}: to have none at all, write +{key}=none")


def _check_effect(overrides: list[Override], mode: str) -> None:
    """Refuse what another mode alone would do; in a file it may stand there for that mode."""
    for override in overrides:
        asked = override.key_or_group
        only = ONLY_IN.get(asked) or ONLY_IN.get(asked.partition(".")[0], mode)
        if only != mode and override.value() not in (None, False):
            raise ValueError(
                f"{override.input_line} with mode={mode} has no effect; set mode={only}, or leave "
                "it out"
            )


def _check_groups(overrides: list[Override], cfg: DictConfig, folder: str) -> None:
    """Refuse ``+group=name`` where there is no such group: Hydra makes it a key of its own."""
    for override in overrides:
        key = override.key_or_group
        value = cfg.get(key)
        meant = override.is_add() and not override.is_force_add() and isinstance(value, str)
        if meant and re.fullmatch(r"[\w./-]+", value) and not _is_read(key, cfg):
            groups = sorted(p.name for p in Path(folder).iterdir() if p.is_dir())
            raise ValueError(
                f"{override.input_line}: there is no config group {key!r}; there are: "
                f"{', '.join([*groups, 'callbacks', 'logger'])}. A key of your own that no other "
                f"refers to is added by +{override.input_line}"
            )


def _is_read(key: str, cfg: DictConfig) -> bool:
    """Whether `run` reads the key, or another key refers to it."""
    from omegaconf import OmegaConf

    refers = r"\$\{" + re.escape(key) + r"[.}\[]"
    return key in READ_KEYS or re.search(refers, OmegaConf.to_yaml(cfg)) is not None


def _check_top_level(cfg: DictConfig) -> None:
    """Refuse a key that looks like a slip; keys of the project's own pass."""
    for key in map(str, cfg):
        if _is_read(key, cfg):
            continue
        slip = _slip(key, cfg[key], cfg)
        if slip:
            raise ValueError(
                f"nothing reads the config's key {key!r}; {slip} A key of your own needs another "
                "name, or a key that refers to it"
            )


def _slip(key: str, value: Any, cfg: DictConfig) -> str | None:
    """Say what was probably meant by an unknown key at the top level."""
    if key in option_fields(TrainerConfig):
        return f"it is an option of the trainer: write trainer.{key}."
    if key in migration.RENAMED or key in migration.CONVERTED or key in migration.WITHOUT:
        options = {**(cfg.get("trainer") or {}), key: value}
        return f"under trainer, {migration.explain_unknown(key, options)}."
    near = get_close_matches(key, READ_KEYS, n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else None


def _plain(node: DictConfig | None, name: str = "trainer") -> dict[str, Any]:
    """Return options as plain values; before the job runs, without what refers to Hydra's own."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig, OmegaConf

    if node is None:
        return {}
    if not isinstance(node, DictConfig):
        raise ValueError(f"{name}={node} is not allowed; it must be a mapping of options")
    early = not HydraConfig.initialized()
    raw = OmegaConf.to_container(node, resolve=False)
    assert isinstance(raw, dict)
    values = {k: node[k] for k, text in raw.items() if not (early and "${hydra:" in str(text))}
    return {
        str(key): OmegaConf.to_container(value, resolve=True)
        if OmegaConf.is_config(value)
        else value
        for key, value in values.items()
    }


def _open_keys(node: Any, prefix: str = "") -> list[str]:
    """Return the keys whose value is ``???``."""
    if isinstance(node, dict):
        return [k for key, value in node.items() for k in _open_keys(value, f"{prefix}.{key}")]
    return [prefix[1:]] if node == "???" else []


def _named_node(cls: type, **arguments: Any) -> tuple[str, dict[str, Any]]:
    """Return the name of the class's file, and a node with every argument to set."""
    values = {
        name: arguments.get(name, parameter.default)
        for name, parameter in inspect.signature(cls).parameters.items()
    }
    target = f"{cls.__module__}.{cls.__qualname__}"
    return cls.__module__.rpartition(".")[2], {"_target_": target, **values}


def launched_rank(options: Mapping[str, Any]) -> int | None:
    """Return this process's rank if a launcher started it as one of several, else None."""
    launcher, _ = find_launcher(options.get("launcher", "auto"), os.environ)
    if launcher == "self":
        return None
    return int(os.environ.get("SLURM_PROCID" if launcher == "slurm" else "RANK", "0"))


def _given_dir(overrides: list[Override]) -> str | None:
    """Return the folder that Hydra is told to make, if that can be known before."""
    values = [str(each.value()) for each in overrides if each.key_or_group == "hydra.run.dir"]
    return values[-1] if values and "${" not in values[-1] else None


def _hydra_run_dir(given: str | None) -> str:
    run_dir = given or slurm_run_dir() or time.strftime("outputs/%Y-%m-%d/%H-%M-%S")
    return str(folder_of(run_dir))


def _hydra_dir(mode: str) -> str:
    return ".hydra" if mode == "fit" else f".hydra/{mode}"  # what trained a run stays readable
