"""What an all-reduce takes on paper: the latency and the bandwidth of links, ring and tree.

Both follow the alpha-beta model: a message takes ``latency + size / bandwidth``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """One direction of a connection.

    Attributes:
        latency_s: Seconds before the first byte arrives.
        bandwidth: Bytes per second.
        source: Where the two numbers are from, in words.
    """

    latency_s: float
    bandwidth: float
    source: str = "given"


@dataclass(frozen=True)
class Network:
    """Machines of several ranks.

    Attributes:
        within: Between two ranks of a machine.
        between: Of a machine to the others.
        ranks_per_node: Ranks per machine.
    """

    within: Link
    between: Link
    ranks_per_node: int = 1

    def ring_s(self, size: float, ranks: int) -> float:
        """Return the seconds of a ring all-reduce of ``size`` bytes.

        A reduce-scatter and an all-gather of N-1 messages each, of 1/N of the data: 2(N-1) alpha +
        2(N-1)/N size/B (Thakur, Rabenseifner and Gropp 2005). The ring enters and leaves every
        machine once, so it has the machine's whole bandwidth, and 2(nodes-1) of its messages go
        between machines (as NCCL counts them, src/graph/tuning.cc). Gloo's ring is the same, with
        messages cut into segments that are sent while others are added.
        """
        nodes, link = self._nodes(ranks)
        hops, far = 2 * (ranks - 1), 2 * (nodes - 1)
        latency_s = (hops - far) * self.within.latency_s + far * self.between.latency_s
        return latency_s + hops / ranks * size / link

    def tree_s(self, size: float, ranks: int) -> float:
        """Return the seconds of an all-reduce of ``size`` bytes up and down two binary trees.

        2 log2(nodes) alpha + 2 size/B between machines: each of the two trees has half of the data,
        and the leaves of one are the inner nodes of the other (Sanders, Speck and Träff 2009).
        Within a machine there is a chain (NCCL, src/graph/tuning.cc).
        """
        if ranks == 1:
            return 0.0
        nodes, link = self._nodes(ranks)
        chain = min(ranks, self.ranks_per_node) - 1
        depth = math.ceil(math.log2(nodes))
        latency_s = chain * self.within.latency_s + depth * self.between.latency_s
        return 2 * (latency_s + size / link)

    def _nodes(self, ranks: int) -> tuple[int, float]:
        """Return the number of machines and the bandwidth that limits an all-reduce."""
        nodes = math.ceil(ranks / self.ranks_per_node)
        links = [self.between] * (nodes > 1) + [self.within] * (min(ranks, self.ranks_per_node) > 1)
        return nodes, min((link.bandwidth for link in links), default=math.inf)
