"""What runs on one rank only can start no collective, and everything else."""

from __future__ import annotations

import copy
import io
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import Regression, fit, on_ranks, samples
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import barrier, new_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from trainer import Callback, DataModule, distributed
from trainer.guard import no_collectives

HERE = Path(__file__)


def some(size: int = 4) -> Tensor:
    return torch.ones(size)


def each() -> list[Tensor]:
    return [some() for _ in range(2)]


def in_a_thread(fn: Callable[[], object]) -> None:
    errors = []

    def run() -> None:
        try:
            fn()
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    raise errors[0]


def by_a_pool(fn: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: fn()).result()


def mean_of_torchmetrics() -> None:
    metric = MeanMetric()
    metric.update(3.0)
    metric.compute()


@torch.compile(backend="eager")
def compiled_sum(x: Tensor) -> Tensor:
    return functional.all_reduce(x + 1, "sum", dist.group.WORLD) + 1


def nested_fit() -> None:
    fit(Regression(), Path("never"), train=samples(4), max_steps=1)


COLLECTIVES: dict[str, tuple[str, Callable[[], object]]] = {
    "all_reduce": ("all_reduce", lambda: dist.all_reduce(some())),
    "asynchronous": ("all_reduce", lambda: dist.all_reduce(some(), async_op=True)),
    "broadcast": ("broadcast", lambda: dist.broadcast(some(), 0)),
    "reduce": ("reduce", lambda: dist.reduce(some(), 0)),
    "all_gather": ("all_gather", lambda: dist.all_gather(each(), some())),
    "gather": ("gather", lambda: dist.gather(some(), each())),
    "scatter": ("scatter", lambda: dist.scatter(some(), each())),
    "reduce_scatter": ("reduce_scatter", lambda: dist.reduce_scatter(some(), each())),
    "all_to_all": ("all_to_all", lambda: dist.all_to_all(each(), each())),
    "all_to_all_single": ("all_to_all_single", lambda: dist.all_to_all_single(some(), some())),
    "all_gather_object": ("all_gather_object", lambda: dist.all_gather_object([0, 0], 1)),
    "gather_object": ("gather_object", lambda: dist.gather_object(1, [0, 0])),
    "objects": ("broadcast_object_list", lambda: dist.broadcast_object_list([1])),
    "scattered": ("scatter_object_list", lambda: dist.scatter_object_list([0], [1, 1])),
    "barrier": ("barrier", lambda: barrier()),
    "monitored": ("monitored_barrier", lambda: dist.monitored_barrier()),
    "send": ("send", lambda: dist.send(some(), 1)),
    "receive": ("recv", lambda: dist.recv(some())),
    "isend": ("isend", lambda: dist.isend(some(), 1)),
    "irecv": ("irecv", lambda: dist.irecv(some(), 1)),
    "new_group": ("new_group", lambda: new_group()),
    "group of one": ("new_group", lambda: new_group([0], use_local_synchronization=True)),
    "subgroups": ("new_subgroups", lambda: dist.new_subgroups(1)),
    "ours": ("all_reduce", lambda: distributed.barrier()),
    "functional": (
        "all_reduce",
        lambda: functional.all_reduce(some(), "sum", dist.group.WORLD),
    ),
    "compiled": ("all_reduce", lambda: compiled_sum(some())),
    "DTensor": ("all_reduce", lambda: sharded.sum().full_tensor()),
    "inside DTensor": ("all_reduce", lambda: sharded.sum().exp()),
    "making DDP": ("allgather", lambda: nn.parallel.DistributedDataParallel(nn.Linear(1, 1))),
    "backward": ("allreduce", lambda: wrapped(torch.ones(1, 2)).sum().backward()),
    "torchmetrics": ("barrier", mean_of_torchmetrics),
    "fit": ("all_gather_object", nested_fit),
    "thread": ("barrier", lambda: in_a_thread(lambda: barrier())),
    "pool": ("barrier", lambda: by_a_pool(lambda: barrier())),
}


class Asking(Callback):
    def on_log(self, run: Any, metrics: Any) -> None:
        run()


class Preparing(DataModule):
    def prepare(self) -> None:
        barrier()


wrapped: nn.Module
sharded: DTensor


def try_all() -> dict[str, str]:
    """On rank 0 alone, start every collective; return what is said about each."""
    global wrapped, sharded
    mesh = init_device_mesh("cpu", (2,))
    sharded = DTensor.from_local(some(), mesh, [Shard(0)])
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    said = {}
    if dist.get_rank() == 0:
        for name, (_, call) in COLLECTIVES.items():
            with (
                pytest.raises(ValueError, match="every rank") as error,
                no_collectives("a callback"),
            ):
                Asking().on_log(call, {})
            said[name] = str(error.value)
        refused = pytest.raises(ValueError, match="every rank")
        with refused as error, no_collectives("work for all"):
            Preparing().prepare()
        said["prepare"] = str(error.value)
    # Nothing was sent, and the ranks are still in step.
    group = new_group()
    assert group is not None
    dist.all_reduce(some(), group=group)
    barrier()
    return said


def do_everything_else() -> None:
    """On rank 0 alone, what a callback may want to do."""
    graphs = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()
    compiled = torch.compile(net, backend=counting)
    x = torch.randn(4, 3)
    reference = net(x)
    with torch.no_grad():
        compiled(x)
    started = dist.all_reduce(some(), async_op=True)
    lazy, other = (functional.all_reduce(some(), "sum", dist.group.WORLD) for _ in range(2))
    if dist.get_rank() == 0:
        with no_collectives("a callback"):
            with torch.no_grad():
                assert torch.equal(net(x), reference)
                assert torch.equal(compiled(x), reference)
                assert len(graphs) == 1  # still compiled, and not anew
            fresh = torch.compile(nn.Linear(3, 2), backend=counting, fullgraph=True)
            assert fresh(x).shape == (4, 2)
            assert len(graphs) == 2
            with torch.inference_mode():
                assert torch.equal(net(x), reference)
            twin = copy.deepcopy(net)
            twin(x).sum().backward()
            torch.optim.SGD(twin.parameters(), lr=0.1).step()
            torch.save(twin.state_dict(), io.BytesIO())
            assert torch.export.export(net, (x,)).module()(x).shape == (4, 3)
            assert torch.func.vmap(net[0])(x).shape == (4, 8)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it is slow when not compiled
                assert flex_attention(*[torch.randn(1, 1, 16, 16)] * 3).shape[-1] == 16
            assert sum(len(batch[0]) for batch in DataLoader(samples(6), num_workers=1)) == 6
            thread = threading.Thread(target=lambda: graphs.append(net(x)))
            thread.start()
            thread.join()
            assert torch.equal(graphs.pop(), reference)
            started.wait()
            assert torch.equal(functional.wait_tensor(lazy), 2 * some())
            assert torch.equal(other + 0, 2 * some())
    barrier()


def both() -> dict[str, str]:
    do_everything_else()
    return try_all()


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    found: dict[str, str] = on_ranks(2, both)[0]
    return found


def test_every_collective_is_refused_by_name_with_its_line(said: dict[str, str]) -> None:
    assert said.keys() == {*COLLECTIVES, "prepare"}
    source = HERE.read_text().splitlines()
    for name, (operation, _) in COLLECTIVES.items():
        first, place, line, advice = said[name].splitlines()
        runs = "a thread that was started in " * (name in ("thread", "pool"))
        assert first == (
            f"{operation} needs every rank, and only rank 0 runs {runs}a callback "
            "(Asking.on_log): it would wait for the others for ever. It is called here:"
        ), name
        if name != "fit":  # its line is in what it shares with other tests
            number = int(place.removeprefix(f'  File "{HERE}", line ').partition(",")[0])
            assert line.strip() == source[number - 1].strip(), name
        assert "TaskModule, which every rank runs" in advice


def test_the_line_is_the_users_and_not_the_librarys(said: dict[str, str]) -> None:
    assert said["torchmetrics"].splitlines()[2] == "    metric.compute()"
    assert said["compiled"].splitlines()[1].endswith(", in compiled_sum")


def test_the_method_of_a_data_module_is_named(said: dict[str, str]) -> None:
    assert "runs work for all (Preparing.prepare): " in said["prepare"]


def test_one_process_is_not_guarded() -> None:
    with no_collectives("a callback"):
        assert torch._C._len_torch_dispatch_stack() == 0
