"""Norms of gradients, weights and updates, of the steps that are logged: the option ``statistics``.

Gradients and weights are equal on all ranks, so each rank has the same norms without asking the
others. Nothing is read from the device before the log event, and other steps pay nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from trainer.config import TrainerConfig
from trainer.due import due, limit_reached
from trainer.logbook import Logbook
from trainer.state import TrainState
from trainer.task import TaskModule

GRADIENTS, WEIGHTS, UPDATES = "gradients", "weights", "updates"


class Statistics:
    """What one optimizer does to the parameters of a task, by module."""

    def __init__(
        self,
        task: TaskModule,
        optimizer: torch.optim.Optimizer,
        config: TrainerConfig,
        state: TrainState,
        logbook: Logbook,
        turn: str | None,
    ) -> None:
        """Note whose parameters to look at.

        Args:
            task: Has the modules.
            optimizer: Has the parameters.
            config: Says what to look at, and which steps are logged.
            state: The clock.
            logbook: Gets the norms.
            turn: The optimizer's name, if there are several.
        """
        self._task, self._optimizer, self._turn = task, optimizer, turn
        self._config, self._state, self._logbook = config, state, logbook
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        # A parameter that is the task's own, and no module's, stands for itself.
        self._named = [
            (name.rpartition(".")[0] or name, p)
            for name, p in task.named_parameters()
            if id(p) in own
        ]
        self._before: list[Tensor] | None = None
        self._stepped: list[tuple[str, nn.Parameter]] = []

    def before_update(self) -> None:
        """Look at gradients that are final but not clipped, and at the weights they will change."""
        if not self._is_logged():
            return
        wanted = self._config.statistics
        self._stepped = [(module, p) for module, p in self._named if p.grad is not None]
        if GRADIENTS in wanted:
            norms = _norms([p.grad for _, p in self._stepped if p.grad is not None])
            scale = getattr(self._optimizer, "grad_scale", None)  # that its kernel divides by
            if scale is not None:
                norms = [norm / scale for norm in norms]
            self._log("grad_norm", self._by_module(norms))
        if WEIGHTS in wanted:
            self._log("weight_norm", self._by_module(_norms([p for _, p in self._stepped])))
        if UPDATES in wanted:
            self._before = [p.detach().clone() for _, p in self._stepped]

    def after_update(self) -> None:
        """Look at how far the weights have gone, in relation to their size."""
        if self._before is None:
            return
        before, self._before = self._before, None
        sizes = self._by_module(_norms(before))
        torch._foreach_sub_(before, [p.detach() for _, p in self._stepped])
        changes = self._by_module(_norms(before))
        ratios = {name: changes[name] / size for name, size in sizes.items()}
        # Weights that were all 0 have no ratio.
        self._log("update_ratio", ratios, {name: (size > 0) * 1.0 for name, size in sizes.items()})

    def _is_logged(self) -> bool:
        """Whether there will be a log event after the step that is under way."""
        state = self._state
        is_epoch_end = state.step_in_epoch + 1 == self._task.run.steps_per_epoch
        after = replace(
            state,
            step=state.step + 1,
            step_in_epoch=0 if is_epoch_end else state.step_in_epoch + 1,
        )
        return due(self._config, after).log or limit_reached(self._config, after) is not None

    def _by_module(self, norms: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the norm of all, by the name "", and of each module's own parameters."""
        found: dict[str, list[Tensor]] = defaultdict(list)
        for (module, _), norm in zip(self._stepped, norms, strict=True):
            found[module].append(norm)
        together = {module: _norm_of(parts) for module, parts in found.items()}
        return {"": _norm_of(list(together.values())), **together} if together else {}

    def _log(
        self, what: str, values: Mapping[str, Tensor], weights: Mapping[str, Tensor] | None = None
    ) -> None:
        prefix = what if self._turn is None else f"{what}/{self._turn}"
        for module, value in values.items():
            # The same on every rank, which a mean with equal weights leaves as it is.
            weight = 1.0 if weights is None else weights[module]
            self._logbook.add(f"{prefix}/{module}" if module else prefix, value, weight)


def _norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the L2 norm of each, on its device, in double precision."""
    plain = [_numbers(tensor.detach()) for tensor in tensors]
    return list(torch._foreach_norm(plain, 2, dtype=torch.float64)) if plain else []


def _norm_of(norms: Sequence[Tensor]) -> Tensor:
    """Return the norm of what has these norms in its parts."""
    found: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return found


def _numbers(tensor: Tensor) -> Tensor:
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
