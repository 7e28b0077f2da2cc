"""``self.log`` of a LightningModule: means over micro-batches and ranks, and torchmetrics.

A value keeps the name that the module gave it, without a split in front. With ``on_step`` it is
the mean since the last log event, like every train value here; with ``on_epoch`` the mean over the
epoch. Both at once are told apart by ``_step`` and ``_epoch``, as under Lightning. What is logged
in an evaluation is the mean over all of it. All means are over all ranks, weighted by samples. So
is that of values which each rank has computed by itself, in a hook at the end of an epoch.

No rank knows these means before it has met the others. On several ranks a value is in
``callback_metrics`` once its epoch or evaluation is over, and is the same on all of them then.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch

from trainer import distributed
from trainer.lightning.collected import FOLDS, Collected, Latest, LoggedMetric
from trainer.lightning.hooks import OF_AN_EVALUATED_BATCH

if TYPE_CHECKING:
    from trainer.lightning.module import LightningTask


class Place(Enum):
    """Where something is logged."""

    STEP = auto()  # of training: by step or by epoch
    EPOCH = auto()  # around the steps of an epoch
    EVALUATION = auto()  # in an evaluation, for a batch
    AROUND = auto()  # around those


PLACES = {
    **dict.fromkeys(
        (
            "training_step",
            "on_train_batch_start",
            "on_train_batch_end",
            "on_before_backward",
            "on_after_backward",
            "on_before_optimizer_step",
            "on_before_zero_grad",
            "configure_gradient_clipping",
        ),
        Place.STEP,
    ),
    **dict.fromkeys(("on_train_start", "on_train_epoch_start", "on_train_epoch_end"), Place.EPOCH),
    **{name: Place.EVALUATION for name in OF_AN_EVALUATED_BATCH if "predict" not in name},
    **{
        f"on_{stage}{when}": Place.AROUND
        for stage in ("validation", "test")
        for when in ("_start", "_epoch_start", "_epoch_end")
    },
}


class Log:
    """``self.log`` of a module; its ``self.log_dict`` calls that.

    Attributes:
        epoch: What belongs to the current epoch of training.
        evaluation: What belongs to the current evaluation.
        latest: What the last steps of training logged, where that takes several ranks.
    """

    def __init__(self, task: LightningTask) -> None:
        self._task = task
        self.noted: set[str] = set()
        self._paths: dict[int, str] | None = None
        self.epoch = Collected(self.note)
        self.evaluation = Collected(self.note)
        self.latest = Latest()

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Record a value under its name; the arguments are Lightning's.

        ``sync_dist`` makes no difference: means are over all ranks. ``prog_bar`` puts the value
        into the line of progress, too.

        Raises:
            ValueError: For a value that cannot be logged, or where nothing can be logged.
        """
        task, call = self._task, f"self.log({name!r}, ...)"
        if not isinstance(name, str):
            raise ValueError(f"{call}: the name must be a string; write self.log('{name}', ...)")
        hook = task.calls.running
        place = self._place(hook, call)
        if hook is None or place is None:
            return
        if sync_dist_group is not None or enable_graph:
            raise ValueError(
                f"{call} with sync_dist_group or enable_graph, which are not supported: a value is "
                "detached, and its mean is over all ranks; leave them out"
            )
        if rank_zero_only and distributed.rank() > 0:
            return
        by_step, by_epoch = _levels(place, hook, call, on_step, on_epoch)
        several = place is Place.EVALUATION and task.evaluations.is_of_many
        suffix = ""
        if several and add_dataloader_idx:
            suffix = f"/dataloader_idx_{task.evaluations.dataloader_idx}"
        step_name = f"{name}_step{suffix}" if by_step and by_epoch else name + suffix
        epoch_name = f"{name}_epoch{suffix}" if by_step and by_epoch else name + suffix
        collected = self.epoch if place in (Place.STEP, Place.EPOCH) else self.evaluation
        if hasattr(value, "_forward_cache") and hasattr(value, "compute"):  # a torchmetrics.Metric
            path = metric_attribute or self._path(value, call)
            is_told = by_epoch or place is not Place.STEP
            collected.metrics[epoch_name] = LoggedMetric(path, is_told)
            value, by_epoch = value._forward_cache, False
            if not by_step or not isinstance(value, torch.Tensor) or place is not Place.STEP:
                return
        if prog_bar and step_name not in task._shown:
            task._shown = (*task._shown, step_name)
        if logger is False:
            self.note(f"{call} with logger=False: it goes to every logger all the same")
        if place is Place.EVALUATION and by_step:
            self.note(f"{call} with on_step=True in {hook}: evaluation logs {epoch_name}, its mean")
        number, how = _number(value, call), _how(reduce_fx, call)
        book = task.run._logbook
        if batch_size is not None:
            weight = batch_size
        elif book is not None and place in (Place.STEP, Place.EVALUATION):
            weight = book.num_samples
        else:  # at the start no rank has had a sample
            weight = collected.num_samples if hook.endswith("_epoch_end") else 1
        for known in {name + suffix, step_name}:
            if distributed.world_size() == 1:
                task.facts.callback_metrics[known] = number
            elif place is Place.STEP:
                self.latest.add(known, task.run.step, number, weight)
        if place is Place.STEP and by_step:
            assert book is not None
            book.add(f"/{step_name}", number, weight)
        if by_epoch or place is not Place.STEP:
            self._collect(place, epoch_name, how, number, weight)

    def _place(self, hook: str | None, call: str) -> Place | None:
        """Return where ``hook`` logs, and None if nobody trains or evaluates.

        Raises:
            ValueError: If nothing can be logged there.
        """
        if hook is None:
            if self._task.is_attached:
                raise ValueError(f"{call} outside of a step or hook; log in one of these")
            return None
        if hook not in PLACES:
            raise ValueError(
                f"{call} in {hook}, where nothing can be logged; log in a step, or in a hook of a "
                "batch or an epoch of training, validation or test"
            )
        place = PLACES[hook]
        needs_book = place in (Place.STEP, Place.EVALUATION)
        return None if needs_book and self._task.run._logbook is None else place

    def _collect(self, place: Place, name: str, how: str, number: Any, weight: int) -> None:
        """Add a value to those of its epoch or evaluation."""
        collected = self.epoch if place in (Place.STEP, Place.EPOCH) else self.evaluation
        if how != "mean":
            collected.fold(name, how, number)
        elif place is Place.STEP:
            collected.means.add(f"/{name}", number, weight)
        elif place is Place.EVALUATION:
            book = self._task.run._logbook
            assert book is not None
            book.add(f"/{name}", number, weight)
        else:
            collected.add_of_rank(name, number, weight)

    def told(
        self, collected: Collected, hook: str, beside: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Return what was logged for an epoch or an evaluation, that in its last hook included.

        Args:
            collected: `epoch` or `evaluation`.
            hook: Runs now, with all that was logged before in ``callback_metrics``.
            beside: Further values for these.

        Raises:
            ValueError: If the hook fails on a rank that had no sample.
        """
        task = self._task
        values = collected.reduce(task.module)
        task.facts.note({**(beside or {}), **values})
        try:
            task.calls.hook(hook)
        except Exception as error:
            if collected.num_samples or distributed.world_size() == 1:
                raise
            raise ValueError(
                f"{hook} failed on rank {distributed.rank()}, which had no sample: "
                f"{type(error).__name__}: {error}. The ranks divide each batch, so a rank may have "
                "none; log in the step, or as a torchmetrics object, or let the hook allow for it"
            ) from error
        if task.calls.defines(hook):
            last = collected.reduce(task.module)
            task.facts.note(last)
            values |= last
        collected.end()
        return values

    def _path(self, metric: Any, call: str) -> str:
        """Return the name of the attribute that holds a metric."""
        if self._paths is None or id(metric) not in self._paths:
            named = self._task.module.named_modules()
            self._paths = {id(module): name for name, module in named}
        if id(metric) not in self._paths:
            raise ValueError(
                f"{call} got a {type(metric).__name__} that is no attribute of "
                f"{type(self._task.module).__name__}; assign it in __init__, or log its value"
            )
        return self._paths[id(metric)]

    def note(self, note: str) -> None:
        """Tell the user something, once, on rank 0."""
        if note not in self.noted and distributed.rank() == 0:
            self.noted.add(note)
            print(f"note: {note}", flush=True)


def _levels(
    place: Place, hook: str, call: str, on_step: bool | None, on_epoch: bool | None
) -> tuple[bool, bool]:
    """Return whether a value is logged by step, and by epoch."""
    if place is Place.STEP:
        levels = (on_step is not False, bool(on_epoch))
    elif place is Place.EVALUATION:
        levels = (bool(on_step), on_epoch is not False)
    elif on_step or on_epoch is False:
        raise ValueError(f"{call} in {hook}: there is no step, so on_epoch=True is all")
    else:
        levels = (False, True)
    if not any(levels):
        raise ValueError(f"{call} with on_step=False and on_epoch=False logs nothing")
    return levels


def _number(value: Any, call: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        number = value.detach().clone().reshape(())
        return number if number.is_floating_point() else number.float()
    if isinstance(value, numbers.Number):
        return torch.tensor(value, dtype=torch.get_default_dtype())
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    raise ValueError(
        f"{call} got a {type(value).__name__}{shape}; log a number, a tensor with one element "
        "or a torchmetrics.Metric; several by self.log_dict"
    )


def _how(reduce_fx: Any, call: str) -> str:
    name = str(getattr(reduce_fx, "__name__", reduce_fx)).lower()
    name = "mean" if name == "avg" else name
    if name not in ("mean", *FOLDS) or (callable(reduce_fx) and not _is_known(reduce_fx)):
        raise ValueError(
            f"{call} with reduce_fx={reduce_fx}: it must be 'mean', 'sum', 'max' or 'min'; for "
            "another reduction log a torchmetrics.Metric"
        )
    return name


def _is_known(function: Any) -> bool:
    return function in (torch.mean, torch.sum, torch.max, torch.min, sum, max, min)
