"""How fast the links are: all-reduces of several sizes, and the line through them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist

from trainer import distributed
from trainer.planning.network import Link, Network
from trainer.planning.options import PlanConfig
from trainer.watch import Phase, watch

_SIZES = [4**power for power in range(6, 13)]  # 4 KiB to 16 MiB
_TIME_FOR_ONE_S, _MOST_REPEATS = 0.5, 50
_SLOW_S = 1.0  # larger messages than one that takes so long tell nothing new
_ASSUMED = Link(50e-6, 10e9 / 8, "assumed, as a 10 Gbit/s Ethernet")

Samples = list[tuple[int, float]]


def measure_links(device: torch.device) -> dict[str, Link]:
    """Return the links ``within`` a machine and ``between`` machines, where ranks tell of them.

    Must be called on every rank.
    """
    ranks = distributed.world_size()
    firsts = distributed.first_ranks()
    bounds = [*firsts, ranks]
    machines = [range(a, b) for a, b in zip(firsts, bounds[1:], strict=True)]
    found: dict[str, Link] = {}
    if len(machines) == 1 and ranks > 1:
        found["within"] = fit(_measure(device, None), ranks)
    elif len(machines) > 1:
        found["between"] = fit(_measure(device, None), ranks)
        if min(map(len, machines)) > 1:
            with _group_of_machine(machines) as group:
                found["within"] = fit(_measure(device, group), dist.get_world_size(group))
    return found


def fit(samples: Samples, ranks: int) -> Link:
    """Return the link whose ring all-reduces take as long as was measured (see `Network.ring_s`).

    The smallest message tells the latency, the larger half of the sizes the bandwidth: the median
    of what each of them says, because a message that was held up for once says nothing.

    Args:
        samples: Bytes and seconds of each all-reduce, the smallest first.
        ranks: How many took part.
    """
    hops = 2 * (ranks - 1)
    (_, fastest_s), *others = samples
    large = others[len(others) // 2 :]
    byte_s = median((seconds - fastest_s) * ranks / size / hops for size, seconds in large)
    byte_s = max(byte_s, 1e-15)  # where a link is too fast to measure
    errors = [(fastest_s + hops / ranks * size * byte_s) / seconds - 1 for size, seconds in large]
    source = f"fitted on {ranks} ranks, large messages {max(map(abs, errors)):.0%} off at most"
    return Link(fastest_s / hops, 1 / byte_s, source)


def network(options: PlanConfig, found: dict[str, Link], local_world_size: int) -> Network:
    """Return the network to simulate: what is given, else what was measured, else a guess.

    Args:
        options: What is given.
        found: What `measure_links` returned.
        local_world_size: Ranks per machine in the measurement.
    """
    within, between = found.get("within"), found.get("between")
    if between is None:
        between = replace(within, source="as within this machine") if within else _ASSUMED
    if within is None:
        within = replace(between, source="as between machines")
    return Network(
        within=_given(within, options.node_latency_us, options.node_bandwidth_gbps),
        between=_given(between, options.latency_us, options.bandwidth_gbps),
        ranks_per_node=options.ranks_per_node or local_world_size,
    )


def _given(link: Link, latency_us: float | None, bandwidth_gbps: float | None) -> Link:
    if latency_us is not None:
        source = "given" if bandwidth_gbps else f"latency given; bandwidth {link.source}"
        link = replace(link, latency_s=latency_us / 1e6, source=source)
    if bandwidth_gbps is not None:
        source = "given" if latency_us is not None else f"bandwidth given; latency {link.source}"
        link = replace(link, bandwidth=bandwidth_gbps * 1e9 / 8, source=source)
    return link


def _measure(device: torch.device, group: dist.ProcessGroup | None) -> Samples:
    """Return bytes and median seconds of all-reduces in ``group``, as rank 0 sees them."""

    def once(buffer: torch.Tensor) -> float:
        start = time.perf_counter()
        dist.all_reduce(buffer, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    samples: Samples = []
    for size in _SIZES:
        watch.enter(Phase.WAITING)
        buffer = torch.zeros(size // 4, device=device)
        once(buffer)
        repeats = min(_MOST_REPEATS, max(3, round(_TIME_FOR_ONE_S / once(buffer))))
        repeats = distributed.broadcast_object(repeats)
        seconds = distributed.broadcast_object(median(once(buffer) for _ in range(repeats)))
        samples.append((size, seconds))
        if seconds > _SLOW_S:
            break
    return samples


@contextmanager
def _group_of_machine(machines: Sequence[range]) -> Iterator[dist.ProcessGroup]:
    """Give the group of this machine's ranks; every rank makes the groups of all machines."""
    groups = [dist.new_group(list(ranks)) for ranks in machines]
    mine = next(i for i, ranks in enumerate(machines) if distributed.rank() in ranks)
    try:
        yield groups[mine]
    finally:
        dist.destroy_process_group(groups[mine])
