"""One optimizer step on paper: gradients become ready in backward, buckets are reduced meanwhile.

As DDP does it (Li et al. 2020, "PyTorch Distributed", VLDB): a bucket can be sent once all of its
gradients are there, buckets are sent in a fixed order, and one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together.

    Attributes:
        parameters: The numbers of their parameters.
        size: Bytes that are sent.
    """

    parameters: tuple[int, ...]
    size: float


@dataclass(frozen=True)
class Compute:
    """What one rank computes in a step, in seconds.

    Attributes:
        before_s: Until the last backward begins: forward, and all of the micro-batches before.
        backward_s: The last backward.
        ready_s: When the gradient of each parameter is there, from the start of that backward.
        after_s: The optimizer.
    """

    before_s: float
    backward_s: float
    ready_s: Sequence[float]
    after_s: float

    @property
    def total_s(self) -> float:
        """The step of one rank alone."""
        return self.before_s + self.backward_s + self.after_s


@dataclass(frozen=True)
class Step:
    """A simulated step, in seconds.

    Attributes:
        step_s: All of it.
        communication_s: All-reduces, added up.
        exposed_s: How long the optimizer waits for them after backward.
    """

    step_s: float
    communication_s: float
    exposed_s: float


def simulate(
    compute: Compute, buckets: Sequence[Bucket], all_reduce_s: Callable[[float], float]
) -> Step:
    """Simulate one step.

    Args:
        compute: What every rank computes.
        buckets: In the order in which they are sent.
        all_reduce_s: The seconds that so many bytes take.
    """
    end_s = communication_s = 0.0
    for bucket in buckets:
        ready_s = max(compute.ready_s[number] for number in bucket.parameters)
        taken_s = all_reduce_s(bucket.size)
        end_s = max(end_s, ready_s) + taken_s
        communication_s += taken_s
    exposed_s = max(0.0, end_s - compute.backward_s)
    return Step(compute.total_s + exposed_s, communication_s, exposed_s)
