"""PowerSGD: a gradient matrix travels as two thin ones, and what they miss goes into the next step.

After T. Vogels, S. P. Karimireddy and M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression
for Distributed Optimization", NeurIPS 2019, https://arxiv.org/abs/1905.13727. A rank adds the error
that it has kept to its gradient, which makes the matrix M. With Q from the step before::

    P = mean of M Q, made orthonormal      (the means are over the ranks: one all-reduce each)
    Q = mean of M' P
    gradient = P Q',  error = M - P Q'

P and Q follow from the *mean* of the ranks' M. So it is all the same to later steps whether every
rank has its own error or all have the mean of them, and the mean is what a checkpoint holds: a run
goes on from it at any world size. The state is kept by the parameters' names, so buckets may change
at any time.

The code has P' and Q' in place of P and Q: products and QR are fastest with the long side in a row.
"""

# Annotations are not postponed here: DDP compares those of a hook with the classes themselves.

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from trainer import distributed
from trainer.comm_hooks.average import average_hook
from trainer.comm_hooks.beside import Beside
from trainer.comm_hooks.low_rank import (
    as_matrix,
    first_basis,
    is_compressed,
    like_gradient,
    orthonormal,
)
from trainer.comm_hooks.mean import Mean
from trainer.notes import note_late_start, note_too_small
from trainer.precision import LossScaler
from trainer.step import StepModule


class _Matrix(NamedTuple):
    """A gradient that is compressed, the error of it, and Q' of the step before."""

    grad: torch.Tensor
    error: torch.Tensor
    basis: torch.Tensor


class _Sent(NamedTuple):
    """What the first part of the hook leaves to the second."""

    buffer: torch.Tensor
    exact: list[torch.Tensor]
    plain: list[torch.Tensor]
    matrices: list[_Matrix]
    exact_mean: Mean
    mean: Mean


class PowerSGD:
    """The compression of one run's gradients; `reduce` is the hook.

    Attributes:
        has_begun: Whether gradients have been compressed.
    """

    def __init__(self, rank: int, start_step: int, dtype: torch.dtype | None) -> None:
        """Begin without errors.

        Args:
            rank: Columns of P and Q.
            start_step: Steps of the run in which gradients are not compressed yet.
            dtype: What everything is sent as; None for the gradients' own.
        """
        self._rank = rank
        self._start_step = start_step
        self._dtype = dtype
        self._errors: dict[str, torch.Tensor] = {}  # in the shapes of the parameters
        self._bases: dict[str, torch.Tensor] = {}
        self._scaler: LossScaler | None = None  # if it does scale
        self._scale = torch.ones(())  # the loss scale that is in the errors
        self.has_begun = False
        self._beside: Beside | None = None
        self._is_noted = False

    def open(
        self, step: StepModule, device: torch.device, scaler: LossScaler | None, may_miss: bool
    ) -> None:
        """Get ready for the gradients of ``step``; every rank does so at the same time.

        Args:
            step: What DDP wraps. Its parameters keep the errors that they have.
            device: Where the gradients are.
            scaler: What scales the loss.
            may_miss: Whether parameters may go without a gradient.
        """
        self._step = step
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._may_miss = may_miss
        self._plain = average_hook(self._dtype, step.extra_weight)
        self._beside = Beside(device)
        self._one = torch.ones((), device=device)
        self._scale = self._scale.to(device)
        earlier, bases = self._errors, self._bases
        self._errors, self._bases, self._compressed = {}, {}, {}
        for name, parameter in step.task.named_parameters():
            if not parameter.requires_grad or not is_compressed(parameter, self._rank):
                continue
            error = like_gradient(parameter, device)
            matrix = as_matrix(error)
            if name in earlier and earlier[name].shape == error.shape:
                error.copy_(earlier[name])
            basis = first_basis(name, self._rank, matrix.shape[1])
            if name in bases and bases[name].shape == basis.shape:
                basis = bases[name]
            self._errors[name], self._bases[name] = error, basis.to(error)
            self._compressed[id(parameter)] = matrix, self._bases[name]
        if not bases and not self._is_noted:
            self._is_noted = True
            if self._compressed:
                note_late_start(self._start_step, step.task.run.total_steps)
            else:
                note_too_small(self._rank)

    def reduce(self, _: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        """Average a bucket over the ranks; a communication hook for DDP."""
        if self._step.task.run.step < self._start_step:
            return self._plain(None, bucket)
        assert self._beside is not None
        self.has_begun = True
        if bucket.index() == 0 and self._scaler is not None:
            scale = self._scaler.scale(self._one)
            self._rescale, self._scale = scale / self._scale, scale
        return self._beside.run(lambda: self._send(bucket), self._receive)

    def close(self) -> None:
        """End what `open` began, if it has; the errors stay."""
        if self._beside is not None:
            self._beside.close()
            self._beside = None

    def settle(self, step: StepModule, scaler: LossScaler | None) -> None:
        """Put the errors into the gradients, on a rank that is alone and compresses nothing."""
        if not self._errors or not step.has_weight:
            return
        for name, parameter in step.task.named_parameters():
            if parameter.grad is not None and name in self._errors:
                error = self._errors.pop(name).to(parameter.grad)
                parameter.grad.add_(error if scaler is None else scaler.scale(error))

    def state_dict(self) -> dict[str, Any]:
        """Return the mean error of each parameter, and Q'; nothing before gradients are compressed.

        A collective, after which every rank has the mean error.
        """
        if not self.has_begun:
            return {}
        for error in self._errors.values():
            distributed.all_reduce_sum(as_matrix(error)).div_(distributed.world_size())
        return {
            "errors": {name: self._unscaled(error) for name, error in self._errors.items()},
            "bases": self._bases,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned, before `open`."""
        self._errors = dict(state.get("errors", {}))
        self._bases = dict(state.get("bases", {}))
        self.has_begun = bool(state)

    def _unscaled(self, error: torch.Tensor) -> torch.Tensor:
        return error if self._scaler is None else error / self._scale

    def _send(self, bucket: GradBucket) -> _Sent:
        exact, plain, matrices = [], [], []
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter is self._step.extra_weight and self._dtype is not None:
                exact.append(grad)
            elif id(parameter) in self._compressed:
                error, basis = self._compressed[id(parameter)]
                # The bucket gives it the parameter's shape, but has it in the parameter's layout.
                matrices.append(_Matrix(grad.view(error.shape), error, basis))
            else:
                plain.append(grad)
        for grad, error, _ in matrices:
            if self._scaler is None:
                error.add_(grad)
            else:
                torch.addcmul(grad, error, self._rescale, out=error)
        lefts = [basis @ error.t() for _, error, basis in matrices]
        exact_mean = Mean.send(exact, None)
        buffer: torch.Tensor = bucket.buffer()
        mean = Mean.send([self._have_gradients(buffer, matrices), *lefts, *plain], self._dtype)
        return _Sent(buffer, exact, plain, matrices, exact_mean, mean)

    def _receive(self, sent: _Sent, group: dist.ProcessGroup | None) -> torch.Tensor:
        matrices = sent.matrices
        have_gradients, *means = sent.mean.receive()
        # Where no rank has a gradient there will be no step: all of the error is kept.
        used = [count > 0 for count in have_gradients]
        lefts = [
            orthonormal(mean) * is_used
            for mean, is_used in zip(means[: len(matrices)], used, strict=True)
        ]
        rights = [left @ matrix.error for left, matrix in zip(lefts, matrices, strict=True)]
        mean = Mean.send(rights, self._dtype, group)
        _copy(sent.plain, means[len(matrices) :])
        _copy(sent.exact, sent.exact_mean.receive())
        for (grad, error, basis), left, right, is_used in zip(
            matrices, lefts, mean.receive(), used, strict=True
        ):
            torch.mm(left.t(), right, out=grad)
            error.sub_(grad)
            is_finite = right.isfinite().all()
            basis.copy_(torch.where(is_used & is_finite, orthonormal(right), basis))
            _zero_unless(is_finite, error)
        return sent.buffer

    def _have_gradients(self, buffer: torch.Tensor, matrices: Sequence[_Matrix]) -> torch.Tensor:
        """Return 1 for each matrix for which this rank has a gradient, else 0."""
        if matrices and self._may_miss:
            norms = [torch.linalg.vector_norm(grad) for grad, _, _ in matrices]
            return torch.stack(norms).ne(0).to(buffer.dtype)
        return buffer.new_full((len(matrices),), float(self._step.has_weight))


def _copy(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _zero_unless(is_finite: torch.Tensor, error: torch.Tensor) -> None:
    """Forget an error after an overflow: it would stay NaN for ever."""
    if error.is_cuda:
        error.masked_fill_(~is_finite, 0)  # waits for nothing
    elif not is_finite:
        error.zero_()
