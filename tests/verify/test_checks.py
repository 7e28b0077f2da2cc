"""The checks of a verification, on records made up for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer import VerifyReport
from trainer.config import TrainerConfig
from trainer.data.fetching import Request
from trainer.verify.outcome import check_losses, check_weights
from trainer.verify.record import Collective, Record, digest, digests
from trainer.verify.report import Check
from trainer.verify.resources import MIB, check_collectives, check_memory
from trainer.verify.runs import RunOnce, Runs
from trainer.verify.samples import check_samples

FACTS = {
    "is_stream": False,
    "is_sharded": False,
    "global_loss": False,
    "num_turns": 1,
    "order": "shuffle=true",
    "order_changes": True,
    "num_samples": 4,
    "gradient_bytes": 40,
}


def runs(one: Record, *many: Record, **options: Any) -> Runs:
    for record in (one, *many):
        record.facts = {**FACTS, **record.facts}
        record.phase = "end"
    return Runs(TrainerConfig(**options), RunOnce(1, [one]), RunOnce(len(many), list(many)))


def loads(rank: int, *epochs: list[tuple[int, list[int]]]) -> Record:
    """A rank that loads ``indices`` at ``position`` in each of its epochs."""
    requests = [[Request(i, position, 0, 4, True, 0) for position, i in e] for e in epochs]
    return Record(rank, epochs=requests)


ALONE = loads(0, [(0, [3, 1, 0, 2])], [(0, [0, 1, 2, 3])])


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (loads(1, [(2, [0, 2])], [(2, [2, 3])]), None),
        (loads(1, [(1, [1, 0, 2])], [(2, [2, 3])]), "positions 1 to 1 of epoch 0 are loaded twice"),
        (loads(1, [(3, [2])], [(2, [2, 3])]), "positions 2 to 2 of epoch 0 are left out"),
        (loads(1, [(2, [2, 0])], [(2, [2, 3])]), "shuffle=true depends on the world size"),
    ],
)
def test_every_sample_is_on_one_rank(second: Record, words: str | None) -> None:
    first = loads(0, [(0, [3, 1])], [(0, [0, 1])])
    samples = next(check_samples(runs(ALONE, first, second)))
    assert samples.passed == (words is None)
    assert (words or "4 in an epoch, each on one rank only (2 + 2)") in samples.found


def test_what_repeats_or_is_left_out_is_said() -> None:
    alone = loads(0, [(0, [3, 3, 0])], [(0, [0, 1, 2])])
    both = [loads(0, [(0, [3, 3])], [(0, [0, 1])]), loads(1, [(2, [0])], [(2, [2])])]
    assert "2 different ones" in next(check_samples(runs(alone, *both))).found
    alone, both[0] = (
        loads(0, [(0, [3, 1, 0])], [(0, [0, 1, 2])]),
        loads(0, [(0, [3, 1])], [(0, [0, 1])]),
    )
    assert "1 of the data set are left out" in next(check_samples(runs(alone, *both))).found


@pytest.mark.parametrize(
    ("losses", "passed", "words"),
    [
        ([3.0, 3.1, 2.0, 2.1, 1.0, 1.1], True, "from 3.05 to 1.05"),
        ([1.0, 1.4, 1.1, 1.2, 1.1, 1.5], True, "within its scatter"),
        ([1.0, 1.1, 2.0, 2.1, 3.0, 3.1], False, "it rises from 1.05 to 3.05"),
        ([3.0, 2.0], None, "not judged: only 2 steps"),
    ],
)
def test_whether_the_loss_falls(losses: list[float], passed: bool | None, words: str) -> None:
    records = [Record(rank, losses=list(losses)) for rank in (0, 0, 1)]
    falls = list(check_losses(runs(*records), failed_before=False))[-1]
    assert (falls.name, falls.passed) == ("loss falls", passed)
    assert words in falls.found


@pytest.mark.parametrize(
    ("apart", "options", "passed"),
    [
        (0.0009, {}, True),
        (0.002, {}, False),
        (0.09, {"precision": "bf16"}, True),
        (0.03, {"precision": "fp16"}, False),
        (1e-9, {"reproducible": True, "micro_batch_size": 1}, False),
        (0.0, {"reproducible": True, "micro_batch_size": 1}, True),
        (0.09, {"comm_hook": "bf16"}, True),
        (0.11, {"comm_hook": "bf16", "precision": "bf16"}, False),
    ],
)
def test_the_bound_of_the_curves(apart: float, options: dict[str, Any], passed: bool) -> None:
    one, many = Record(0, losses=[2.0, 1.0]), Record(0, losses=[2.0, 1.0 + apart])
    curves = next(check_losses(runs(one, many, Record(1), **options), failed_before=False))
    assert (curves.passed, bool(curves.advice)) == (passed, not passed)
    if not passed:
        hook = options.get("comm_hook")
        assert ("comm_hook=bf16 rounds the gradients" in curves.advice) == (hook is not None)


def test_minus_zero_is_another_result_where_equal_bits_are_promised() -> None:
    def checked(of_one: float, of_many: float) -> list[bool | None]:
        ends = [{"w": torch.tensor(value)} for value in (of_one, of_many)]
        records = [Record(0, losses=[float(e["w"])], final=digests(e)) for e in ends]
        found = runs(*records, reproducible=True, micro_batch_size=1)
        for run, end in zip(found.both, ends, strict=True):
            run.weights = {"initial": {"w": torch.tensor(1.0)}, "final": end}
        losses, weights = check_losses(found, False), list(check_weights(found, False))
        return [next(losses).passed, weights[-1].passed]

    assert checked(0.0, 0.0) == checked(-0.0, -0.0) == [True, True]
    assert checked(0.0, -0.0) == [False, False]


@pytest.mark.parametrize(
    ("second", "passed"), [(300 * MIB, True), (363 * MIB, True), (400 * MIB, False)]
)
def test_memory_is_about_equal(second: int, passed: bool) -> None:
    records = [Record(0, peak_bytes=300 * MIB) for _ in range(2)]
    (memory,) = check_memory(runs(*records, Record(1, peak_bytes=second)))
    assert memory.passed == passed
    assert passed or "rank 1 needs more" in memory.found


def test_collectives_beside_those_of_ddp_are_named() -> None:
    gradients = Collective("allreduce_", 40, False)
    barrier = Collective("allreduce_", 4, False)
    gathered = Collective("_allgather_base_", 80, True)

    def checked(*later: list[Collective]) -> Check:
        steps = [[gradients, Collective("broadcast_", 8, False)]] * 2 + list(later)
        record = Record(0, collectives=steps, facts={"collectives": [gradients]})
        return next(check_collectives(runs(Record(0), record, Record(1), Record(2), Record(3))))

    assert checked().passed is None
    usual = checked([gradients])
    assert usual.passed
    assert "1 all-reduce of 40 B" in usual.found
    assert "2(N-1)/N = 1.5 times as much: 60 B" in usual.found
    assert checked([gradients, gathered]).passed
    beside = checked([gradients, barrier])
    assert not beside.passed
    assert "hooks call 1 all-reduce of 4 B beside DDP" in beside.advice
    none = checked([])
    assert not none.passed
    assert "not seen: 1 all-reduce of 40 B" in none.advice


def test_the_report_is_read_from_the_top(tmp_path: Path) -> None:
    checks = [
        Check(1, "samples", True, "all there"),
        Check(3, "learning rate", False, "it differs " * 12, "use one"),
        Check(4, "loss curves", False, "apart"),
        Check(6, "memory", None, "not reached"),
    ]
    losses: dict[int, list[float | None]] = {1: [2.0, None, 1.5], 2: [2.0, None, 1.25]}
    report = VerifyReport("Task", 2, checks, losses, ["rank 1: boom"], tmp_path)
    report.write()
    lines = str(report).splitlines()
    assert lines[1].startswith("  pass  1 samples        all there")
    assert max(map(len, lines[:-1])) <= 100
    assert ["3", "1.5", "1.25"] in [line.split() for line in lines]
    assert "look first at 3 learning rate" in lines[-1]
    assert "rank 1: boom" in lines
    assert (tmp_path / "verify.png").stat().st_size > 1000


def test_a_digest_tells_contents_apart() -> None:
    x = torch.arange(3)
    same = [{"a": x, "b": [1, "two"]}, {"a": x.clone(), "b": [1, "two"]}]
    assert digest(same[0]) == digest(same[1])
    others: list[Any] = [
        {"a": x + 1, "b": [1, "two"]},
        {"a": x.float(), "b": [1, "two"]},
        {"a": x, "b": [1, "three"]},
        {"a": x.numpy(), "b": [[1], "two"]},
        {"c": x, "b": [1, "two"]},
        torch.eye(2).to_sparse(),
        np.zeros(2),
        None,
    ]
    assert len({digest(tree) for tree in [same[0], *others]}) == len(others) + 1
