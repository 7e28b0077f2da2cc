"""A run that is stopped at any step and resumed is the run that was never stopped."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import Regression, assert_equal_bits, fit, on_ranks, samples, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from trainer import OptimizerSetup, distributed
from trainer.callbacks import EarlyStopping
from trainer.checkpoint.manifest import step_folders, step_of
from trainer.checkpoint.weights import load_weights
from trainer.checkpoint.writer import read_state
from trainer.loggers import JsonlLogger


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def one_cycle(params: Iterable[nn.Parameter]) -> OptimizerSetup:
    optimizer = torch.optim.AdamW(params, lr=0.02)
    return OptimizerSetup(
        optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)
    )


def by_plateau(params: Iterable[nn.Parameter]) -> OptimizerSetup:
    optimizer = torch.optim.SGD(params, lr=0.3, momentum=0.9)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    return OptimizerSetup(optimizer, plateau, monitor="val/loss")


class Noisy(Regression):
    """Has everything that a resumed run could get wrong."""

    def __init__(self, optimizer: Callable[..., Any], dtype: torch.dtype = torch.float64) -> None:
        super().__init__(optimizer)
        self.net.insert(2, nn.Dropout(0.3))
        self.to(dtype)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.seen: Tensor

    def forward(self, batch: Any) -> Tensor:
        if self.training:
            self.seen += 1
        return super().forward(batch)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        loss: Tensor = super().loss(outputs.float(), batch)
        self.log("noise", outputs.abs().mean())
        return loss

    def build_metrics(self, split: str) -> Mapping[str, Any]:
        from torchmetrics import MeanAbsoluteError

        return {"error": MeanAbsoluteError()}

    def update_metrics(self, metrics: Any, outputs: Tensor, batch: Any) -> None:
        metrics["error"].update(outputs.float(), batch[1].float())

    def on_epoch_start(self) -> None:
        if self.run.epoch == 1:  # for good: not told again in the epochs that follow
            self.net[0].bias.requires_grad_(False)


EVERY_STEP = {"every_n_steps": 1, "keep": None}
OPTIONS: dict[str, Any] = {
    "train": samples(18, torch.float32),
    "val": samples(5, torch.float32),
    "shuffle": True,
    "global_batch_size": 4,  # 5 steps in an epoch, the last one with 2 samples
    "micro_batch_size": 1,
    "log_every_n_steps": 3,
    "validate_every_n_steps": 2,
    "max_steps": 13,
    "checkpoint": EVERY_STEP,
    "logger": [JsonlLogger()],
}
KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "fp32": (one_cycle, {}),
    "fp16": (by_plateau, {"precision": "fp16"}),
}


def train(kind: str, run_dir: Path, **options: Any) -> Any:
    optimizer, own = KINDS[kind]
    stopping = EarlyStopping("val/loss", patience=3)
    chosen = {"callbacks": [stopping], **OPTIONS, **own, **options}
    return fit(Noisy(optimizer, torch.float32), run_dir, **chosen)


def everything(run_dir: Path) -> dict[str, Any]:
    """What a run has left behind, without what the clock on the wall says."""
    folder = run_dir / "checkpoints"
    found: dict[str, Any] = {
        "best": (folder / "best").resolve().name,
        "lines": [
            {n: v for n, v in json.loads(line).items() if n != "time_s" and "perf/" not in n}
            for line in (run_dir / "metrics.jsonl").read_text().splitlines()
        ],
    }
    for path in step_folders(folder):
        task = Noisy(one_cycle, torch.float32)
        load_weights(task, path)
        state = read_state(path)
        state["train_state"].pop("time_s")
        found[path.name] = {"weights": task.state_dict(), **state}
    return found


def assert_same_state(found: Any, expected: Any, tolerance: float = 0, where: str = "") -> None:
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_same_state(found[name], value, tolerance, f"{where}/{name}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert_same_state(mine, theirs, tolerance, f"{where}/{number}")
    elif isinstance(expected, float | Tensor):
        torch.testing.assert_close(
            found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{where}: {text}"
        )
    else:
        assert found == expected, where


def killed_after(step: int, run_dir: Path, target: Path) -> Path:
    """Leave in ``target`` what a run has on disk that is killed after ``step``, and later lines."""
    if distributed.rank() == 0:
        (target / "checkpoints").mkdir(parents=True)
        shutil.copy(run_dir / "metrics.jsonl", target)
        for path in step_folders(run_dir / "checkpoints"):
            if step_of(path) <= step:
                shutil.copytree(path, target / "checkpoints" / path.name)
    distributed.barrier()
    return target


def resume_everywhere(tmp_path: Path) -> dict[str, Any]:
    found = {}
    for kind in KINDS:
        through = tmp_path / kind
        result = train(kind, through)
        metrics = {n: v for n, v in result.metrics.items() if "perf/" not in n}
        found[kind] = result.step, result.stop_reason
        expected = everything(through) if distributed.rank() == 0 else None
        for step in range(1, result.step + 1):
            folder = killed_after(step, through, tmp_path / f"{kind}-{step}")
            again = train(kind, folder, resume="auto")
            assert (again.step, again.epoch, again.samples, again.stop_reason) == (
                (result.step, result.epoch, result.samples, result.stop_reason)
            )
            if distributed.rank() == 0:
                assert {n: v for n, v in again.metrics.items() if "perf/" not in n} == metrics
                assert again.best_checkpoint.name == result.best_checkpoint.name
                assert_same_state(everything(folder), expected, where=folder.name)
            distributed.barrier()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_resuming_at_any_step_gives_the_same_bits(world_size: int, tmp_path: Path) -> None:
    for found in on_ranks(world_size, resume_everywhere, tmp_path):
        assert found["fp16"] == (13, "max_steps=13 reached")
        assert "has not improved" in found["fp32"][1], "early stopping is to be part of this"


def resume_from_other_ranks(source: Path, step: int, target: Path) -> None:
    for kind in KINDS:
        train(kind, killed_after(step, source / kind, target / kind), resume="auto")


def test_another_number_of_ranks_goes_on_within_rounding(tmp_path: Path) -> None:
    on_ranks(3, lambda: [train(kind, tmp_path / "through" / kind).step for kind in KINDS])
    on_ranks(2, resume_from_other_ranks, tmp_path / "through", 4, tmp_path / "two")
    resume_from_other_ranks(tmp_path / "two", 7, tmp_path / "one")
    for kind in KINDS:
        through, one = (everything(tmp_path / name / kind) for name in ("through", "one"))
        assert through.keys() == one.keys()
        assert through.pop("best") == one.pop("best")
        assert_same_state(one.pop("lines"), through.pop("lines"), 1e-4, kind)
        for name, state in through.items():
            for part in ("weights", "optimizer", "schedule", "scaler", "train_state", "run"):
                found = one[name][part]
                for of_one_rank in (found, state[part]):
                    of_one_rank.pop("seen", None)  # counts the micro-batches of rank 0
                assert_same_state(found, state[part], 1e-4, f"{kind}/{name}/{part}")


class Stream(IterableDataset[Any]):
    """Yields the samples in an order that changes with the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(self.epoch)
        data = samples(18, torch.float32)
        for number in torch.randperm(18, generator=generator):
            yield data[int(number)]


class StatefulStream(Stream):
    """Goes on where it was without a look at what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.position = self.start = 0

    def __iter__(self) -> Any:
        start, self.start = self.start, 0
        for self.position, item in enumerate(super().__iter__(), 1):
            if self.position > start:
                yield item

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"]


def own_sampler() -> DataLoader[Any]:
    data = samples(18, torch.float32)
    own = RandomSampler(data, generator=torch.Generator().manual_seed(3))
    return DataLoader(data, batch_size=4, sampler=own)


class Shuffled:
    """Draws each epoch's order from generators that go on: of Python's and of NumPy's."""

    def __init__(self) -> None:
        self.python, self.numpy = random.Random(1), np.random.default_rng(2)

    def __iter__(self) -> Any:
        order = self.numpy.permutation(18)
        self.python.shuffle(order)
        return iter(order)


def shuffled_sampler() -> DataLoader[Any]:
    return DataLoader(samples(18, torch.float32), batch_size=4, sampler=Shuffled())


STREAMS: dict[str, Callable[[], Any]] = {
    "stream": Stream,
    "stateful": StatefulStream,
    "sampler": own_sampler,
    "shuffled sampler": shuffled_sampler,
}


def resume_streams(tmp_path: Path) -> None:
    for name, make in STREAMS.items():
        options = {"max_steps": 11, "global_batch_size": None if "sampler" in name else 4}
        train("fp32", tmp_path / name, train=make(), **options)
        for step in (2, 5, 8):  # in the first epoch, between two, in the second one
            folder = killed_after(step, tmp_path / name, tmp_path / f"{name}-{step}")
            train("fp32", folder, train=make(), resume="auto", **options)
            if distributed.rank() == 0:
                found, through = everything(folder), everything(tmp_path / name)
                assert_same_state(found, through, where=folder.name)


def test_streams_and_samplers_go_on_where_they_were(tmp_path: Path) -> None:
    on_ranks(2, resume_streams, tmp_path)


def refused(run_dir: Path) -> tuple[list[str], Any]:
    options: dict[str, Any] = {"train": samples(8), "max_steps": 2}
    options |= {"checkpoint": {"every_n_steps": 1, "asynchronous": False}}
    fit(Regression(), run_dir, **options)
    wide = Regression()
    wide.net[0], wide.net[2] = nn.Linear(3, 6).double(), nn.Linear(6, 1).double()
    step = "checkpoints/step-00000001"
    if distributed.rank() == 0:
        with (run_dir / step / "model.safetensors").open("r+b") as file:
            file.write(b"damage")
    distributed.barrier()
    messages = []
    for task, change in (
        (Regression(), {"resume": "nowhere"}),
        (Regression(), {"resume": step}),
        (Regression(), {"resume": "auto", "seed": 5}),
        (Regression(), {"init_from": "nowhere"}),
        (wide, {"init_from": "last"}),
    ):
        with pytest.raises(ValueError, match=r"\w") as caught:
            fit(task, run_dir, **{**options, **change})
        messages.append(str(caught.value))
    fit(wide, run_dir, **{**options, "max_steps": 3, "resume": "auto", "accept_changes": ["model"]})
    return messages, weights(wide)


def test_every_rank_learns_why_a_run_cannot_start(tmp_path: Path) -> None:
    (first, weights_0), (second, weights_1) = on_ranks(2, refused, tmp_path)
    assert first == second
    assert_equal_bits(weights_0, weights_1)  # after a change that was accepted
    for message, words in zip(
        first,
        (
            "nowhere is no checkpoint",
            "model.safetensors is damaged",
            "data: seed 0 -> 5",
            "nowhere is no checkpoint",
            "of another shape: net.0.bias (5,) instead of (6,), net.0.weight",
        ),
        strict=True,
    ):
        assert words in message


def test_a_run_that_cannot_start_ends_with_one_message(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="nowhere is no checkpoint"):
        fit(Regression(), tmp_path, devices=2, train=samples(8), max_steps=2, resume="nowhere")
    out, err = capfd.readouterr()
    assert (out + err).count("is no checkpoint") <= 1
