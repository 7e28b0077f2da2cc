"""An optimizer's state, taken over by a resumed run, also where it was changed on purpose."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from trainer.checkpoint.changes import FROZEN, IMPLEMENTATION, Description
from trainer.messages import listed


def take_over(
    optimizer: torch.optim.Optimizer,
    saved: dict[str, Any],
    old: Description,
    new: Description,
    changed: Collection[str],
) -> list[str]:
    """Load the state of an earlier run; that of changed experiments by the parameters' names.

    Args:
        optimizer: A fresh one. Where optimizer or schedule have changed its values stay.
        saved: The ``state_dict()`` of the earlier one.
        old: The experiment that ``saved`` is from.
        new: The experiment that ``optimizer`` is part of.
        changed: The parts in which they differ.

    Returns:
        Notes on what starts anew, and on what does not.
    """
    kinds = [description["optimizer"]["class"] for description in (old, new)]
    if kinds[0] != kinds[1]:
        return [f"the state of {kinds[0]} is of no use to {kinds[1]}, which starts anew"]
    keeps_values = not {"optimizer", "schedule"} & set(changed)
    is_same = keeps_values and [*old["parameters"].items()] == [*new["parameters"].items()]
    if is_same and "model" not in changed:
        optimizer.load_state_dict(_as_implemented(saved, optimizer))
        return []
    if saved.keys() != {"state", "param_groups"}:
        return [f"{kinds[0]} has a state of a kind of its own, which is lost: it starts anew"]
    numbers = {name: number for number, name in enumerate(old["parameters"])}
    state, anew = {}, []
    for number, name in enumerate(new["parameters"]):
        shapes = [d["model"].get(name, "").removesuffix(FROZEN) for d in (old, new)]
        if shapes[0] != shapes[1]:
            anew.append(name)
        elif numbers.get(name) in saved["state"]:
            state[number] = saved["state"][numbers[name]]
    groups = optimizer.state_dict()["param_groups"]
    reached: dict[str, float] = {}
    if keeps_values:
        pairs = zip(saved["param_groups"], groups, strict=True)
        groups = [{**earlier, "params": group["params"]} for earlier, group in pairs]
    elif all("monitor" in description["schedule"] for description in (old, new)):
        reached = _reached_rates(saved, old, new)
        for name, group in zip(new["groups"], groups, strict=True):
            if name in reached:
                is_tensor, rate = isinstance(group["lr"], torch.Tensor), reached[name]
                group["lr"] = torch.full_like(group["lr"], rate) if is_tensor else rate
    loaded = {"state": state, "param_groups": groups}
    optimizer.load_state_dict(_as_implemented(loaded, optimizer))
    notes = [f"the optimizer starts anew for {listed(anew)}"] if anew else []
    if reached:
        rates = dict.fromkeys(f"{rate:.4g}" for rate in reached.values())
        notes.append(f"the learning rate stays where it was, at {listed(rates)}")
    return notes


def _reached_rates(saved: dict[str, Any], old: Description, new: Description) -> dict[str, float]:
    """Return the present rate of the groups that began with the same one, by name.

    It is the work of a schedule that follows a metric: no formula gives it again.
    """
    present = [float(group["lr"]) for group in saved["param_groups"]]
    rates = dict(zip(old["groups"], present, strict=True))
    found = {}
    for name, values in new["groups"].items():
        own = [parameter for parameter, group in new["parameters"].items() if group == name]
        earlier = {
            old["parameters"][parameter] for parameter in own if parameter in old["parameters"]
        }
        began = {(old["groups"][group]["lr"], rates[group]) for group in earlier}
        if len(began) == 1 and (pair := began.pop())[0] == values["lr"]:
            found[name] = pair[1]
    return found


def _as_implemented(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Let ``optimizer`` compute its own way: a checkpoint may come from another device."""
    for group, own in zip(saved.get("param_groups", ()), optimizer.param_groups, strict=False):
        group.update({name: own[name] for name in IMPLEMENTATION if name in own})
    return saved
