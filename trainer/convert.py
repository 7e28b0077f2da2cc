"""From a checkpoint of ours to one that Lightning loads: ``python -m trainer.convert``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.files import replace_file
from trainer.checkpoint.finding import find
from trainer.checkpoint.manifest import CONFIG, verified
from trainer.checkpoint.weights import read_weights
from trainer.checkpoint.writer import read_state

LEFT_OUT = "hyper_parameters_left_out"  # in the config: names (see ``lightning.kept``)


def to_lightning(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a checkpoint of Lightning says in place of one of ours.

    These are the weights, the states of optimizers and schedulers, how far the run has come, and
    the hyperparameters as far as they are known: those of a LightningModule, or the arguments in
    the config that the run was started from. The states of callbacks and loggers are not in it,
    nor is a loss scale (fp16), which starts anew.

    Args:
        path: A checkpoint, or the folder of a run, of which the last one is taken.

    Raises:
        ValueError: If it is missing or damaged.
        ModuleNotFoundError: If Lightning is not installed.
    """
    from lightning import __version__

    folder = find("", path, of_run="last")
    state = read_state(folder)
    clock = state["train_state"]
    task = state["shared"].get("task") or {}
    schedulers = [s["scheduler"] for s in _each(state, "schedule") if s["scheduler"]]
    return {
        **task.get("saved", {}),
        "epoch": clock["epoch"],
        "global_step": clock["step"],
        "samples": clock["samples"],  # for `as_lightning`
        "pytorch-lightning_version": __version__,
        "state_dict": read_weights(folder),
        "loops": _loops(clock),
        "callbacks": {},
        "optimizer_states": _each(state, "optimizer"),
        "lr_schedulers": [part for one in schedulers for part in _taken_apart(one)],
        "hyper_parameters": _arguments(folder),
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the command line program."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.convert",
        description="Write a checkpoint as a .ckpt for Lightning's load_from_checkpoint and "
        "Trainer.fit(ckpt_path=...).",
    )
    parser.add_argument("checkpoint", help="a checkpoint, or the folder of a run: its last one")
    parser.add_argument("out", type=Path, help="the file to write, such as model.ckpt")
    given = parser.parse_args(arguments)
    try:
        if given.out.exists():
            raise ValueError(f"{given.out} is there already; give another name, or remove it")
        if not given.out.parent.is_dir():
            raise ValueError(f"there is no folder {given.out.parent}; make it, or give another")
        folder = find("", given.checkpoint, of_run="last")
        converted = to_lightning(folder)
        left_out = _config(folder).get(LEFT_OUT) or []
        replace_file(given.out, lambda file: torch.save(converted, file))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"{given.out}: step {converted['global_step']}, epoch {converted['epoch']}")
    if read_state(folder).get("weight_average"):
        print(
            "note: its weights are the average (weight_average), beside the optimizer's state for "
            "those that were trained"
        )
    if left_out:
        print(
            f"note: it has no hyperparameters {', '.join(left_out)}, which are no plain values; "
            "give them to load_from_checkpoint"
        )


def _taken_apart(scheduler: Mapping[str, Any]) -> list[Any]:
    """Return the states of several schedulers of one optimizer (see ``lightning.optimizers``)."""
    return scheduler["_schedulers"] if scheduler.keys() == {"_schedulers"} else [scheduler]


def _each(state: Mapping[str, Any], what: str) -> list[Any]:
    """Return what every optimizer has, in their order."""
    return [v for name, v in state.items() if name == what or name.startswith(f"{what}/")]


def _loops(clock: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of Lightning's loops after so many epochs and steps."""
    import logging
    import warnings

    import lightning.pytorch as lightning

    # A Trainer that will not run has nothing to tell of the hardware or of SLURM.
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = lightning.Trainer(
                accelerator="cpu",
                devices=1,
                max_epochs=-1,
                logger=False,
                enable_checkpointing=False,
            )
    finally:
        logger.setLevel(level)
    epochs, steps, in_epoch = clock["epoch"], clock["step"], clock["step_in_epoch"]
    loop: Any = trainer.fit_loop
    is_within = int(in_epoch > 0)
    for progress in (loop.epoch_progress.total, loop.epoch_progress.current):
        progress.ready = progress.started = epochs + is_within
        progress.processed = progress.completed = epochs
    batches: Any = loop.epoch_loop
    for progress, count in (
        (batches.batch_progress.total, steps),
        (batches.batch_progress.current, in_epoch),
    ):
        progress.ready = progress.started = progress.processed = progress.completed = count
    batches._batches_that_stepped = steps
    for taken in (
        batches.automatic_optimization.optim_progress.optimizer.step.total,
        batches.manual_optimization.optim_step_progress.total,
    ):
        taken.ready = taken.completed = steps
    return {
        "fit_loop": loop.state_dict(),
        "validate_loop": trainer.validate_loop.state_dict(),
        "test_loop": trainer.test_loop.state_dict(),
        "predict_loop": trainer.predict_loop.state_dict(),
    }


def _arguments(folder: Path) -> dict[str, Any]:
    """Return the hyperparameters of a LightningModule, or the task's arguments in the config."""
    config = _config(folder)
    found = config.get("hyper_parameters") or config.get("task") or {}
    return {name: value for name, value in found.items() if not name.startswith("_")}


def _config(folder: Path) -> dict[str, Any]:
    """Return the config of the run."""
    from omegaconf import OmegaConf

    config: Any = OmegaConf.to_container(OmegaConf.load(verified(folder, CONFIG)))
    return dict(config)


if __name__ == "__main__":
    main()
