"""What a run keeps and takes back: the state of its parts, in checkpoints that rank 0 writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from trainer import distributed
from trainer.checkpoint.changes import (
    Description,
    Experiments,
    changed_parts,
    describe,
    differences,
    differences_of_turns,
    lambda_counts,
    lambda_factors,
    moved,
    notes_on_cut,
    refuse,
)
from trainer.checkpoint.disks import Witness
from trainer.checkpoint.finding import find, run_place, store_of
from trainer.checkpoint.optimizer_state import take_over
from trainer.checkpoint.past import Past
from trainer.checkpoint.snapshot import Snapshot
from trainer.checkpoint.weights import load_weights
from trainer.checkpoint.writer import CheckpointWriter
from trainer.comm_hooks import overflow_in
from trainer.guard import no_collectives
from trainer.launching.rank import in_child
from trainer.lock import locked
from trainer.logbook import NotFiniteError
from trainer.messages import listed
from trainer.notes import note_no_monitor
from trainer.optimizing.turns import Turn
from trainer.optimizing.weight_average import WeightAverage
from trainer.run import Run
from trainer.session import Session


class Stateful(Protocol):
    """Whatever has state that outlives a process: optimizer, schedule, scaler, callback, ..."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take back what ``state_dict`` returned."""


class Saver:
    """Saves a run and resumes it. Every rank has one; rank 0's writes and reads."""

    def __init__(
        self,
        session: Session,
        view: Run,
        turns: Sequence[Turn],
        average: WeightAverage,
        parts: Mapping[str, Stateful],
        run_config: Mapping[str, Any],
        past: Past | None,
    ) -> None:
        """Note what belongs to the run.

        Args:
            session: Has the task, whose weights are kept beside the parts.
            view: Gives step and metrics; learns which checkpoints there are.
            turns: Have the optimizers, as the task has configured them.
            average: Of the weights.
            parts: Everything else with state, by name, ``train_state`` among it. Ranks other than
                0 may have fewer.
            run_config: The config that goes into every checkpoint.
            past: The checkpoint to go on from, on every rank.
        """
        self._session = session
        self._config = session.config
        self._monitors = session.config.checkpoint.monitors
        self._view = view
        self._turns = turns
        self._average = average
        scalers = {turn.key("scaler"): turn.scaler for turn in turns}
        self._parts: dict[str, Stateful] = {"run": view, **scalers, **parts}
        self._run_config = run_config
        self._past = past
        self._experiments = {
            turn.name: describe(
                session.task, turn.schedule.setup, session.config, session.data_order
            )
            for turn in turns
        }
        self._writer: CheckpointWriter | None = None
        self._witness: Witness | None = None
        self._written: Any = None  # what the last checkpoint knows, see _now

    def start(self) -> Mapping[str, Any]:
        """Take everything back from the past, if there is one.

        Otherwise take the weights that ``init_from`` names. Must be called on every rank.

        Returns:
            What `save` was given for that checkpoint; empty in a new run.

        Raises:
            ValueError: If the weights are not there, damaged, or do not fit; or if the past is
                another experiment, and that is not accepted.
        """
        past, self._past = self._past, None  # it may be large
        if past is None:
            if self._config.init_from is not None:
                distributed.on_first_rank(self._load_other_weights)
                self._session.share_weights()
            return {}
        old = past.experiments
        new = {
            turn.name: self._described(turn, old.get(turn.name, {}).get("counts", {}))
            for turn in self._turns
        }
        clock = past.state["train_state"]
        clock["step_in_epoch"] = distributed.on_first_rank(
            lambda: self._load_weights(past, old, new)
        )
        self._session.share_weights()
        self._take_back(past.state, old, new)
        if past.is_own:
            self._written = self._now()
        shared: dict[str, Any] = past.state["shared"]
        return shared

    @contextmanager
    def open(self) -> Iterator[None]:
        """Write to the run's folder, alone; checkpoints beyond the current step are set aside."""
        if not self._config.fast_dev_run:
            self._witness = Witness(self._config, self._view.run_dir, self._view.step)
        if distributed.rank() > 0 or self._config.fast_dev_run:
            yield
            return
        place = run_place(self._config, self._view.run_dir)
        if in_child() and str(place).startswith("memory://"):
            raise ValueError(
                f"run_dir={place} would lie in the memory of rank 0, and be lost with it; use "
                "devices=1 without max_restarts, or a folder or store that outlives the ranks"
            )
        with locked(self._view.run_dir):
            self._writer = CheckpointWriter(
                store_of(place), self._config.checkpoint, self._view.step
            )
            try:
                yield
            finally:
                self.close()

    def save(self, shared: Mapping[str, Any]) -> None:
        """Start writing a checkpoint of this step, unless there is one that knows as much.

        Must be called on every rank.

        Args:
            shared: State that every rank takes back from `start`, and that rank 0 has.

        Raises:
            NotFiniteError: If a weight is NaN or infinite; nothing is written then.
            ValueError: If ``checkpoint.monitor`` is measured by nobody.
        """
        task = self._session.task
        distributed.share_buffers(task)
        suspect = overflow_in(self._config.comm_hook, self._config.precision == "fp16")
        check_finite(task, self._view.step, suspect)
        if self._witness is not None:
            self._witness.saves(self._view.step)
        if self._writer is None:
            return
        now = self._now()
        if self._written == now and self._writer.has(self._view.step):
            return
        self._written = now
        with no_collectives("the saving of a checkpoint"), self._average.applied():
            weights = task.state_dict()
            state = {
                **self._state_of_turns(),
                **{name: part.state_dict() for name, part in self._parts.items()},
                "trained": [name for name, p in task.named_parameters() if p.requires_grad],
                "shared": shared,
                "weight_average": self._average.state_dict(),
            }
            self._writer.save(
                Snapshot(
                    step=self._view.step,
                    weights=weights,
                    state=state,
                    config=self._run_config,
                    world_size=distributed.world_size(),
                    metric=self._monitored(),
                )
            )
        self._refuse_slip()  # now that the work is saved

    @property
    def failed(self) -> bool:
        """Whether a checkpoint was not written; `completed` then raises, or says so."""
        return self._writer is not None and self._writer.failed

    def check_monitor(self) -> None:
        """At the end, refuse a ``checkpoint.monitor`` that was never measured; note its lack."""
        if self._writer is None or not self._view.metrics.keys().isdisjoint(self._monitors):
            return
        if self._config.checkpoint.monitor is not None:
            self._explain_monitor(self._config.checkpoint.monitor)
        note_no_monitor(self._view.metrics)

    def completed(self) -> list[Path]:
        """Return the checkpoints completed since the last call; raise the writer's error."""
        if self._writer is None:
            return []
        finished = self._writer.finished()
        self._view.last_checkpoint = self._writer.last
        self._view.best_checkpoint = self._writer.best
        return finished

    def close(self) -> None:
        """Wait for the checkpoint that is being written."""
        if self._writer is not None:
            self._writer.close()

    def _monitored(self) -> float | None:
        """Return the metric that decides which checkpoint is the best, if it was just measured."""
        measured = map(self._view.measured_now, self._monitors)
        return next((value for value in measured if value is not None), None)

    def _load_other_weights(self) -> None:
        run = run_place(self._config, self._view.run_dir)
        path = find(run, str(self._config.init_from))
        load_weights(self._session.task, path)
        print(f"new run from the weights in {path}", flush=True)

    def _load_weights(self, past: Past, old: Experiments, new: Experiments) -> int:
        """On rank 0: refuse what does not fit, load the weights, and say what has changed.

        Returns:
            The step in the epoch, counted in the new global batches.
        """
        config, (path, state, _) = self._config, past
        changes = differences_of_turns(old, new)
        refuse(path, changes, config)
        step_in_epoch = moved(state["train_state"], *_first(old, new))
        load_weights(self._session.task, path, strict="model" not in changes)
        for line in (line for lines in changes.values() for line in lines):
            print(f"accepted {line}", flush=True)
        for name in state:
            if name.startswith(("callbacks/", "loggers/")) and name not in self._parts:
                print(f"resume: there is no {name} any more, its state is dropped", flush=True)
        return step_in_epoch

    def _take_back(self, state: dict[str, Any], old: Experiments, new: Experiments) -> None:
        notes = [] if self._config.reproducible else notes_on_cut(*_first(old, new))
        for name, part in self._parts.items():
            if name in state:
                part.load_state_dict(state[name])
            else:
                notes.append(f"the checkpoint has no state for {name}, which starts anew")
        self._average.load_state_dict(state.get("weight_average", {}))
        for turn in self._turns:
            if old.keys() == new.keys():
                notes += take_back_turn(turn, state, old[turn.name], new[turn.name])
            else:
                turn.schedule.advance_to(
                    state["train_state"]["step"], state["train_state"]["epoch"]
                )
                notes.append(f"{turn.name or 'the optimizer'} starts anew")
        if "model" not in differences(*_first(old, new)):
            trained = set(state["trained"])
            for name, parameter in self._session.task.named_parameters():
                parameter.requires_grad_(name in trained)
        if distributed.rank() == 0:
            for note in notes:
                print(f"resume: {note}", flush=True)

    def _state_of_turns(self) -> dict[str, Any]:
        """Return the state of every optimizer, and what the experiment is for it."""
        state: dict[str, Any] = {}
        for turn in self._turns:
            counts = lambda_counts(turn.schedule.setup.scheduler)
            state |= {
                turn.key("optimizer"): turn.optimizer.state_dict(),
                turn.key("schedule"): turn.schedule.state_dict(),
                turn.key("experiment"): {**self._described(turn, counts), "counts": counts},
            }
        return state

    def _described(self, turn: Turn, counts: Mapping[str, list[int]]) -> dict[str, dict[str, Any]]:
        """Return the experiment, with what a schedule's functions return at ``counts``."""
        experiment = self._experiments[turn.name]
        factors = lambda_factors(turn.schedule.setup.scheduler, counts)
        return {**experiment, "schedule": {**experiment["schedule"], **factors}}

    def _now(self) -> Any:
        """Return what tells whether a checkpoint of this step would say anything new."""
        clock = self._parts["train_state"].state_dict()
        return {name: value for name, value in clock.items() if name != "time_s"}

    def _refuse_slip(self) -> None:
        """Refuse a ``checkpoint.monitor`` whose event came without it."""
        monitor, measured = self._config.checkpoint.monitor, self._view.metrics
        if monitor is not None and monitor not in measured:
            kind = monitor.split("/")[0] + "/"
            if any(name.startswith(kind) for name in measured):
                self._explain_monitor(monitor)

    def _explain_monitor(self, monitor: str) -> NoReturn:
        names = sorted(n for n in self._view.metrics if not n.startswith(("perf/", "train/lr")))
        raise ValueError(
            f"checkpoint.monitor={monitor} is measured by nobody; there are: "
            f"{', '.join(names) or 'none'}. What was trained is saved: set it right, and go on "
            f"with resume={run_place(self._config, self._view.run_dir)}"
        )


def take_back_turn(
    turn: Turn, state: dict[str, Any], old: Description, new: Description
) -> list[str]:
    """Have an optimizer and its schedule go on; return notes on what starts anew.

    Args:
        turn: The optimizer's.
        state: What was saved.
        old: The experiment that ``state`` is from, for this optimizer.
        new: The experiment that goes on.
    """
    changed, clock, notes = changed_parts(old, new), state["train_state"], []
    if not {"optimizer", "schedule"} & set(changed):
        turn.schedule.load_state_dict(state[turn.key("schedule")])
    else:
        turn.schedule.advance_to(clock["step"], clock["epoch"])
        if (monitor := turn.schedule.setup.monitor) is not None:
            notes.append(f"the schedule that follows {monitor} starts anew")
    return notes + take_over(turn.optimizer, state[turn.key("optimizer")], old, new, changed)


def _first(old: Experiments, new: Experiments) -> tuple[Description, Description]:
    """Return one description of each: what is no optimizer's own is the same in all of them."""
    return next(iter(old.values())), next(iter(new.values()))


def named(kind: str, parts: Sequence[Stateful]) -> dict[str, Stateful]:
    """Name parts by class, and by number where a class comes more than once."""
    seen: Counter[str] = Counter()
    found: dict[str, Stateful] = {}
    for part in parts:
        name = getattr(part, "label", type(part).__name__)
        seen[name] += 1
        found[f"{kind}/{name}" + (f"-{seen[name]}" if seen[name] > 1 else "")] = part
    return found


def check_finite(task: nn.Module, step: int, suspect: str | None = None) -> None:
    """Refuse weights that are NaN or infinite, as after a gradient that was, with a finite loss.

    Raises:
        NotFiniteError: Naming them; on every rank, for all ranks have the same weights.
    """
    # A sum is finite only if all of its terms are; it takes one pass, and one look for all of them.
    sums = [p.detach().sum().isfinite() for p in task.parameters()]
    if not sums or bool(torch.stack(sums).all()):
        return
    bad = [name for name, p in task.named_parameters() if not bool(p.isfinite().all())]
    if bad:
        raise NotFiniteError(
            f"at step {step} {listed(bad)} became NaN or infinite, though the loss did not. "
            "Nothing was saved since. A gradient must have been: "
            f"{suspect + ', or that ' if suspect else ''}of a square root or norm at 0, "
            "say; detect_anomaly=true names the operation"
        )
