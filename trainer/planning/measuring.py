"""What a task takes on this machine: compute, memory, saving, and a whole step of DDP."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trainer import distributed
from trainer.config import CheckpointConfig, TrainerConfig
from trainer.data.batches import IndexedBatches
from trainer.data.fetching import Request
from trainer.data.loading import MicroBatch, by_step
from trainer.data.module import DataModule
from trainer.data.plan import GlobalBatchPlan
from trainer.data.streams import empty_stream
from trainer.launching.janitor import Janitor
from trainer.messages import counted
from trainer.options import show
from trainer.planning.links import measure_links
from trainer.planning.network import Link
from trainer.planning.passes import Passes
from trainer.planning.profile import Profile
from trainer.planning.trial import unchanged
from trainer.precision import DTYPES
from trainer.run_dir import choose_run_dir
from trainer.session import Session
from trainer.state import TrainState
from trainer.task import TaskModule
from trainer.trainer import Training
from trainer.trees import rows, to_device


@dataclass(frozen=True)
class Measured:
    """What was measured, in plain values.

    Attributes:
        task: Its class.
        device: ``cpu`` or ``cuda``.
        world_size: The ranks that measured.
        local_world_size: How many of them were on the first machine.
        run_dir: The folder for the report.
        plan: How global batches are cut.
        global_batch_size: Samples per step.
        profile: Compute by size of micro-batch, of the slowest rank.
        too_small: Why there is no smaller micro-batch than the smallest one measured.
        parameters: Elements and type of each trained parameter, in order.
        order: The numbers of the parameters in the order in which their gradients become ready.
        weight_bytes: Parameters and buffers.
        gradient_bytes: Gradients.
        optimizer_bytes: The optimizer's state.
        links: ``within`` a machine and ``between`` machines, as far as ranks could tell.
        step_s: A step of DDP on these ranks; None for one rank alone.
        stall_s: How long training stands still for a checkpoint.
        write_s: How long it takes until the checkpoint is written.
        optimizer: Its class.
        param_groups: Its numbers (lr, betas, ...).
    """

    task: str
    device: str
    world_size: int
    local_world_size: int
    run_dir: Path
    plan: GlobalBatchPlan
    global_batch_size: int
    profile: Profile
    too_small: str
    parameters: list[tuple[int, torch.dtype]]
    order: list[int]
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    links: dict[str, Link]
    step_s: float | None
    stall_s: float
    write_s: float
    optimizer: str
    param_groups: list[dict[str, Any]]


def measure(task: TaskModule, data: DataModule, config: TrainerConfig, steps: int) -> Measured:
    """Measure a task on every rank that is here; it has its own weights afterwards.

    Args:
        task: What a fit would train.
        data: Where the samples come from.
        config: The options of that fit.
        steps: Timed passes of each kind.

    Raises:
        ValueError: If the step of this task cannot be simulated.
    """
    if task.global_loss:
        raise ValueError(
            f"{type(task).__name__} has global_loss=True: its forward exchanges outputs with the "
            "other ranks, which plan does not simulate"
        )
    if config.comm_hook not in (None, *DTYPES):
        raise ValueError(
            f"comm_hook={config.comm_hook}: plan does not simulate how many bytes that sends and "
            f"what it computes; give one of {', '.join(map(show, (None, *DTYPES)))}"
        )
    run_dir = choose_run_dir(config)
    kept = copy.deepcopy(task.state_dict())
    with unchanged(task), _scratch(run_dir) as folder:
        quiet = replace(
            config,
            resume=None,
            accept_changes=[],
            init_from=None,
            fast_dev_run=False,
            profile=None,
            bucket_cap_mb=None if config.bucket_cap_mb == "auto" else config.bucket_cap_mb,
            checkpoint=CheckpointConfig(asynchronous=config.checkpoint.asynchronous),
            run_dir=str(folder),
        )
        training = Training(
            Session(quiet, task, data), TrainState(), (), (), folder, {}, test_best=False
        )
        if len(training.turns.all) > 1 or task.optimizes_itself:
            raise ValueError(
                f"{type(task).__name__} has several optimizers, or optimizes itself, and plan "
                "simulates steps of one; plan a task with one of its optimizers"
            )
        with training.open():
            return _measure(training, steps, run_dir, kept)


def _measure(training: Training, steps: int, run_dir: Path, weights: Mapping[str, Any]) -> Measured:
    task, device = training.task, training.session.device
    task.on_epoch_start()
    task.train()
    passes = Passes(training, steps)
    found = first_step(training)
    micros = [micro._replace(batch=to_device(micro.batch, device)) for micro in found]
    profile, too_small = passes.profile(*whole_batch(training, micros))
    task.load_state_dict(weights)  # each rank has trained on its own
    step_s = passes.ddp_step_s(micros) if distributed.world_size() > 1 else None
    stall_s, write_s = _saving(training)
    optimizer = training.turns.all[0].optimizer
    moments = [v for state in optimizer.state.values() for v in state.values()]
    return Measured(
        task=type(task).__name__,
        device=device.type,
        world_size=distributed.world_size(),
        local_world_size=distributed.local_world_size(),
        run_dir=run_dir,
        plan=training.plan,
        global_batch_size=micros[0].global_size,
        profile=profile,
        too_small=too_small,
        parameters=[(p.numel(), p.dtype) for p in passes.parameters],
        order=passes.order,
        weight_bytes=_bytes([*task.parameters(), *task.buffers()]),
        gradient_bytes=_bytes(passes.parameters),
        optimizer_bytes=_bytes(moment for moment in moments if torch.is_tensor(moment)),
        links=measure_links(device),
        step_s=step_s,
        stall_s=stall_s,
        write_s=write_s,
        optimizer=type(optimizer).__name__,
        param_groups=[
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ],
    )


def first_step(training: Training) -> list[MicroBatch]:
    """Return this rank's micro-batches of the first step."""
    for _, micros in by_step(training.batches.epoch(0), 1, training.session.device):
        return list(micros)
    raise empty_stream(epoch=0)


def whole_batch(training: Training, micros: list[MicroBatch]) -> tuple[Callable[[int], Any], int]:
    """Return what cuts a batch of so many samples, and how many there can be.

    With indices as many as one rank alone would have in a micro-batch, in a stream this rank's.
    """
    batches, device, first = training.batches, training.session.device, micros[0]
    if not isinstance(batches, IndexedBatches):
        if not first.num_samples:
            raise ValueError(
                f"the first global batch of the stream has {counted(first.global_size, 'sample')}, "
                f"and there is none for rank {distributed.rank()} to measure; let the stream yield "
                "more, give a larger global_batch_size, or use fewer devices"
            )
        batch, count = first.batch, first.num_samples
        return lambda size: to_device(rows(batch, count, 0, size), device), count
    mine = [index for micro in micros for index in micro.indices]
    indices = [index for part in distributed.all_gather_object(mine) for index in part]

    global_size = first.global_size  # and not the batch, which would stay in memory

    def cut(size: int) -> Any:
        request = Request(indices[:size], 0, 0, global_size, True, 0)
        return to_device(batches.fetch(request).batch, device)

    return cut, min(len(indices), training.plan.micro(first.global_size, 1))


def _saving(training: Training) -> tuple[float, float]:
    """Return how long training stands still for a checkpoint, and until it is written."""
    for _ in range(2):  # the first one finds its memory
        training.state.step += 1
        start = time.perf_counter()
        training.save()
        stall_s = time.perf_counter() - start
        while distributed.rank() == 0 and not training.saver.completed():
            time.sleep(0.002)
        write_s = time.perf_counter() - start
    return stall_s, write_s


@contextmanager
def _scratch(run_dir: Path) -> Iterator[Path]:
    """Give a folder in the run's folder, for checkpoints that are written to be timed.

    It is removed even if rank 0 is killed.
    """
    with ExitStack() as stack:

        def make() -> str:
            janitor = Janitor("plan-", run_dir)
            stack.callback(janitor.clean)
            return janitor.folder

        yield Path(distributed.on_first_rank(make))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
