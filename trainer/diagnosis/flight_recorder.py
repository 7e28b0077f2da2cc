"""What a rank waits for, from torch's record of the last collectives that it has started."""

from __future__ import annotations

import json
import math
import time
from typing import Any, NamedTuple

import torch
from torch._C import _distributed_c10d


class Collective(NamedTuple):
    """A collective that this rank has started.

    Attributes:
        name: ``all_reduce`` and the like.
        group: The name of its process group; empty for that of all ranks.
        number: Its number in the group; ranks that wait for each other are at the same one.
        sizes: The shapes of its tensors.
        num_bytes: Of all of them.
        since: When it was started, by `time.monotonic`.
        is_done: Whether it has ended.
    """

    name: str
    group: str
    number: int
    sizes: tuple[tuple[int, ...], ...]
    num_bytes: int
    since: float
    is_done: bool

    def __str__(self) -> str:
        """Say it as in "waits for ..."."""
        where = f" in group {self.group}" if self.group else ""
        count = len(self.sizes)
        tensors = f"{count} tensors, " if count > 1 else ""
        return f"{self.name} #{self.number}{where} ({tensors}{_readable(self.num_bytes)})"


def recorded() -> list[Collective]:
    """Return the last collectives of this process, the oldest first: of gloo, and of NCCL."""
    found = []
    for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # the latter on CUDA builds only
        if hasattr(_distributed_c10d, dump):
            record = json.loads(getattr(_distributed_c10d, dump)())
            found += [_collective(entry) for entry in record.get("entries", ())]
    return sorted(found, key=lambda collective: collective.since)


def _collective(entry: dict[str, Any]) -> Collective:
    group, description = entry["process_group"]
    sizes = tuple(map(tuple, entry["input_sizes"] or entry["output_sizes"]))
    dtypes = entry["input_dtypes"] or entry["output_dtypes"]
    return Collective(
        name=entry["profiling_name"].partition(":")[2],
        group="" if description == "default_pg" else group,
        number=entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
        sizes=sizes,
        num_bytes=sum(
            math.prod(size) * _item_size(dtype) for size, dtype in zip(sizes, dtypes, strict=True)
        ),
        since=time.monotonic() - time.time() + entry["time_created_ns"] / 1e9,
        is_done=entry["retired"] or entry["state"] == "completed",
    )


def _item_size(dtype: str) -> int:
    found = getattr(torch, dtype.lower(), torch.uint8)  # it says "Float" for torch.float, "Byte"
    return int(found.itemsize)


def _readable(num_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"
