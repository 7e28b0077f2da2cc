"""How long a step takes in a network, by a hand-written DDP loop and by the Trainer.

Every rank runs this, in its host. Contestants take turns in the same ranks. Each trains a fresh net
for some steps. It is noted when a net's forward begins, and the time from one to the next is a
step: nothing is hooked into anybody's loop. The first steps of each do not count.
"""

from __future__ import annotations

import io
import itertools
import json
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.common import scratch
from benchmarks.networking.hosts import Network
from benchmarks.resting import Chain
from trainer import Trainer

WARM_UP = 4  # DDP rebuilds its buckets after the first step; the limit lets a first burst through


@dataclass(frozen=True)
class Contestant:
    """Who trains.

    Attributes:
        by: ``hand`` or ``trainer``.
        options: Of DDP, or of the Trainer.
        before: Steps that do not count, for what it does in the first ones.
    """

    by: str
    options: Mapping[str, Any] = field(default_factory=dict)
    before: int = WARM_UP


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        depth: Layers of the net.
        width: Of each; it has 4 * width^2 bytes of gradients.
        batch: Samples per rank.
        compute_ms: Forward and backward, beside what the processor computes.
        steps: That count, of each contestant in each round.
        rounds: In which each contestant trains once.
    """

    depth: int
    width: int
    batch: int
    compute_ms: float
    steps: int
    rounds: int


@dataclass(frozen=True)
class Measured:
    """What was found for one contestant.

    Attributes:
        step_ms: The median step of each round, on the slowest rank.
        said: What the Trainer printed about buckets, last.
    """

    step_ms: list[float]
    said: str


def measure(
    network: Network,
    work: Workload,
    contestants: Mapping[str, Contestant],
    *,
    timeout_s: float,
    ranks_per_host: int = 1,
) -> dict[str, Measured]:
    """Let everyone train in the hosts of a network; return what was found, by name."""
    given = {
        "work": asdict(work),
        "contestants": {name: asdict(contestant) for name, contestant in contestants.items()},
    }
    command = [sys.executable, "-m", __name__, json.dumps(given)]
    outputs = network.run(command, timeout_s=timeout_s, ranks_per_host=ranks_per_host)
    found: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return {name: Measured(**values) for name, values in found.items()}


def train(work: Workload, contestant: Contestant) -> tuple[float, str]:
    """Train once; return the milliseconds of a step, and what was printed about buckets."""
    task, begun = Chain(work.depth, work.width, work.compute_ms), []
    task.register_forward_pre_hook(lambda *_: begun.append(time.perf_counter()))
    steps = contestant.before + work.steps + 1
    size = steps * work.batch * dist.get_world_size()
    samples = TensorDataset(torch.randn(size, 32), torch.randint(10, (size,)))
    shown = io.StringIO()
    with redirect_stdout(shown), redirect_stderr(shown):
        if contestant.by == "hand":
            _by_hand(task, samples, work.batch, steps, contestant.options)
        else:
            _by_trainer(task, samples, work.batch, steps, contestant.options)
    taken = torch.tensor(begun, dtype=torch.float64).diff()[-work.steps :]
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    said = [line for line in shown.getvalue().splitlines() if "bucket_cap_mb" in line]
    return median(taken.tolist()) * 1000, said[-1] if said else ""


def _by_hand(
    task: Chain, samples: TensorDataset, batch_size: int, steps: int, options: Mapping[str, Any]
) -> None:
    net = nn.parallel.DistributedDataParallel(task, **options)
    optimizer = task.configure_optimizers()
    loader = DataLoader(samples, batch_size, sampler=DistributedSampler(samples))
    for batch in itertools.islice(loader, steps):
        optimizer.zero_grad()
        task.loss(net(batch), batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _by_trainer(
    task: Chain, samples: TensorDataset, batch_size: int, steps: int, options: Mapping[str, Any]
) -> None:
    with scratch() as folder:
        box = [str(folder)]
        dist.broadcast_object_list(box)  # all ranks write to rank 0's
        Trainer(
            accelerator="cpu",
            global_batch_size=batch_size * dist.get_world_size(),
            max_steps=steps,
            num_threads=1,
            run_dir=box[0],
            **options,
        ).fit(task, train=samples)
        dist.barrier()


def main() -> None:
    """Train as one of the ranks; rank 0 prints what was found."""
    given = json.loads(sys.argv[1])
    work = Workload(**given["work"])
    contestants = {name: Contestant(**c) for name, c in given["contestants"].items()}
    found = {name: Measured([], "") for name in contestants}
    dist.init_process_group("gloo")
    for _, (name, contestant) in itertools.product(range(work.rounds), contestants.items()):
        step_ms, said = train(work, contestant)
        found[name] = Measured([*found[name].step_ms, step_ms], said)
    if dist.get_rank() == 0:
        print(json.dumps({name: asdict(measured) for name, measured in found.items()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
