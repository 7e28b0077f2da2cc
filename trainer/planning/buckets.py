"""DDP's own buckets, of a module of any size: from the function that DDP itself calls for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

from trainer.planning.simulation import Bucket
from trainer.strategies.bucket_size import TORCHS_FIRST_MB, TORCHS_OWN_MB

CAPS_MB = (None, 1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0)
"""Values of ``bucket_cap_mb`` to choose from; None is torch's own."""


def bucket_layout(
    parameters: Sequence[tuple[int, torch.dtype]],
    order: Sequence[int] | None,
    cap_mb: float | None,
    sent_as: torch.dtype | None = None,
) -> list[Bucket]:
    """Return the buckets into which DDP puts the gradients of a module, at any world size.

    Args:
        parameters: Elements and type of each, in the order of ``module.parameters()``.
        order: Their numbers in the order in which their gradients become ready; None with
            ``find_unused_parameters``, where DDP keeps to the order of the module.
        cap_mb: The option ``bucket_cap_mb``.
        sent_as: What a communication hook turns gradients into; None for what they are.

    Returns:
        The buckets in the order in which they are sent.
    """
    gradients = [torch.empty(count, dtype=kind, device="meta") for count, kind in parameters]
    caps_mb = (TORCHS_FIRST_MB, TORCHS_OWN_MB) if cap_mb is None else (cap_mb,)
    limits = [int(size * 2**20) for size in caps_mb]
    if order is None:
        found, _ = _compute_bucket_assignment_by_size(gradients, limits)
        found.reverse()  # what is used last is ready first
    else:
        in_order = [gradients[number] for number in order]
        found, _ = _compute_bucket_assignment_by_size(in_order, limits, [], list(order))
    sizes = [grad.numel() * (sent_as or grad.dtype).itemsize for grad in gradients]
    return [Bucket(tuple(members), sum(sizes[n] for n in members)) for members in found]
