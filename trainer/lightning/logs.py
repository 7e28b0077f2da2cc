"""``self.log`` of a LightningModule: means over micro-batches and ranks, and torchmetrics.

A value keeps the name that the module gave it, without a split in front. With ``on_step`` it is
the mean since the last log event, like every train value here; with ``on_epoch`` the mean over the
epoch. Both at once are told apart by ``_step`` and ``_epoch``, as under Lightning. What is logged
in an evaluation is the mean over all of it. All means are over all ranks, weighted by samples.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from trainer import distributed, metrics
from trainer.logbook import Logbook

if TYPE_CHECKING:
    from trainer.lightning.module import LightningTask

# In which hooks a value may be logged by step, or only by epoch.
TRAINING = frozenset(
    (
        "training_step",
        "on_train_batch_start",
        "on_train_batch_end",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_before_zero_grad",
        "configure_gradient_clipping",
    )
)
EPOCH = frozenset(("on_train_start", "on_train_epoch_start", "on_train_epoch_end"))
EVALUATION = frozenset(
    f"{name}{when}"
    for stage in ("validation", "test")
    for name, whens in (
        (f"{stage}_step", ("",)),
        (f"on_{stage}", ("_batch_start", "_batch_end")),
    )
    for when in whens
)
AROUND_EVALUATION = frozenset(
    f"on_{stage}{when}"
    for stage in ("validation", "test")
    for when in ("_start", "_epoch_start", "_epoch_end")
)

_FOLDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class Collected:
    """What was logged for one epoch, or for one evaluation, and is told at its end.

    ``reduce`` and ``state`` are collectives.
    """

    def __init__(self) -> None:
        self.means = Logbook()
        self.metrics: dict[str, tuple[str, bool]] = {}  # by name: attribute, whether to tell it
        self.folded: dict[str, tuple[str, torch.Tensor]] = {}
        self._used: list[Any] = []

    def fold(self, name: str, how: str, value: torch.Tensor) -> None:
        """Add a value to a sum, or to a maximum or minimum."""
        known = self.folded.get(name)
        joined = value if known is None else _FOLDS[how](known[1], value)
        self.folded[name] = (how, joined)

    def reduce(self, module: torch.nn.Module) -> dict[str, float]:
        """Return all values over all ranks, by name, and forget them, but for torchmetrics."""
        values = {name[1:]: v for name, v in self.means.reduce(finite_loss=False).items()}
        own = {name: (how, float(value)) for name, (how, value) in self.folded.items()}
        every = distributed.all_gather_object((self.metrics, own))
        for name, (how, value) in (entry for _, folded in every for entry in folded.items()):
            values[name] = _folded(how, values[name], value) if name in values else value
        logged = {name: how for theirs, _ in every for name, how in sorted(theirs.items())}
        found: dict[str, Any] = {n: module.get_submodule(path) for n, (path, _) in logged.items()}
        told = metrics.MetricSet({n: m for n, m in found.items() if logged[n][1]}, exact=False)
        with metrics.synchronised_here(told):
            values.update(metrics.compute(told))
        self._used += found.values()
        self.metrics.clear()
        self.folded.clear()
        return values

    def state(self) -> dict[str, Any]:
        """Return means so far over all ranks, and this rank's sums and extremes."""
        return {
            "means": self.means.state(),
            "folded": {name: [how, value] for name, (how, value) in self.folded.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state`` returned on rank 0."""
        self.means.restore(state["means"])
        if distributed.rank() == 0:
            self.folded = {name: (how, value) for name, (how, value) in state["folded"].items()}

    def end(self) -> None:
        """Reset the torchmetrics that were logged."""
        for metric in self._used:
            metric.reset()
        self._used.clear()


def _folded(how: str, one: float, other: float) -> float:
    fold = _FOLDS[how]
    return float(fold(*(torch.tensor(number, dtype=torch.float64) for number in (one, other))))


class Log:
    """``self.log`` of a module; its ``self.log_dict`` calls that.

    Attributes:
        epoch: What belongs to the current epoch of training.
        evaluation: What belongs to the current evaluation.
    """

    def __init__(self, task: LightningTask) -> None:
        self._task = task
        self._noted: set[str] = set()
        self._paths: dict[int, str] | None = None
        self.epoch = Collected()
        self.evaluation = Collected()

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
        hook, call = self._task.calls.running, f"self.log({name!r}, ...)"
        if hook is None or (self._task.run._logbook is None and hook in TRAINING | EVALUATION):
            if self._task.is_attached and hook is None:
                raise ValueError(f"{call} outside of a step or hook; log in one of these")
            return
        if sync_dist_group is not None or enable_graph:
            raise ValueError(
                f"{call} with sync_dist_group or enable_graph, which are not supported: a value is "
                "detached, and its mean is over all ranks; leave them out"
            )
        if rank_zero_only and distributed.rank() > 0:
            return
        by_step, by_epoch = self._levels(hook, call, on_step, on_epoch)
        several = hook in EVALUATION and self._task.evaluations.is_of_many
        suffix = f"/dataloader_idx_{self._task.evaluations.dataloader_idx}" if several else ""
        step_name = f"{name}_step" if by_step and by_epoch else name
        epoch_name = f"{name}_epoch" if by_step and by_epoch else name
        if add_dataloader_idx:
            step_name, epoch_name = step_name + suffix, epoch_name + suffix
        if hasattr(value, "_forward_cache") and hasattr(value, "compute"):  # a torchmetrics.Metric
            path = metric_attribute or self._path(value, call)
            self._collected(hook).metrics[epoch_name] = (path, by_epoch or hook not in TRAINING)
            value = value._forward_cache
            if not by_step or not isinstance(value, torch.Tensor) or hook not in TRAINING:
                return
            by_epoch = False
        if prog_bar and step_name not in self._task._shown:
            self._task._shown = (*self._task._shown, step_name)
        if logger is False:
            self._note(f"{call} with logger=False: it goes to every logger all the same")
        number = self._number(value, call)
        how = self._how(reduce_fx, call)
        for known in {name + (suffix if add_dataloader_idx else ""), step_name}:
            self._task.facts.callback_metrics[known] = number
        if hook in EVALUATION and by_step:
            self._note(
                f"{call} with on_step=True in {hook}: evaluation logs {epoch_name}, its mean"
            )
        if how != "mean" and not (hook in TRAINING and by_step and not by_epoch):
            self._collected(hook).fold(epoch_name, how, number)
            by_epoch = False
        book = self._task.run._logbook
        weight = (
            batch_size if book is None else book.num_samples if batch_size is None else batch_size
        )
        if hook in TRAINING and by_step:
            assert book is not None
            book.add(f"/{step_name}", number, weight)
        if by_epoch and hook in TRAINING:
            self.epoch.means.add(f"/{epoch_name}", number, weight)
        elif hook in EVALUATION and how == "mean":
            assert book is not None
            book.add(f"/{epoch_name}", number, weight)
        elif hook in EPOCH | AROUND_EVALUATION and how == "mean":
            self._collected(hook).means.add(f"/{epoch_name}", number, batch_size or 1)

    def _levels(
        self, hook: str, call: str, on_step: bool | None, on_epoch: bool | None
    ) -> tuple[bool, bool]:
        if hook in TRAINING:
            levels = (on_step is not False, bool(on_epoch))
        elif hook in EVALUATION:
            levels = (bool(on_step), on_epoch is not False)
        elif hook in EPOCH or hook in AROUND_EVALUATION:
            if on_step or on_epoch is False:
                raise ValueError(f"{call} in {hook}: there is no step, so on_epoch=True is all")
            levels = (False, True)
        else:
            raise ValueError(
                f"{call} in {hook}, where nothing can be logged; log in a step, or in a hook of a "
                "batch or an epoch of training, validation or test"
            )
        if not any(levels):
            raise ValueError(f"{call} with on_step=False and on_epoch=False logs nothing")
        return levels

    def _collected(self, hook: str) -> Collected:
        return self.epoch if hook in TRAINING or hook in EPOCH else self.evaluation

    def _number(self, value: Any, call: str) -> torch.Tensor:
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

    def _how(self, reduce_fx: Any, call: str) -> str:
        name = str(getattr(reduce_fx, "__name__", reduce_fx)).lower()
        name = "mean" if name == "avg" else name
        if name not in ("mean", *_FOLDS) or (callable(reduce_fx) and not _is_known(reduce_fx)):
            raise ValueError(
                f"{call} with reduce_fx={reduce_fx}: it must be 'mean', 'sum', 'max' or 'min'; for "
                "another reduction log a torchmetrics.Metric"
            )
        return name

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

    def _note(self, note: str) -> None:
        if note not in self._noted and distributed.rank() == 0:
            self._noted.add(note)
            print(f"note: {note}", flush=True)


def _is_known(function: Any) -> bool:
    return function in (torch.mean, torch.sum, torch.max, torch.min, sum, max, min)
