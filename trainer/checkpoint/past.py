"""The checkpoint that a run goes on from, read once, before the run is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from trainer import distributed
from trainer.checkpoint import manifest
from trainer.checkpoint.disks import gather_newest
from trainer.checkpoint.finding import find, newest_valid, run_place, store_of
from trainer.checkpoint.writer import read_state
from trainer.config import TrainerConfig
from trainer.launching import attempt


class Past(NamedTuple):
    """What a resumed run has behind it.

    Attributes:
        path: The checkpoint.
        state: Everything in it beside the weights.
        is_own: Whether it is one of the run's own.
    """

    path: Path
    state: dict[str, Any]
    is_own: bool

    @property
    def experiments(self) -> dict[str | None, dict[str, Any]]:
        """What the run was, by the name of each of its optimizers; None for an only one."""
        parts = ((name.partition("/"), value) for name, value in self.state.items())
        return {turn or None: value for (what, _, turn), value in parts if what == "experiment"}

    def steps_until(
        self, max_epochs: int, steps_per_epoch: int, global_batch_size: int | None
    ) -> int:
        """Return how many steps the run has done at the end of its epochs.

        Those that are done count as they were, also if global batches had another size.

        Args:
            max_epochs: The epochs of the whole run.
            steps_per_epoch: From now on.
            global_batch_size: From now on; None if every batch has its own size.
        """
        clock = self.state["train_state"]
        done: int = clock["step_in_epoch"]
        experiment = next(iter(self.experiments.values()))  # their data is the same
        before: int | None = experiment["data"]["global_batch_size"]
        if before is not None and global_batch_size is not None:
            done = done * before // global_batch_size
        steps: int = clock["step"] + (max_epochs - clock["epoch"]) * steps_per_epoch - done
        return steps


def shared_past(config: TrainerConfig, run_dir: Path) -> Past | None:
    """Return what `read_past` does, on every rank; rank 0 reads it, for all. A collective."""
    gather_newest(config, run_dir)
    return distributed.on_first_rank(lambda: read_past(config, run_dir))


def read_past(config: TrainerConfig, run_dir: Path) -> Past | None:
    """Read the checkpoint that a run goes on from, if there is one, and print which one it is.

    It is the newest one that this launch has written, if it was started again or requeued; else the
    one that ``resume`` names.

    Raises:
        ValueError: If it is not there or damaged.
    """
    own, run = attempt.current(), run_place(config, run_dir)
    path = newest_valid(store_of(run), own.launch) if own.is_restart else None
    if path is not None:
        print(f"restarting from {path}", flush=True)
        return Past(path, read_state(path), is_own=True)
    if own.is_restart:
        print("restarting as at first: this run has no checkpoint yet", flush=True)
    if config.resume is None:
        return None
    if config.resume == "auto":
        store = store_of(run)
        path = newest_valid(store)
        if path is None:
            if there := store.names():
                raise ValueError(
                    f"resume=auto, but no checkpoint in {run} is valid: {', '.join(there)} "
                    "(see above). To start anew set resume=null, which sets them aside"
                )
            print("resuming from nothing: there is no checkpoint yet", flush=True)
            return None
    else:
        path = find(run, config.resume, of_run="last")
        if path.suffix in manifest.FILES_OF_WEIGHTS:
            raise ValueError(
                f"resume={config.resume}: {path} has weights, and nothing else that a run could go "
                f"on from; start a new run from them with init_from={config.resume}"
            )
        manifest.refuse_damaged(path)
    ignored = "" if config.init_from is None else f", not init_from={config.init_from}"
    print(f"resuming from {path}{ignored}", flush=True)
    folder = (run_dir / manifest.FOLDER).resolve()
    return Past(path, read_state(path), is_own=path.resolve().parent == folder)
