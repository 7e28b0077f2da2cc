"""What an experiment is, in plain values, and what differs between two descriptions of it.

Every checkpoint carries the description of the run that wrote it. A resumed run compares it with
its own: whatever differs would have made another run, so it has to be meant. A description is made
before anything is loaded or trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.config import TrainerConfig
from trainer.data.loading import Source
from trainer.messages import listed
from trainer.options import show
from trainer.task import OptimizerSetup

Description = Mapping[str, Mapping[str, Any]]
# For each optimizer, by its name; None for an only one. Model and data are the same in all.
Experiments = Mapping[str | None, Description]

# What a user can accept, and what then happens.
ACCEPTED = {
    "model": "the weights that fit are loaded, all others start anew",
    "optimizer": "the new values apply, with the old state as far as it fits",
    "schedule": "the new schedule goes on from this step",
    "data": "the new order goes on from this position in the epoch",
}

# Options that an optimizer's step depends on, beside the optimizer's own values.
_STEP_OPTIONS = ("gradient_clip_norm", "precision", "comm_hook")
_POWERSGD_OPTIONS = ("powersgd_rank", "powersgd_start_step")
# How an optimizer computes; not part of the experiment.
IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
# Entries of a parameter group that are no hyperparameters of the optimizer.
_SCHEDULED = ("max_lr", "min_lr", "base_momentum", "max_momentum")
_NO_HYPERPARAMETER = {"params", "param_names", "initial_lr", "name", *_SCHEDULED, *IMPLEMENTATION}
# What a scheduler's state says of its progress, of the optimizer and of other schedulers.
_PROGRESS = {"last_epoch", "_last_lr", "_step_count", "_is_initial", "_get_lr_called_within_step"}
_PROGRESS |= {"best", "num_bad_epochs", "cooldown_counter", "mode_worse", "base_lrs", "_schedulers"}
FROZEN = " frozen"
_PLAIN = (str, int, float, bool, type(None))


def describe(
    task: nn.Module, setup: OptimizerSetup, config: TrainerConfig, data: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Describe an experiment that has not started yet.

    Args:
        task: The model.
        setup: Its optimizer and scheduler.
        config: The options.
        data: What `describe_data` returned.
    """
    return {
        "model": _describe_model(task),
        "optimizer": _describe_optimizer(setup, config),
        "groups": _describe_groups(setup),
        "step": _describe_step(config),
        "parameters": _describe_parameters(task, setup.optimizer),
        "schedule": _describe_schedule(setup),
        "data": dict(data),
        "cut": {"micro_batch_size": config.micro_batch_size},
    }


def describe_data(
    config: TrainerConfig, source: Source, global_batch_size: int | None, orders_epochs: bool
) -> dict[str, Any]:
    """Describe what the order of the samples follows from.

    Args:
        config: The options.
        source: The training data.
        global_batch_size: Samples per step, where every step has as many.
        orders_epochs: Whether the user's ``train_indices`` gives the order.
    """
    loader = source.loader
    order: dict[str, Any] = {"drop_last": config.drop_last}
    if loader is not None:
        sampler = getattr(loader.batch_sampler, "sampler", loader.batch_sampler)
        order = {"drop_last": loader.drop_last, "sampler": type(sampler).__name__}
    elif orders_epochs:
        order["sampler"] = "train_indices"
    elif not source.is_stream:
        order["shuffle"] = config.shuffle
    if config.reproducible:
        order |= {"reproducible": True, "micro_batch_size": config.micro_batch_size}
    return {
        "seed": config.seed,
        "global_batch_size": global_batch_size,
        "limit_train_batches": config.limit_train_batches,
        "overfit_batches": config.overfit_batches,
        **order,
    }


def differences(old: Description, new: Description) -> dict[str, list[str]]:
    """Return what differs, one line per difference, for each part that a user can accept.

    A change of the options of the step is accepted as one of the optimizer.
    """
    found = {part: list(_lines(part, old[part], new[part])) for part in ACCEPTED}
    found["optimizer"] += (f"optimizer: {line}" for line in _group_lines(old, new))
    found["optimizer"] += _lines("optimizer", old["step"], new["step"])
    return {part: lines for part, lines in found.items() if lines}


def differences_of_turns(old: Experiments, new: Experiments) -> dict[str, list[str]]:
    """Return what differs of a run whose optimizers take turns, as `differences` does."""
    if old.keys() != new.keys():
        names = (listed([name or "one optimizer" for name in side]) for side in (old, new))
        found = differences(next(iter(old.values())), next(iter(new.values())))
        found = {part: lines for part, lines in found.items() if part in ("model", "data")}
        return {**found, "optimizer": [f"optimizer: {' -> '.join(names)}"]}
    found = {}
    for name, description in new.items():
        for part, lines in differences(old[name], description).items():
            if name is not None and part in ("optimizer", "schedule"):
                lines = [f"{name}: {line}" for line in lines]
            found[part] = list(dict.fromkeys([*found.get(part, ()), *lines]))
    return found


def changed_parts(old: Description, new: Description) -> tuple[str, ...]:
    """Return the parts whose saved state does not simply go on.

    The options of the step have no state: with others, all of the optimizer's goes on.
    """
    return tuple(differences({**old, "step": {}}, {**new, "step": {}}))


def notes_on_cut(old: Description, new: Description) -> list[str]:
    """Return what follows from micro-batches of another size, where they had a fixed one."""
    before, after = (side["cut"]["micro_batch_size"] for side in (old, new))
    if before is None or before == after:
        return []
    return [
        f"micro_batch_size {before} -> {show(after)}: dropout masks and BatchNorm follow the "
        "micro-batches, so they are not those of a run that never stopped"
    ]


def refuse(path: Path, found: Mapping[str, list[str]], config: TrainerConfig) -> None:
    """Refuse to resume from ``path`` if there are differences that the user has not accepted.

    Args:
        path: The checkpoint.
        found: What `differences` returned.
        config: Says how to resume, and what is accepted.

    Raises:
        ValueError: Showing every difference, and what to write.
    """
    accepted = config.accept_changes
    new = [part for part in found if part not in accepted]
    if not new:
        return
    lines = [f"  {line}" for part in found for line in found[part]]
    names = [part for part in ACCEPTED if part in found or part in accepted]
    raise ValueError(
        "\n".join(
            [
                f"the run to resume from {path} was another experiment:",
                *lines,
                f"Set these back; or, if they are meant, set accept_changes={show(names)}:",
                *(f"  {part}: {ACCEPTED[part]}" for part in new),
                "or start a new run from its weights: set "
                f"init_from={path} in place of resume={config.resume}",
                "(On the command line: trainer.accept_changes=..., trainer.init_from=...)",
            ]
        )
    )


def moved(clock: Mapping[str, Any], old: Description, new: Description) -> int:
    """Return the step in the epoch at which the new order goes on, at the same sample.

    Args:
        clock: The saved ``TrainState``.
        old: The experiment that it counted in.
        new: The experiment that goes on.

    Raises:
        ValueError: If that sample is not the first of one of the new global batches.
    """
    done: int = clock["step_in_epoch"]
    before, after = (side["data"]["global_batch_size"] for side in (old, new))
    if done == 0 or before == after:
        return done
    if before is None or after is None:
        raise ValueError(
            f"accept_changes=[data] {done} steps into an epoch, and the batches of a sampler have "
            "no fixed size, so this position is not known in the other order; resume from a "
            "checkpoint at the end of an epoch"
        )
    position = done * before
    if position % after:
        fitting = [size for size in range(1, position + 1) if position % size == 0]
        near = [max(s for s in fitting if s < after), *(s for s in fitting if s > after)][:2]
        raise ValueError(
            f"accept_changes=[data] at sample {position} of an epoch, which is no whole number of "
            f"global batches of {after}; with global_batch_size={' or '.join(map(str, near))} it "
            "would be; or resume from a checkpoint at the end of an epoch"
        )
    steps: int = position // after
    return steps


def lambda_counts(scheduler: Any) -> dict[str, list[int]]:
    """Return for which steps (or epochs) to compare the functions in a scheduler, by its part.

    Two functions that agree at the present step and half-way to it are taken for the same. What
    they say of later steps may change: as with a run that is made longer.
    """
    return {
        place: sorted({part.last_epoch // 2, part.last_epoch} - {0})
        for place, part in _parts(scheduler)
        if hasattr(part, "lr_lambdas")
    }


def lambda_factors(scheduler: Any, counts: Mapping[str, list[int]]) -> dict[str, Any]:
    """Describe what the functions in a scheduler return, for no state tells of them."""
    return {
        f"{place}factor at {count}": [
            float(f"{float(function(count)):.12g}")  # another machine may round otherwise
            for function in part.lr_lambdas
        ]
        for place, part in _parts(scheduler)
        if hasattr(part, "lr_lambdas")
        for count in counts.get(place, ())
    }


def _lines(part: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    kinds = [side.get("class") for side in (old, new)]
    head = f"{part}: "
    if part == "schedule" and kinds[0] == kinds[1]:
        head += f"{kinds[0]} "
    for line in _changes(old, new, kinds[0] == kinds[1]):
        yield head + line


def _changes(
    old: Mapping[str, Any], new: Mapping[str, Any], is_same_kind: bool = True
) -> Iterator[str]:
    for name in [*old, *(name for name in new if name not in old)]:
        before, after = (side.get(name) for side in (old, new))
        # Of another class, what only one of them has is no change.
        if before == after or (not is_same_kind and not (name in old and name in new)):
            continue
        what = "" if name == "class" else f"{name} "
        yield f"{what}{_show(before)} -> {_show(after)}"


def _group_lines(old: Description, new: Description) -> Iterator[str]:
    """Say what has changed in the optimizer's parameter groups."""
    is_same_kind = old["optimizer"]["class"] == new["optimizer"]["class"]
    # A parameter that only one of the models has is the model's difference.
    both = [name for name in old["model"] if name in new["model"]]
    if old["groups"].keys() == new["groups"].keys():
        for name, values in old["groups"].items():
            place = "" if len(old["groups"]) == 1 else f"{name} "
            for line in _changes(values, new["groups"][name], is_same_kind):
                yield place + line
        before, after = (
            {name: group for name, group in side["parameters"].items() if name in both}
            for side in (old, new)
        )
        yield from _changes(before, after)
        return
    yield " -> ".join(listed(side["groups"]) for side in (old, new))
    # Other groups: what matters is what they change for a parameter.
    changed: dict[str, list[str]] = {}
    for name in both:
        before, after = (
            side["groups"].get(side["parameters"].get(name, ""), {}) for side in (old, new)
        )
        for line in _changes(before, after, is_same_kind):
            changed.setdefault(line, []).append(name)
    for line, names in changed.items():
        yield f"{line} for {listed(names)}"


def _show(value: Any) -> str:
    return "none" if value is None else str(value)


def _describe_model(task: nn.Module) -> dict[str, Any]:
    tensors = task.state_dict(keep_vars=True)
    return {name: _tensor(t) for name, t in tensors.items() if isinstance(t, torch.Tensor)}


def _tensor(tensor: torch.Tensor) -> str:
    words = str(tuple(tensor.shape))
    if tensor.dtype != torch.float32:
        words += f" {str(tensor.dtype).removeprefix('torch.')}"
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return words + FROZEN if frozen else words


def _describe_optimizer(setup: OptimizerSetup, config: TrainerConfig) -> dict[str, Any]:
    found: dict[str, Any] = {"class": type(setup.optimizer).__name__}
    if config.lr_scaling != "none":
        names = ("lr_scaling", "lr_reference_batch_size", "lr_warmup_steps")
        found |= {name: getattr(config, name) for name in names}
    return found


def _describe_step(config: TrainerConfig) -> dict[str, Any]:
    names = _STEP_OPTIONS + (_POWERSGD_OPTIONS if config.uses_powersgd else ())
    return {name: getattr(config, name) for name in names}


def _describe_groups(setup: OptimizerSetup) -> dict[str, dict[str, Any]]:
    hidden = set(_NO_HYPERPARAMETER)
    if getattr(setup.scheduler, "cycle_momentum", False):
        hidden |= {"betas", "momentum"}
    found = {}
    for number, group in enumerate(setup.optimizer.param_groups):
        # A scheduler may have changed the rate already.
        values = {**group, "lr": group.get("initial_lr", group["lr"])}
        shown = {name: value for name, value in values.items() if name not in hidden}
        found[_group_name(group, number)] = _flat(shown)
    return found


def _describe_parameters(task: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the group of each of the optimizer's parameters, in its own order."""
    names = {id(parameter): name for name, parameter in task.named_parameters()}
    return {
        names[id(parameter)]: _group_name(group, number)
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }


def _group_name(group: Mapping[str, Any], number: int) -> str:
    return f"group {group.get('name', number)}"


def _describe_schedule(setup: OptimizerSetup) -> dict[str, Any]:
    if setup.scheduler is None:
        return {"class": None}
    found: dict[str, Any] = {"class": type(setup.scheduler).__name__}
    if setup.monitor is None:
        found["interval"] = setup.interval or "step"
    else:
        found["monitor"] = setup.monitor
    for name in _SCHEDULED:
        values = [group[name] for group in setup.optimizer.param_groups if name in group]
        if values:
            found |= _flat({name: values if len(values) > 1 else values[0]})
    for place, part in _parts(setup.scheduler):
        if place:
            found[f"{place}class"] = type(part).__name__
        state = {name: v for name, v in part.state_dict().items() if name not in _PROGRESS}
        found |= {f"{place}{name}": value for name, value in _flat(state).items()}
    return found


def _parts(scheduler: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a scheduler and those that it is made of, each with a prefix for its values."""
    if scheduler is None:
        return
    yield place, scheduler
    for number, part in enumerate(getattr(scheduler, "_schedulers", ())):
        yield from _parts(part, f"{place}{number}.")


def _flat(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return what is plain in nested values, by dotted name; the rest says nothing readable."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).lstrip("_")
        if isinstance(value, torch.Tensor | np.generic):
            value = value.tolist()
        if isinstance(value, list | tuple) and any(isinstance(v, Mapping) for v in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": v for inner, v in _flat(value).items()}
        elif isinstance(value, list | tuple) and all(isinstance(v, _PLAIN) for v in value):
            found[name] = list(value)
        elif isinstance(value, _PLAIN):
            found[name] = value
    return found
