"""What Hydra composes for a run, and what such a config must hold."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Mapping
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import migration
from trainer.config import TrainerConfig
from trainer.finding.options import FindLRConfig, FindMicroBatchSizeConfig
from trainer.options import from_options, option_fields
from trainer.planning.options import PlanConfig
from trainer.run_dir import check_resume, folder_of, slurm_run_dir

if TYPE_CHECKING:
    from omegaconf import DictConfig

HYDRA_VERSION = "1.3"
PRESETS = Path(__file__).parents[1] / "conf"  # <group>/<name>.yaml
OWN_OPTIONS: dict[str, type] = {  # of a mode: they stand below a key of its name
    "plan": PlanConfig,
    "find_lr": FindLRConfig,
    "find_micro_batch_size": FindMicroBatchSizeConfig,
}
EVALUATING = ("validate", "test", "predict")
MODES = ("fit", *EVALUATING, "verify", *OWN_OPTIONS)

# The top level of every config, with its defaults; `task` and `data` come from the project.
DEFAULTS: dict[str, Any] = {
    "task": None,
    "data": None,
    "mode": "fit",
    **{mode: asdict(options()) for mode, options in OWN_OPTIONS.items()},
    "test": False,
    "ckpt_path": None,
    "predictions_dir": None,
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

    from trainer.callbacks import default_callbacks
    from trainer.loggers import default_loggers

    store = ConfigStore.instance().store
    store(group="trainer", name="options", node=TrainerConfig if typed else asdict(TrainerConfig()))
    store(group="trainer", name="default", node={"defaults": ["options", "/trainer_app@_global_"]})
    groups = {
        "callbacks": dict(_named_node(type(each)) for each in default_callbacks()),
        "logger": dict(_named_node(type(each)) for each in default_loggers()),
    }
    for group in groups:
        # In place of the whole mapping, so that it drops the project's own as well.
        store(group=group, name="none", node={group: None}, package="_global_")
    for path in PRESETS.glob("*/*.yaml"):
        store(group=path.parent.name, name=path.stem, node=OmegaConf.load(path))
    app = {
        "defaults": [
            "_self_",
            *({f"/{group}": []} for group in groups),  # so that +callbacks=... is taken, too
            {"override /hydra/job_logging": "stdout"},
        ],
        **DEFAULTS,
        **(OWN_OPTIONS if typed else {}),
        **groups,
        "hydra": {
            "run": {"dir": "${trainer_run_dir:${trainer.run_dir}}"},
            "output_subdir": "${trainer_hydra_dir:${mode}}",
            "help": {"template": "${trainer_help:}"},
        },
    }
    store(name="trainer_app", node=app)
    resolver = OmegaConf.register_new_resolver
    resolver("trainer_run_dir", hydra_run_dir, use_cache=True, replace=True)
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
    if cfg.get("ckpt_path") is not None and cfg.get("mode", "fit") not in EVALUATING:
        raise ValueError(
            f"ckpt_path={cfg.ckpt_path} with mode={cfg.get('mode', 'fit')}: it names the weights "
            "to validate, test or predict with; to go on from a checkpoint set trainer.resume, to "
            "start a new run from its weights trainer.init_from"
        )
    if cfg.get("predictions_dir") is not None and cfg.get("mode", "fit") != "predict":
        raise ValueError(
            f"predictions_dir={cfg.predictions_dir} with mode={cfg.get('mode', 'fit')}: it is the "
            "folder for the predictions of mode=predict; leave it out"
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
    for mode, own in OWN_OPTIONS.items():
        try:
            from_options(own, _plain(cfg.get(mode), mode))
        except ValueError as mistake:
            raise ValueError(f"{mode}: {mistake}") from None
    if cfg.get("ckpt_path") in ("best", "last") and checked.run_dir is None:
        raise ValueError(
            f"ckpt_path={cfg.ckpt_path} is looked for in run_dir, and this run has a new one; name "
            "the folder of the run that trained: trainer.run_dir=..., or give a path"
        )
    if cfg.get("mode", "fit") == "fit":
        checked.check_limits()
    return options


def is_read(key: str, cfg: DictConfig) -> bool:
    """Whether `run` reads the key, or another key refers to it."""
    from omegaconf import OmegaConf

    refers = r"\$\{" + re.escape(key) + r"[.}\[]"
    return key in READ_KEYS or re.search(refers, OmegaConf.to_yaml(cfg)) is not None


def _check_top_level(cfg: DictConfig) -> None:
    """Refuse a key that looks like a slip; keys of the project's own pass."""
    for key in map(str, cfg):
        if is_read(key, cfg):
            continue
        advice = slip(key, cfg[key], cfg)
        if advice:
            raise ValueError(
                f"nothing reads the config's key {key!r}; {advice} A key of your own needs another "
                "name, or a key that refers to it"
            )


def slip(key: str, value: Any, cfg: DictConfig) -> str | None:
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


def _named_node(cls: type) -> tuple[str, dict[str, Any]]:
    """Return the name of the class's file, and a node with every argument to set."""
    values = {name: each.default for name, each in inspect.signature(cls).parameters.items()}
    target = f"{cls.__module__}.{cls.__qualname__}"
    return cls.__module__.rpartition(".")[2], {"_target_": target, **values}


def hydra_run_dir(given: str | None) -> str:
    """Return the folder that Hydra makes for a job that is not part of a sweep."""
    run_dir = given or slurm_run_dir() or time.strftime("outputs/%Y-%m-%d/%H-%M-%S")
    return str(folder_of(run_dir))


def _hydra_dir(mode: str) -> str:
    return ".hydra" if mode == "fit" else f".hydra/{mode}"  # what trained a run stays readable
