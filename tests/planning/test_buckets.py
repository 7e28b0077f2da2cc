"""The layout on paper is DDP's own, at any world size."""

# Annotations are not postponed here: DDP compares those of a hook with the classes themselves.

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import Regression, samples
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup, GradBucket
from torch.distributed import HashStore
from torch.futures import Future

from trainer.logbook import Logbook
from trainer.planning.buckets import bucket_layout
from trainer.planning.simulation import Bucket
from trainer.state import TrainState
from trainer.step import StepModule

MIB = 2**20
FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
PARAMETERS = [(MIB // 4, FP32)] * 60  # of 1 MiB each
ORDER = [*range(59, 29, -1), *range(30)]  # the first half of the module is used backwards


def layout(order: Sequence[int] | None, cap_mb: float | None) -> list[tuple[list[int], float]]:
    found = bucket_layout(PARAMETERS, order, cap_mb)
    return [(sorted(bucket.parameters), bucket.size / MIB) for bucket in found]


def test_the_first_bucket_is_small_and_all_follow_what_is_ready() -> None:
    found = layout(ORDER, None)
    assert [size for _, size in found] == [1, 25, 25, 9]
    assert [members for members, _ in found[:2]] == [[59], sorted(ORDER[1:26])]
    assert [size for _, size in layout(ORDER, 20.0)] == [20, 20, 20]


def test_with_unused_parameters_the_small_bucket_is_that_of_the_first_layers() -> None:
    found = layout(None, None)
    assert [size for _, size in found] == [9, 25, 25, 1]
    assert found[-1][0] == [0]


def test_a_hook_sends_as_many_bytes_whatever_the_gradients_are() -> None:
    kinds = (FP64, FP32, BF16)
    plain, compressed = (
        [bucket_layout([(MIB, kind)], [0], None, sent_as)[0].size / MIB for kind in kinds]
        for sent_as in (None, BF16)
    )
    assert plain == [8, 4, 2]
    assert compressed == [2, 2, 2]


class ReadyInOrder(nn.Module):
    """Parameters whose gradients become ready in a given order; those not in it get none."""

    def __init__(self, parameters: Sequence[tuple[int, torch.dtype]], order: Sequence[int]) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.zeros(count, dtype=kind) for count, kind in parameters)
        self.order = order

    def forward(self) -> torch.Tensor:
        total = torch.zeros(())
        for number in reversed(self.order):  # what was used last is ready first
            total = total + self.all[number].sum().float()
        return total


def buckets_of_ddp(
    module: nn.Module, inputs: Sequence[Any], world_size: int, **options: Any
) -> tuple[list[Bucket], list[int]]:
    """Return what DDP gives to a hook, on a group that sends nothing, and what is ready first."""
    custom = dist.ProcessGroup.BackendType.CUSTOM
    group = dist.ProcessGroup(HashStore(), 0, world_size)
    group._set_default_backend(custom)
    fake = FakeProcessGroup._create_internal(0, world_size)
    group._register_backend(torch.device("cpu"), custom, fake)

    parameters = [p for p in module.parameters() if p.requires_grad]
    numbers = {id(p): number for number, p in enumerate(parameters)}
    ready: list[int] = []
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: ready.append(numbers[id(p)]))
    found: list[Bucket] = []

    def note(_: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        buffer: torch.Tensor = bucket.buffer()
        members = tuple(numbers[id(p)] for p in bucket.parameters())
        found.append(Bucket(members, buffer.numel() * buffer.element_size()))
        done: Future[torch.Tensor] = Future()
        done.set_result(buffer)
        return done

    ddp = nn.parallel.DistributedDataParallel(module, process_group=group, **options)
    ddp.register_comm_hook(None, note)
    for _ in range(2):  # after the first, DDP orders its buckets by what became ready first
        found.clear()
        ready.clear()
        ddp(*inputs).backward()
    return found, ready


def step_of_a_task() -> StepModule:
    task = Regression()
    task.net = nn.Sequential(
        *(nn.Linear(3, 3).double() for _ in range(5)), nn.Linear(3, 1).double()
    )
    task.net[2].bias.requires_grad = False
    state = TrainState(
        sample_weights={"loss": 2.0}
    )  # not what it is, so the extra weight is needed
    return StepModule(
        task, Logbook(), {}, state, seed=0, averaged_over=2, needs_every_parameter=True
    )


KINDS = (FP32, BF16, FP32, FP16, FP64)
MIXED = [(1000 + 100 * n, KINDS[n % 5]) for n in range(23)]
SHUFFLED = [7 * n % 23 for n in range(23)]


@pytest.mark.parametrize("world_size", [2, 10_000])
@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("case", ["several", "mixed", "task", "torchs own"])
def test_ddp_has_these_buckets(case: str, find_unused: bool, world_size: int) -> None:
    options: dict[str, Any] = {"bucket_cap_mb": 0.01, "find_unused_parameters": find_unused}
    inputs: tuple[Any, ...] = ()
    module: nn.Module
    if case == "task":  # with the weight of its batch as one more parameter
        module, inputs = step_of_a_task(), (samples(4).tensors, 4, 8)
        options["bucket_cap_mb"] = 1e-4
    elif case == "torchs own":
        module = ReadyInOrder([(MIB // 4, FP32)] * 30, range(30))
        del options["bucket_cap_mb"]
    else:
        kinds = MIXED if case == "mixed" else [(count, FP32) for count, _ in MIXED]
        module = ReadyInOrder(kinds, SHUFFLED[: 20 if find_unused else None])
    expected, ready = buckets_of_ddp(module, inputs, world_size, **options)
    assert len(expected) > 2

    parameters = [(p.numel(), p.dtype) for p in module.parameters() if p.requires_grad]
    found = bucket_layout(parameters, None if find_unused else ready, options.get("bucket_cap_mb"))
    assert [(sorted(b.parameters), b.size) for b in found] == [
        (sorted(b.parameters), b.size) for b in expected
    ]
    if case == "task":
        assert next(module.parameters()) is module.extra_weight
        assert ready[0] == 0  # as `Passes` takes for granted
    assert not dist.is_initialized()
