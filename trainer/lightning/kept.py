"""What a LightningModule and its data keep in a checkpoint, beside weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from trainer import distributed, metrics

if TYPE_CHECKING:
    from trainer.lightning.module import LightningTask


def state_of(task: LightningTask) -> dict[str, Any]:
    """Return it; must be called on every rank."""
    state: dict[str, Any] = {"in_epoch": task.in_epoch, "epoch": task.log_book.epoch.state()}
    if task.run.step_in_epoch:
        state["metrics"] = metrics.state(_metrics_of(task.module))
    if task.calls.defines("on_save_checkpoint"):
        checkpoint = _shown(task)
        known = set(checkpoint)
        task.calls.hook("on_save_checkpoint", checkpoint)
        state["saved"] = {name: v for name, v in checkpoint.items() if name not in known}
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
        task.calls.hook("on_load_checkpoint", {**_shown(task), **state.get("saved", {})})
    if "datamodule" in state and task.data.datamodule is not None:
        task.data.datamodule.load_state_dict(state["datamodule"])


def plain_values(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return those hyperparameters that a checkpoint can hold."""
    return {str(name): value for name, value in hparams.items() if _is_plain(value)}


def _shown(task: LightningTask) -> dict[str, Any]:
    """Return the part of a checkpoint that Lightning would show the module."""
    return {
        "epoch": task.run.epoch,
        "global_step": task.run.step,
        "state_dict": task.module.state_dict(),
        "hyper_parameters": dict(task.module.hparams),
    }


def _metrics_of(module: torch.nn.Module) -> metrics.MetricSet:
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
        metrics.restore(_metrics_of(module), state)
    elif distributed.rank() == 0:
        print("resume: other ranks than before, so torchmetrics start anew in this epoch")


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return type(value) is dict and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
