"""Every option of `plan`: what cannot be measured here, and how far to look."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.options import check_fields, option


@dataclass
class PlanConfig:
    """Every option of ``Trainer.plan`` and, as ``plan.<name>=...``, of ``mode=plan``.

    Raises:
        ValueError: For a value of the wrong type or out of range.
    """

    max_ranks: int = option(
        10_000, "The largest number of ranks to simulate.", at_least=2, at_most=1_000_000
    )
    ranks_per_node: int | None = option(
        None, "Ranks per machine; null: as many as this machine has in the measurement.", at_least=1
    )
    latency_us: float | None = option(
        None,
        "Latency between machines, in microseconds; null: as measured, if ranks on several "
        "machines measure.",
        at_least=0,
    )
    bandwidth_gbps: float | None = option(
        None,
        "Bandwidth of a machine to the others, each way, in Gbit/s; null: likewise.",
        above=0,
    )
    node_latency_us: float | None = option(
        None, "Latency between the ranks of a machine; null: as measured.", at_least=0
    )
    node_bandwidth_gbps: float | None = option(
        None, "Bandwidth between two ranks of a machine, each way; null: as measured.", above=0
    )
    overhead_ms: float = option(
        0.0, "What every step on several ranks takes besides what is simulated.", at_least=0
    )
    rank_mtbf_h: float = option(
        50_000.0,
        "Hours between two failures of one rank with all that belongs to it. The default is that "
        "of 16,384 GPUs with 419 failures in 54 days (Llama 3, arXiv:2407.21783).",
        above=0,
    )
    restart_s: float = option(
        300.0, "From a failure until the run has started again, in seconds.", at_least=0
    )
    steps: int = option(10, "Timed passes for each size of micro-batch.", at_least=1)

    def __post_init__(self) -> None:
        check_fields(self)
