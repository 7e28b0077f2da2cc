"""DDP's own buckets, at any world size."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from trainer.planning.buckets import bucket_layout

MIB = 2**20
PARAMETERS = [(MIB // 4, torch.float32)] * 60  # of 1 MiB each
ORDER = [*range(59, 29, -1), *range(30)]  # the first half of the module is used backwards


def layout(cap_mb: float | None, world_size: int = 10_000) -> list[tuple[tuple[int, ...], float]]:
    buckets = bucket_layout(PARAMETERS, ORDER, cap_mb, world_size)
    return [(bucket.parameters, bucket.size / MIB) for bucket in buckets]


def test_the_first_bucket_is_small_and_all_follow_what_is_ready() -> None:
    assert [size for _, size in layout(None)] == [1, 25, 25, 9]
    members = [number for numbers, _ in layout(None) for number in numbers]
    assert sorted(members[:26]) == sorted(ORDER[:26])
    assert sorted(members) == list(range(60))
    assert not dist.is_initialized()


@pytest.mark.parametrize("world_size", [2, 10_000])
def test_a_size_is_kept_whatever_the_world_size(world_size: int) -> None:
    assert [size for _, size in layout(20.0, world_size)] == [20, 20, 20]


def test_each_type_has_buckets_of_its_own() -> None:
    mixed = [(MIB // 4, torch.float32), (MIB // 2, torch.bfloat16)] * 4
    found = bucket_layout(mixed, range(8), 100.0, 4)
    assert sorted(sorted(bucket.parameters) for bucket in found) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [bucket.size for bucket in found] == [4 * MIB, 4 * MIB]
