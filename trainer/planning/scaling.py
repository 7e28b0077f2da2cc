"""A task on 1 to thousands of ranks: what was measured, simulated for each number of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from trainer.config import TrainerConfig
from trainer.optimizing.lr_scaling import LRScaling
from trainer.planning.buckets import CAPS_MB, bucket_layout
from trainer.planning.expected_failures import checkpoint_interval_s, lost_share
from trainer.planning.links import network
from trainer.planning.measuring import Measured
from trainer.planning.options import PlanConfig
from trainer.planning.simulation import Bucket, Step, simulate
from trainer.precision import DTYPES

AllReduce = Callable[[float, int], float]  # seconds that so many bytes take on so many ranks


@dataclass(frozen=True)
class Row:
    """What is expected of a number of ranks.

    Attributes:
        ranks: The number of ranks.
        is_extrapolated: Whether more ranks, or a larger micro-batch, than were measured.
        samples: The most per rank and step.
        global_batch_size: Samples per step.
        learning_rate: That goes with it; None where the rule has none.
        ring_s: A step, all-reduces being rings, with the bucket size that is best for them.
        tree_s: A step, all-reduces being trees, likewise.
        exposed_s: How long a step waits for all-reduces, of the faster kind that the backend has.
        efficiency: Samples per second and rank, relative to one rank alone.
        bucket_cap_mb: The best bucket size; None is torch's own.
        memory: Bytes of a rank for weights, gradients, optimizer and activations.
        failures_per_day: Of the whole run.
        save_every_s: Between two checkpoints.
        lost: Share of the time that failures and checkpoints take.
    """

    ranks: int
    is_extrapolated: bool
    samples: int
    global_batch_size: int
    learning_rate: float | None
    ring_s: float
    tree_s: float
    exposed_s: float
    efficiency: float
    bucket_cap_mb: float | None
    memory: float
    failures_per_day: float
    save_every_s: float
    lost: float


class Scaling:
    """Simulates a measured task.

    Attributes:
        network: The links that are simulated.
        lr_rule: How the learning rate follows the global batch: ``linear`` or ``sqrt``.
        lr_reference: The global batch that the task's learning rate is meant for.
        has_trees: Whether the backend has trees: NCCL has, gloo has rings only.
    """

    def __init__(self, measured: Measured, config: TrainerConfig, options: PlanConfig) -> None:
        """Choose the links, and find DDP's buckets for every bucket size there is to choose."""
        self._measured, self._config, self._options = measured, config, options
        self.network = network(options, measured.links, measured.local_world_size)
        self.has_trees = measured.device == "cuda"
        self.lr_rule = config.lr_scaling
        if self.lr_rule == "none":
            self.lr_rule = "linear" if measured.optimizer == "SGD" else "sqrt"
        self.lr_reference = config.lr_reference_batch_size or measured.global_batch_size
        own = config.bucket_cap_mb
        self._own_cap = own if isinstance(own, float) else None
        order = None if config.find_unused_parameters else measured.order
        sent_as = DTYPES.get(config.comm_hook or "")
        self._layouts = {
            cap: bucket_layout(measured.parameters, order, cap, sent_as)
            for cap in dict.fromkeys((self._own_cap, *CAPS_MB))
        }

    @property
    def own_layout(self) -> list[Bucket]:
        """DDP's buckets with the bucket size of the options."""
        return self._layouts[self._own_cap]

    def own_step(self, ranks: int) -> Step:
        """Return the step with the options as they are: their batch and their bucket size."""
        micros = self._micros(ranks)
        kinds = [self.network.ring_s] + [self.network.tree_s] * self.has_trees
        steps = [self._step(micros, ranks, kind, self._own_cap) for kind in kinds]
        return min(steps, key=lambda step: step.step_s)

    def strong(self, ranks: Sequence[int]) -> list[Row]:
        """Return rows that share the global batch, as far as each rank gets enough samples."""
        size, smallest = self._measured.global_batch_size, self._measured.profile.sizes[0]
        can = [n for n in ranks if n <= size and min(self._micros(n)) >= smallest]
        alone_s = self._measured.profile.compute(self._micros(1)).total_s
        return [self._row(n, self._micros(n), size, alone_s / n) for n in can]

    def weak(self, ranks: Sequence[int]) -> list[Row]:
        """Return rows in which every rank keeps the samples that it had in the measurement."""
        micros = self._micros(self._measured.world_size)
        alone_s = self._measured.profile.compute(micros).total_s
        return [self._row(n, micros, sum(micros) * n, alone_s) for n in ranks]

    def _micros(self, ranks: int) -> list[int]:
        """Return the sizes of the micro-batches of the rank that has most of the global batch."""
        cuts = self._measured.plan.cut(self._measured.global_batch_size, 0, ranks)
        return [cut.stop - cut.start for cut in cuts]

    def _row(self, ranks: int, micros: list[int], size: int, ideal_s: float) -> Row:
        measured, options = self._measured, self._options
        ring = self._best(micros, ranks, self.network.ring_s)
        tree = self._best(micros, ranks, self.network.tree_s)
        is_tree = self.has_trees and tree[1].step_s < ring[1].step_s
        cap, step = tree if is_tree else ring
        mtbf_s, cost_s = options.rank_mtbf_h * 3600 / ranks, measured.stall_s
        every_s = max(step.step_s, checkpoint_interval_s(cost_s, mtbf_s))
        largest = max(micros)
        return Row(
            ranks=ranks,
            is_extrapolated=ranks > measured.world_size or largest > measured.profile.sizes[-1],
            samples=sum(micros),
            global_batch_size=size,
            learning_rate=self._learning_rate(size),
            ring_s=ring[1].step_s,
            tree_s=tree[1].step_s,
            exposed_s=step.exposed_s,
            efficiency=ideal_s / step.step_s,
            bucket_cap_mb=cap,
            memory=self._memory(largest, ranks),
            failures_per_day=24 * 3600 / mtbf_s,
            save_every_s=every_s,
            lost=lost_share(every_s, cost_s, measured.write_s + options.restart_s, mtbf_s),
        )

    def _best(self, micros: list[int], ranks: int, kind: AllReduce) -> tuple[float | None, Step]:
        """Return the bucket size with the shortest step, and that step; if equal, the own size."""
        steps = {cap: self._step(micros, ranks, kind, cap) for cap in self._layouts}
        return min(steps.items(), key=lambda item: item[1].step_s)

    def _step(self, micros: list[int], ranks: int, kind: AllReduce, cap: float | None) -> Step:
        compute = self._measured.profile.compute(micros)
        if ranks == 1:
            return simulate(compute, [], lambda size: 0.0)
        compute = replace(compute, after_s=compute.after_s + self._options.overhead_ms / 1e3)
        return simulate(compute, self._layouts[cap], lambda size: kind(size, ranks))

    def _learning_rate(self, size: int) -> float | None:
        group = self._measured.param_groups[0]
        scaling = LRScaling(self.lr_rule, size, self.lr_reference)
        optimizer: Any = SimpleNamespace(param_groups=self._measured.param_groups)
        try:
            scaling.check(optimizer)
        except ValueError:  # says why; here it is one row of many
            return None
        names = ("max_lr", "initial_lr", "lr")  # with a schedule, the rate it is built around
        return scaling.full_factor * float(next(group[name] for name in names if name in group))

    def _memory(self, micro: int, ranks: int) -> float:
        measured = self._measured
        copies = 1 if ranks == 1 or self._config.gradient_as_bucket_view else 2
        fixed = measured.weight_bytes + measured.optimizer_bytes + copies * measured.gradient_bytes
        return fixed + measured.profile.activations(micro)


def ladder(max_ranks: int, world_size: int) -> list[int]:
    """Return the numbers of ranks to show: powers of two, those that measured, and the largest."""
    powers = {1 << power for power in range(max_ranks.bit_length())}
    return sorted(powers | {max_ranks, world_size})
