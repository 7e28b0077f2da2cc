"""What hangs or goes wrong in trainers when one rank does not do what the others do.

The kinds that other files test stand there: uneven data in ``test_training_data.py`` and
``test_numbers.py``, deaths in ``test_processes.py``, unequal models in ``strategies/test_ddp.py``.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import (
    Regression,
    TokenRegression,
    assert_equal_bits,
    assert_same,
    fit,
    fit_on,
    on_ranks,
    samples,
    train_by_hand,
    weighted_samples,
    weights,
)
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from trainer import Callback, DataModule, Logger, Trainer, WeightedLoss, distributed
from trainer.callbacks import EarlyStopping
from trainer.checkpoint import writer
from trainer.checkpoint.manifest import manifest_text, read_manifest

pytestmark = pytest.mark.timeout(60)

# Rank 0 alone --------------------------------------------------------------------------------

said: dict[str, str] = {}  # on each rank: what a collective in this place came to


def try_it(place: str) -> None:
    try:
        dist.barrier()
    except ValueError as error:
        said[place] = str(error)
    else:
        said[place] = "nothing"


class Curious(Callback):
    """Starts a collective wherever it can."""

    def on_fit_start(self, run: Any) -> None:
        try_it("Curious.on_fit_start")

    def on_log(self, run: Any, metrics: Any) -> None:
        try_it("Curious.on_log")

    def on_validation_end(self, run: Any, metrics: Any) -> None:
        try_it("Curious.on_validation_end")

    def on_save(self, run: Any, path: Any) -> None:
        try_it("Curious.on_save")

    def on_fit_end(self, run: Any) -> None:
        try_it("Curious.on_fit_end")

    def close(self) -> None:
        try_it("Curious.close")

    def state_dict(self) -> dict[str, Any]:
        try_it("Curious.state_dict")
        return {}


class Chatty(Logger):
    """Likewise."""

    def open(self, run: Any) -> None:
        try_it("Chatty.open")

    def log(self, run: Any, metrics: Any) -> None:
        try_it("Chatty.log")

    def close(self) -> None:
        try_it("Chatty.close")

    def state_dict(self) -> dict[str, Any]:
        try_it("Chatty.state_dict")
        return {}


class Asked(DataModule):
    """Likewise, in what one rank is asked for all."""

    def prepare(self) -> None:
        try_it("Asked.prepare")

    def train_dataset(self) -> Any:
        return samples(8)

    def val_dataset(self) -> Any:
        return samples(3)

    def train_indices(self, seed: int, epoch: int) -> range:
        try_it("Asked.train_indices")
        return range(8)


class Agreeing(Sampler[int]):
    """Talks to the other ranks at its start, as samplers for hand-written loops do."""

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        try_it("Agreeing.__iter__")
        return iter(range(8))

    def __len__(self) -> int:
        return 8


class Together(Regression):
    """Starts collectives where every rank is."""

    def on_validation_end(self, metrics: Any) -> None:
        total = torch.ones(())
        dist.all_reduce(total)
        assert total == dist.get_world_size()


def alone(folder: Path) -> dict[str, str]:
    said.clear()
    distributed.on_first_rank(lambda: try_it("on_first_rank"))
    quiet: dict[str, Any] = {"accelerator": "cpu", "run_dir": str(folder), "timeout_s": 30}
    Trainer(callbacks={"one": Curious()}, logger={"one": Chatty()}, max_epochs=1, **quiet).fit(
        Together(), Asked()
    )
    loader: Any = DataLoader(samples(8), sampler=Agreeing(), batch_size=4)
    fit(Regression(), folder / "sampler", train=loader, max_epochs=1)
    return dict(said)


# A rank that skips -----------------------------------------------------------------------------


class Unusual(TokenRegression):
    """On micro-batches that weigh nothing: no loss, or one that does not depend on the weights.

    Those that weigh 9 count with a constant loss, to which each parameter has a gradient of 0.
    """

    skips = True  # the reference, which sees whole batches, adds up what counts

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        weight = batch[2]
        constant = weight == 9
        errors = torch.where(constant, outputs * 0 + 1, (outputs - batch[1]) ** 2)
        if self.skips and weight.sum() == 0:
            return None if batch[1][0] > 0.5 else WeightedLoss(torch.zeros(()), 0)
        return WeightedLoss((errors * weight).sum(), weight.sum())


# Global batches of four: on two ranks, one of them skips or is constant in most.
SKIPS = [1, 2, 0, 0] + [0, 0, 3, 1] + [9, 9, 1, 1] + [2, 2, 9, 9] + [0, 0, 9, 9] + [0] * 4


def skipping(folder: Path) -> Any:
    task = Unusual()
    options: dict[str, Any] = {"global_batch_size": 4, "max_epochs": 2}
    result = fit(task, folder, train=weighted_samples(SKIPS), **options)
    return result.step, result.metrics["train/loss"], weights(task)


class DetachedOnRank1(Regression):
    def loss(self, outputs: Tensor, batch: Any) -> Any:
        found = super().loss(outputs, batch)
        return found.detach() if self.run.rank == 1 else found


# Best and last ---------------------------------------------------------------------------------

MEASURED = {2: 5.0, 4: 4.0, 6: 3.0, 8: 1.0, 10: 2.0, 12: 3.5, 14: 3.2}
"""The validation loss by step. Every third step is saved: of 6, 12 and the end 6 is the best, and
at the end three validations have passed since step 8."""
BEST, END = 6, 14


class DeathError(Exception):
    """As if all ranks were killed."""


class Scripted(Regression):
    def __init__(self, dies_at: int | None = None) -> None:
        super().__init__()
        self.dies_at = dies_at

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        if self.run.split == "train":
            return super().loss(outputs, batch)
        return outputs.sum() * 0 + MEASURED[self.run.step]

    def after_optimizer_step(self) -> None:
        if self.run.step == self.dies_at:
            raise DeathError


def stopped(folder: Path) -> list[Any]:
    """Train with early stopping, undisturbed and resumed from several steps."""
    saving = {
        "every_n_steps": 3,
        "every_n_epochs": None,
        "monitor": "val/loss",
        "asynchronous": False,
    }

    def train(dies_at: int | None, where: Path, resume: str | None = None) -> Any:
        return fit(
            Scripted(dies_at),
            where,
            train=samples(8),
            val=samples(3),
            global_batch_size=4,
            max_steps=99,
            validate_every_n_epochs=None,
            validate_every_n_steps=2,
            checkpoint=saving,
            callbacks=[EarlyStopping("val/loss", patience=3)],
            resume=resume,
        )

    results = [train(None, folder / "undisturbed")]
    for dies_at in (7, 8, 10, 13):
        where = folder / str(dies_at)
        with pytest.raises(DeathError):
            train(dies_at, where)
        dist.barrier()
        results.append(train(None, where, resume="auto"))
    return [(result.step, getattr(result.best_checkpoint, "name", None)) for result in results]


# Compressed gradients --------------------------------------------------------------------------


def compressed(folder: Path) -> dict[str, Any]:
    found = {}
    options: dict[str, Any] = {"train": samples(12), "global_batch_size": 4, "comm_hook": "bf16"}
    for cut in (None, 4):
        if cut is not None:
            fit(Regression(), folder / str(cut), max_steps=cut, **options)
            dist.barrier()
        task = Regression()
        resume = "auto" if cut else None
        fit(task, folder / str(cut), max_epochs=2, resume=resume, **options)
        found[str(cut)] = weights(task)
    return found


JOBS = (alone, skipping, stopped, compressed)


def all_jobs(folder: Path) -> dict[str, Any]:
    return {job.__name__: job(folder / job.__name__) for job in JOBS}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, all_jobs, tmp_path_factory.mktemp("ranks"))


def test_no_code_of_one_rank_starts_a_collective(ranks: list[dict[str, Any]]) -> None:
    methods = {
        Curious: "on_fit_start on_log on_validation_end on_save on_fit_end close state_dict",
        Chatty: "open log close state_dict",
        Asked: "prepare train_indices",
        Agreeing: "__iter__",
    }
    places = ["on_first_rank"]
    places += [
        f"{kind.__name__}.{name}" for kind, names in methods.items() for name in names.split()
    ]
    found = ranks[0]["alone"]
    assert sorted(found) == sorted(places)
    for place, message in found.items():
        assert message.startswith("barrier needs every rank, and only rank 0 runs "), place
        assert "\n    dist.barrier()\n" in message
        if place.startswith(("Curious", "Chatty", "Asked")):
            assert f" ({place}): " in message
    assert ranks[1]["alone"] == {}


class Impatient(Callback):
    def on_log(self, run: Any, metrics: Any) -> None:
        total = torch.tensor(metrics["train/loss"])
        dist.all_reduce(total)


def test_a_collective_in_a_callback_ends_the_run_at_once(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="all_reduce needs every rank") as error:
        fit_on(2, Regression(), tmp_path, train=samples(8), max_epochs=1, callbacks=[Impatient()])
    assert time.monotonic() - start < 20  # the others would have waited 30 s and more
    message = str(error.value)
    assert "only rank 0 runs a callback (Impatient.on_log)" in message
    assert "\n    dist.all_reduce(total)\n" in message


def test_a_skipped_or_constant_loss_of_one_rank_counts_by_its_weight(
    ranks: list[dict[str, Any]],
) -> None:
    alone = Unusual()
    alone.skips = False
    loss = train_by_hand(alone, weighted_samples(SKIPS), global_batch_size=4, epochs=2)
    for rank in ranks:
        step, found, after = rank["skipping"]
        assert step == 12
        assert found == pytest.approx(loss, rel=1e-6)  # the true weight travels in float32
        assert_same(after, alone, 1e-6)


def test_a_loss_without_gradient_on_one_rank_is_an_error_and_no_hang(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs no gradient, so there is nothing to train"):
        fit_on(2, DetachedOnRank1(), tmp_path, train=samples(8), global_batch_size=4, max_epochs=1)


def test_best_and_patience_are_those_of_an_undisturbed_run(ranks: list[dict[str, Any]]) -> None:
    best = f"step-{BEST:08d}"
    assert ranks[0]["stopped"] == [(END, best)] * 5
    assert [step for step, _ in ranks[1]["stopped"]] == [END] * 5


def test_a_comm_hook_leaves_nothing_to_keep(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert_equal_bits(rank["compressed"]["4"], rank["compressed"]["None"])
        assert_equal_bits(rank["compressed"]["4"], ranks[0]["compressed"]["4"])


# Checkpoints ---------------------------------------------------------------------------------


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def replace_state(checkpoint: Path, state: Any) -> None:
    """Put other state into a checkpoint, with a manifest that fits."""
    torch.save(state, checkpoint / "state.pt")
    content = (checkpoint / "state.pt").read_bytes()
    facts = read_manifest(checkpoint)
    digest = hashlib.sha256(content).hexdigest()
    facts["files"]["state.pt"] = {"size": len(content), "sha256": digest}
    (checkpoint / "manifest.json").write_text(manifest_text(facts))


def test_two_ranks_pass_over_damage_and_execute_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {
        "train": samples(32),
        "global_batch_size": 4,
        "checkpoint": {"every_n_steps": 1},
    }
    whole, resumed = Regression(), Regression()
    fit_on(2, whole, tmp_path / "run", max_steps=4, **options)
    checkpoints = tmp_path / "run/checkpoints"
    weights_file = checkpoints / "step-00000004/model.safetensors"
    content = bytearray(weights_file.read_bytes())
    content[len(content) // 2] ^= 1
    weights_file.write_bytes(content)
    result = fit_on(2, resumed, tmp_path / "run", max_steps=4, resume="auto", **options)
    told = capfd.readouterr()
    assert "model.safetensors" in told.err
    assert f"resuming from {checkpoints}/step-00000003" in told.out
    assert result.step == 4
    assert_equal_bits(resumed, whole)

    owned = tmp_path / "owned"
    replace_state(checkpoints / "step-00000004", {"optimizer": Hostile(owned)})
    with pytest.raises(ValueError, match=r"state\.pt cannot be read as tensors and plain values"):
        fit_on(2, Regression(), tmp_path / "run", max_steps=5, resume="auto", **options)
    assert not owned.exists()


def test_a_writer_that_fails_stops_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, write: Any) -> Any:
        if path.parent.name.endswith("step-00000002"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_file(path, write)

    write_file = writer.write_file
    monkeypatch.setattr(writer, "write_file", full)
    with pytest.raises(OSError, match=r"checkpoint of step 2 .* No space left on device"):
        fit_on(
            2,
            Regression(),
            tmp_path,
            train=samples(400),
            global_batch_size=4,
            max_steps=100,
            checkpoint={"every_n_steps": 1},
        )
    assert (tmp_path / "checkpoints/step-00000001/manifest.json").exists()
    assert not (tmp_path / "checkpoints/step-00000100").exists()
