"""What compressed gradients gain on a slow network, and what they cost in loss.

    python -m benchmarks.compression              # both tables; ten minutes, as root
    python -m benchmarks.compression --markdown   # the same for a Markdown page
    python -m benchmarks.compression --only loss  # needs no root

The recipes' nets, and a chain of linear layers that takes its time beside the processor
(`benchmarks/resting.py`), are trained by the Trainer on two hosts whose network is as slow as is
said. The hooks take turns in the same ranks: in every round each trains a fresh net for some steps,
and the first of these do not count. A figure is the median over the rounds of the median step; a
speed-up is formed within a round. Then each trains for as many samples as the others, from the same
weights, and what counts is the loss, over the last tenth of the steps and on the data held out: the
mean over the seeds, and the range.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from benchmarks.common import at_least, environment, scratch, table
from benchmarks.networking.hosts import Network
from benchmarks.resting import Chain
from recipes.language_model import ByteTransformer, PythonTopics
from recipes.mnist import MnistData, MnistTask
from trainer import DataModule, TaskModule, Trainer, distributed
from trainer.comm_hooks.low_rank import as_matrix, is_compressed
from trainer.config import TrainerConfig
from trainer.launching.launcher import launch

MBIT = (1000, 200, 50)
WARM_UP, STEPS = 4, 10
PLAIN = "none"


@dataclass(frozen=True)
class Net:
    """A recipe.

    Attributes:
        task: Makes its net.
        data: Makes its data.
        batch: Samples per step.
        steps: Of the run whose loss is compared; 0 for a net that learns nothing.
        options: Further ones.
    """

    task: Callable[[], TaskModule]
    data: Callable[[], DataModule]
    batch: int
    steps: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


class Noise(DataModule):
    """Nothing to learn, for a net that only keeps the network busy."""

    def train_dataset(self) -> TensorDataset:
        """Return samples for the chain of layers."""
        return TensorDataset(torch.randn(2048, 32), torch.randint(10, (2048,)))


CLIPPED = {"gradient_clip_norm": 1.0}
NETS = {
    "8 layers of 512": Net(partial(Chain, 8, 512, compute_ms=30.0), Noise, 64),
    "MNIST net": Net(MnistTask, MnistData, 128, 430),
    "language model": Net(ByteTransformer, PythonTopics, 16, 400, CLIPPED),
}


def hooks(start: int) -> dict[str, dict[str, Any]]:
    """Return the options of each contestant; PowerSGD begins at step ``start``."""
    found: dict[str, dict[str, Any]] = {PLAIN: {}, "fp16": {}, "bf16": {}}
    found |= {f"powersgd, rank {rank}": {"powersgd_rank": rank} for rank in (1, 2, 4)}
    found |= {"powersgd+bf16, rank 2": {"powersgd_rank": 2}}
    for name, options in found.items():
        hook = name.partition(",")[0]
        options["comm_hook"] = None if name == PLAIN else hook
        if hook.startswith("powersgd"):
            options["powersgd_start_step"] = start
    return found


def compression(net: Net, options: Mapping[str, Any]) -> float:
    """Return how many times fewer bytes are sent."""
    hook, rank = options["comm_hook"] or "", options.get("powersgd_rank")
    sent = whole = 0
    for parameter in net.task().parameters():
        whole += parameter.numel()
        if rank is not None and is_compressed(parameter, rank):
            sent += rank * sum(as_matrix(parameter.detach()).shape)
        else:
            sent += parameter.numel()
    return whole / sent * (2 if hook.endswith("16") else 1)


def train(net: Net, data: DataModule, steps: int, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    """Train on the ranks that are there; return what `fit` returns, and when each step began."""
    begun: list[float] = []
    torch.manual_seed(seed)
    task = net.task()
    task.register_forward_pre_hook(lambda *_: begun.append(time.perf_counter()))
    with scratch() as folder, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        result = Trainer(
            accelerator="cpu",
            devices=distributed.world_size(),
            global_batch_size=net.batch,
            max_steps=steps,
            num_threads=1,
            seed=seed,
            callbacks=False,
            run_dir=distributed.broadcast_object(str(folder)),
            **net.options,
            **options,
        ).fit(task, data)
        distributed.barrier()
    return result, begun


def measure_steps(names: Sequence[str], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the milliseconds of a step on the slowest rank: per net, hook and round."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for name in names:
        net = NETS[name]
        data = net.data()
        options = {"validate_every_n_epochs": None, "logger": False}
        for _, (hook, own) in itertools.product(range(rounds), hooks(0).items()):
            _, begun = train(net, data, WARM_UP + STEPS + 1, **own, **options)
            taken = torch.tensor(begun, dtype=torch.float64).diff()[-STEPS:]
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            found[name].setdefault(hook, []).append(median(taken.tolist()) * 1000)
    return found


def speed(names: Sequence[str], rounds: int, markdown: bool) -> None:
    """Print the time of a step at each bandwidth."""
    command = [sys.executable, "-m", "benchmarks.compression", "--rank"]
    command += ["--rounds", str(rounds), "--nets", *names]
    found: dict[int, Any] = {}
    with Network(2, mbit=MBIT[0]) as network:
        for mbit in MBIT:
            network.limit(mbit)
            found[mbit] = json.loads(network.run(command, timeout_s=1500)[0].splitlines()[-1])
    for name in names:
        rows = []
        for hook, options in hooks(0).items():
            row = [hook, f"{compression(NETS[name], options):.0f}"]
            for mbit in MBIT:
                plain, own = (found[mbit][name][each] for each in (PLAIN, hook))
                ratio = median(a / b for a, b in zip(plain, own, strict=True))
                row.append(f"{median(own):.1f} ({ratio:.2f})")
            rows.append(row)
        header = [f"{name}, 2 hosts: comm_hook", "fewer bytes"]
        header += [f"{mbit} Mbit/s: ms per step (speed-up)" for mbit in MBIT]
        print(table(header, rows, markdown), end="\n\n", flush=True)


def measure_loss(net: Net, hook: dict[str, Any], seeds: int) -> tuple[list[float], list[float]]:
    """Return the losses in training and on held-out data, per seed; called on every rank."""
    train_losses, val_losses = [], []
    data = net.data()
    for seed in range(seeds):
        options = {"log_every_n_steps": net.steps // 10, "validate_every_n_steps": net.steps}
        result, _ = train(net, data, net.steps, seed, logger=False, **hook, **options)
        if result is not None:
            train_losses.append(result.metrics["train/loss"])
            val_losses.append(result.metrics["val/loss"])
    return train_losses, val_losses


def loss(names: Sequence[str], seeds: int, markdown: bool) -> None:
    """Print the loss after as many samples with every hook."""
    config = TrainerConfig(devices=2, accelerator="cpu", num_threads=1)
    for name in names:
        net, rows = NETS[name], []
        if not net.steps:
            continue
        late, delayed = net.steps // 10, "powersgd, rank 2"
        contestants = {**hooks(0), f"{delayed}, from step {late}": hooks(late)[delayed]}
        for hook, options in contestants.items():
            found = launch(measure_loss, net, options, seeds, config=config)
            assert found is not None
            cells = [f"{fmean(v):.4f} ({min(v):.4f} to {max(v):.4f})" for v in found]
            rows.append([hook, *cells])
        header = [f"{name}, 2 ranks, {net.steps} steps of {net.batch}: comm_hook"]
        header += ["train loss, last tenth", "validation loss"]
        print(table(header, rows, markdown), end="\n\n", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--seeds", type=at_least(1), default=2)
    parser.add_argument("--only", choices=("speed", "loss"))
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--rank", action="store_true", help="for what this program starts itself")
    args = parser.parse_args()
    if args.rank:
        dist.init_process_group("gloo")
        found = measure_steps(args.nets, args.rounds)
        if dist.get_rank() == 0:
            print(json.dumps(found))
        dist.destroy_process_group()
        return
    print(environment(), end="\n\n", flush=True)
    if args.only != "loss":
        speed(args.nets, args.rounds, args.markdown)
    if args.only != "speed":
        loss(args.nets, args.seeds, args.markdown)


if __name__ == "__main__":
    main()
