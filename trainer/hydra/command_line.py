"""The check of a command line, before Hydra makes a folder or starts a job.

The config is composed once without types, so that every mistake in it, wherever it was written,
gets our message; then by Hydra, with types.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.config import TrainerConfig, option_names
from trainer.hydra.composition import (
    HYDRA_VERSION,
    OWN_OPTIONS,
    check_config,
    hydra_run_dir,
    is_read,
    register_configs,
    slip,
)
from trainer.instantiate import check_targets
from trainer.launching.launcher import is_one_of_several, speaks_for_all
from trainer.lock import check_free
from trainer.run_dir import check_writable, slurm_run_dir

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

# Keys, and the mode for them.
ONLY_IN = {**{mode: mode for mode in OWN_OPTIONS}, "trainer.profile": "fit", "test": "fit"}
_OPTIONS = tuple(f"{key}." for key in ("trainer", *OWN_OPTIONS))
GROUPS = ("callbacks", "logger")


class Place(NamedTuple):
    """Where a config is composed from.

    Attributes:
        folder: The folder of configs.
        config_name: The config.
        more: The folder that ``--config-dir`` adds.
    """

    folder: str
    config_name: str
    more: str | None = None


def check_command_line(place: Place, overrides: list[str], multirun: bool) -> bool:
    """Compose without types and check, for each single value of a sweep.

    Args:
        place: Where the config is.
        overrides: What the command line says besides flags.
        multirun: Whether it has the flag for a sweep; ``hydra.mode`` may ask for one, too.

    Returns:
        Whether another process, the first of several, makes the run's folder.

    Raises:
        ValueError: With our message for what Hydra or `check_config` refuses.
    """
    if place.more and not Path(place.more).is_dir():
        raise ValueError(f"--config-dir {place.more}: there is no such folder")
    register_configs(typed=False)
    parsed = _parse(overrides)
    _check_taken_out(parsed)
    cfg, hydra = _compose_explained(place, next(_variants(parsed)))
    sweeps = multirun or str(hydra.get("mode")) == "RunMode.MULTIRUN"
    if sweeps:
        from trainer.hydra.sweeps import check_run_dir, check_sweep

        params = (hydra.get("sweeper") or {}).get("params") or {}
        own = {override.key_or_group for override in parsed}
        parsed = _parse([f"{k}={v}" for k, v in params.items() if k not in own]) + parsed
        check_sweep(cfg, hydra)
        for variant in _variants(parsed):
            cfg, _ = _compose_explained(place, variant)
            options = _check(cfg, parsed, place)
            check_run_dir(options.get("run_dir"))
        if is_one_of_several(options):
            raise ValueError(
                "--multirun under torchrun or srun: every rank would run a sweep of its own; start "
                "the sweep without it, the Trainer starts the ranks of each job"
            )
        return False
    _check_one_value(parsed)
    if hydra.job.chdir and is_one_of_several(cfg.get("trainer") or {}):
        raise ValueError(
            "hydra.job.chdir=true under torchrun or srun: only rank 0 knows the folder; leave it "
            "out, and write ${hydra:runtime.output_dir} where the config needs the folder"
        )
    options = _check(cfg, parsed, place)
    run_dir = options.get("run_dir")
    check_writable(run_dir or slurm_run_dir() or _given_dir(parsed) or "outputs")
    if cfg.get("mode") == "fit" and not is_one_of_several(options):
        check_free(Path(hydra_run_dir(run_dir)))
    return not speaks_for_all(options)


def _parse(overrides: list[str]) -> list[Override]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise ValueError(str(error)) from None


def _check(cfg: DictConfig, overrides: list[Override], place: Place) -> dict[str, Any]:
    """Check what one job is to do; return the Trainer's options."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        options = check_config(cfg)
    except OmegaConfBaseException as error:
        raise ValueError(str(error)) from None
    _check_effect(overrides, cfg.get("mode", "fit"))
    _check_groups(overrides, cfg, place)
    for key in ("task", "data", "trainer", *GROUPS):
        node = cfg.get(key)
        raw = OmegaConf.is_config(node)
        check_targets(OmegaConf.to_container(node, resolve=False) if raw else node, key)
    if cfg.get("mode") == "verify":
        from trainer.verify.runs import check_can_start

        check_can_start(TrainerConfig.from_options(options))
    return options


def _compose(place: Place, overrides: list[str]) -> tuple[DictConfig, DictConfig]:
    """Return the job's config and Hydra's own."""
    from hydra import compose, version
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import flag_override

    version.setbase(HYDRA_VERSION)
    paths = create_config_search_path(place.folder)
    if place.more:
        more = f"file://{Path(place.more).resolve()}"
        paths.prepend("command-line", more, SearchPathQuery(provider="schema"))
    GlobalHydra.instance().clear()
    Hydra.create_main_hydra2("job", paths)
    try:
        cfg = compose(place.config_name, overrides, return_hydra_config=True)
    finally:
        GlobalHydra.instance().clear()
    with flag_override(cfg, ["struct", "readonly"], [False, False]):
        return cfg, cfg.pop("hydra")


def _compose_explained(place: Place, overrides: list[str]) -> tuple[DictConfig, DictConfig]:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]

    try:
        return _compose(place, overrides)
    except YAMLError as error:
        where = " ".join(str(error).split())  # the file, the line and the column are in it
        raise ValueError(f"a config is not YAML: {where}; mend it there") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{_undecodable(place)}: {error}; save it as UTF-8") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_explain(error, place, overrides)) from None


def _undecodable(place: Place) -> str:
    """Name the file that is not text in UTF-8; the error itself does not."""
    folders = [place.folder, *([place.more] if place.more else [])]
    for path in (path for folder in folders for path in Path(folder).rglob("*.yaml")):
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return str(path)
    return "a config"


def _variants(overrides: list[Override]) -> Iterator[list[str]]:
    """Yield the overrides of one job at a time, so that each value of each sweep occurs once.

    What a sweeper takes from an interval, or finds by a pattern, is left as the config has it.
    """
    from hydra.core.override_parser.types import ValueType

    choices, pattern = [], ValueType.GLOB_CHOICE_SWEEP
    for override in overrides:
        # An unknown option is to be added, so that it reaches our own check.
        option = not (override.is_add() or override.is_force_add() or override.is_delete())
        prefix = "++" if option and override.key_or_group.startswith(_OPTIONS) else ""
        if override.is_sweep_override():
            if not override.is_discrete_sweep() or override.value_type == pattern:
                continue
            key = prefix + override.get_key_element()
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([f"{prefix}{override.input_line}"])
    first = [values[0] for values in choices]
    yield first
    for i, values in enumerate(choices):
        for value in values[1:]:
            yield [*first[:i], value, *first[i + 1 :]]


def _explain(error: Exception, place: Place, overrides: list[str]) -> str:
    """Name what was meant by a key that Hydra does not find."""
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    if twice := re.match(r"Multiple values for ([\w/@]+)\.", str(error)):
        return f"{twice[1]} is in the defaults list already; write {twice[1]}=..., without +"
    key = str(getattr(error.__cause__, "full_key", ""))
    culprit = [o for o in overrides if o.partition("=")[0] == key]
    if not culprit:
        options = [o for o in overrides if o.partition("=")[0] in option_names()]
        if options:
            return f"{options[0]}: it is an option of the trainer: write trainer.{options[0]}"
        return str(error)
    others = [o for o in overrides if o not in culprit]
    try:
        cfg, _ = _compose(place, others)
    except HydraException as another:
        return _explain(another, place, others)
    parent, _, name = key.rpartition(".")
    advice = None if parent else slip(name, culprit[0].partition("=")[2], cfg)
    if advice is None:
        node = OmegaConf.select(cfg, parent) if parent else cfg
        names = [str(n) for n in node] if isinstance(node, Mapping) else []
        if name in names:  # the value is not of the type that a dataclass of the project's asks for
            return f"{culprit[0]}: {str(error.__cause__).splitlines()[0]}"
        near = get_close_matches(name, names, n=1)
        dotted = f"{parent}." if parent else ""
        advice = (
            f"did you mean {dotted}{near[0]}?"
            if near
            else f"there are: {', '.join(names) or 'none'}."
        )
    return f"there is no key {key!r} in the config; {advice} (+{key}=... adds a key of your own)"


def _check_taken_out(overrides: list[Override]) -> None:
    """Say how to do without an option, callbacks or loggers, where Hydra would mislead."""
    for override in overrides:
        key = override.key_or_group
        if override.is_delete() and key.startswith(_OPTIONS):
            raise ValueError(
                f"{override.input_line}: an option cannot be taken out; write {key}=null, or "
                "leave it out for its default"
            )
        if key in GROUPS and override.value() in (None, False, []):
            raise ValueError(f"{override.input_line}: to have none at all, write {key}=none")


def _check_one_value(overrides: list[Override]) -> None:
    for override in overrides:
        if override.is_sweep_override():
            key, text = override.get_key_element(), override.get_value_string()
            raise ValueError(
                f"{override.input_line} is several values; add --multirun for a job with each of "
                f"them, or write {key}=[{text}] for one list, {key}=\"'{text}'\" for one string"
            )


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


def _check_groups(overrides: list[Override], cfg: DictConfig, place: Place) -> None:
    """Refuse ``+group=name`` where there is no such group: Hydra makes it a key of its own."""
    from omegaconf import OmegaConf

    for override in overrides:
        key, value = override.key_or_group, override.value()
        if not override.is_add() or override.is_force_add() or not isinstance(value, str):
            continue
        refers = any(f"${{{key}" in str(other.input_line) for other in overrides)
        is_value = isinstance(OmegaConf.select(cfg, key), str) and re.fullmatch(r"[\w./-]+", value)
        if is_value and not refers and not is_read(key, cfg):
            groups = {path.name for path in Path(place.folder).iterdir() if path.is_dir()}
            raise ValueError(
                f"{override.input_line}: there is no config group {key!r}; there are: "
                f"{', '.join(sorted({*groups, *GROUPS}))}. A key of your own that no other "
                f"refers to is added by +{override.input_line}"
            )


def _given_dir(overrides: list[Override]) -> str | None:
    """Return the folder that Hydra is told to make, if that can be known before."""
    values = [str(each.value()) for each in overrides if each.key_or_group == "hydra.run.dir"]
    return values[-1] if values and "${" not in values[-1] else None
