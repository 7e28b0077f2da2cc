"""What a LightningModule and its data keep in a checkpoint, beside weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer import distributed, metrics
from trainer.trees import map_leaves

if TYPE_CHECKING:
    from trainer.lightning.module import LightningTask


def state_of(task: LightningTask) -> dict[str, Any]:
    """Return it; must be called on every rank."""
    state: dict[str, Any] = {"in_epoch": task.in_epoch, "epoch": task.log_book.epoch.state()}
    if task.run.step_in_epoch:
        state["metrics"] = metrics.state(metrics_of(task.module))
    if task.calls.defines("on_save_checkpoint"):
        state["saved"] = _shown_to(task, "on_save_checkpoint", {})
        _check_plain(task, state["saved"])
    datamodule = task.data.datamodule
    if datamodule is not None and (kept := datamodule.state_dict()):
        state["datamodule"] = kept
    return state


def restore(task: LightningTask, state: Mapping[str, Any]) -> None:
    """Take back what `state_of` returned on rank 0; must be called on every rank."""
    task.in_epoch = state["in_epoch"]
    task.log_book.epoch.restore(state["epoch"])
    _restore_metrics(task.module, state.get("metrics"))
    if task.calls.defines("on_load_checkpoint"):
        _shown_to(task, "on_load_checkpoint", state.get("saved", {}))
    if "datamodule" in state and task.data.datamodule is not None:
        task.data.datamodule.load_state_dict(state["datamodule"])


def config_of(task: LightningTask) -> dict[str, Any]:
    """Return the hyperparameters that a checkpoint can hold, and the names of the others."""
    hparams = task.module.hparams
    config: dict[str, Any] = {}
    if found := {str(name): value for name, value in hparams.items() if _is_plain(value)}:
        config["hyper_parameters"] = found
    if left_out := [str(name) for name in hparams if name not in found]:
        config["hyper_parameters_left_out"] = left_out
        task.log_book.note(
            f"checkpoints will not have the hyperparameters {', '.join(left_out)}: only plain "
            "values are kept. Give these to load_from_checkpoint"
        )
    return config


def _shown_to(task: LightningTask, hook: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Call a hook with the part of a checkpoint that Lightning would show it, and ``saved``.

    Returns:
        What the hook has added.
    """
    checkpoint = {
        "epoch": task.run.epoch,
        "global_step": task.run.step,
        "state_dict": task.module.state_dict(),
        "hyper_parameters": dict(task.module.hparams),
        **saved,
    }
    before = {n: dict(v) if isinstance(v, dict) else v for n, v in checkpoint.items()}
    task.calls.hook(hook, checkpoint)
    ours = before.keys() - saved.keys()
    changed = sorted(n for n in ours if not _has_same_parts(checkpoint.get(n), before[n]))
    if changed:
        task.log_book.note(
            f"{type(task.module).__name__}.{hook} changed {', '.join(changed)} of the checkpoint, "
            "which has no effect: weights and counters are kept and loaded as they are, and a hook "
            "may add entries of its own"
        )
    return {name: value for name, value in checkpoint.items() if name not in before}


def _has_same_parts(value: Any, before: Any) -> bool:
    """Whether nothing was put in, taken out or put in its place."""
    if not isinstance(value, dict) or not isinstance(before, dict):
        return value is before
    return value.keys() == before.keys() and all(value[name] is before[name] for name in before)


def _check_plain(task: LightningTask, saved: Mapping[str, Any]) -> None:
    """Refuse what a checkpoint cannot hold."""
    for name, value in saved.items():
        map_leaves(functools.partial(_check_leaf, type(task.module).__name__, name), value)


def _check_leaf(module: str, name: str, leaf: Any) -> None:
    if not isinstance(leaf, torch.Tensor | np.generic | bytes) and not _is_plain(leaf):
        raise ValueError(
            f"{module}.on_save_checkpoint set checkpoint[{name!r}], which is or holds a "
            f"{type(leaf).__module__}.{type(leaf).__qualname__}; a checkpoint can hold tensors, "
            "numbers, strings, None, and dicts, lists and tuples of these"
        )


def metrics_of(module: torch.nn.Module) -> metrics.MetricSet:
    """Return the torchmetrics that a module holds, each by itself, those in wrappers included."""
    found = {n: part for n, part in module.named_modules() if hasattr(part, "_update_count")}
    if found:
        from torchmetrics.wrappers.abstract import WrapperMetric

        found = {n: part for n, part in found.items() if not isinstance(part, WrapperMetric)}
    return metrics.MetricSet(found, exact=False)


def _restore_metrics(module: torch.nn.Module, state: Mapping[str, Any] | None) -> None:
    if not state:
        return
    if len(state["ranks"]) == distributed.world_size():
        metrics.restore(metrics_of(module), state)
    elif distributed.rank() == 0:
        print("resume: other ranks than before, so torchmetrics start anew in this epoch")


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return type(value) is dict and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
