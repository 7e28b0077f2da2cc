"""Hosts in network namespaces: what runs in them, how fast, and what is left of them."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import in_hosts
import pytest
from support import on_ranks

from benchmarks import network as program
from benchmarks.networking import hosts, steps
from benchmarks.networking.hosts import Network, RanksFailed, Unavailable
from benchmarks.networking.steps import Measured

pytestmark = pytest.mark.timeout(120)

TESTS = Path(__file__).parent.parent
MBIT = 100.0


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    try:
        with Network(2, MBIT) as made:
            yield made
    except Unavailable as error:
        pytest.skip(str(error))


def test_two_hosts_train_like_one_and_no_faster_than_the_limit(
    network: Network, tmp_path: Path
) -> None:
    command = [sys.executable, in_hosts.__file__, str(tmp_path / "two")]
    outputs = network.run(command, timeout_s=50, env={"PYTHONPATH": f"{TESTS}:{hosts.ROOT}"})
    assert "launcher: 2 processes, started by torchrun" in outputs[0]
    found = json.loads(outputs[0].splitlines()[-1])
    assert found["weights"] == on_ranks(2, in_hosts.train, tmp_path / "one")[0]
    at_once = 2 * 256 * 1024  # what both ends of the cable let through, having been idle
    assert found["seconds"] > (in_hosts.NUM_BYTES - at_once) * 8 / 1e6 / MBIT


def names() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in listed.stdout.splitlines()]


def test_ranks_are_told_who_they_are(network: Network) -> None:
    show = ["sh", "-c", "echo $RANK $LOCAL_RANK $GROUP_RANK $WORLD_SIZE $MASTER_ADDR $X"]
    outputs = network.run(show, ranks_per_host=2, env={"X": "x"}, timeout_s=20)
    told = [line.split() for line in outputs]
    assert told == [[str(n), str(n % 2), str(n // 2), "4", "10.0.0.1", "x"] for n in range(4)]


def test_the_first_rank_that_fails_is_named_and_the_others_end(network: Network) -> None:
    failing = "echo out; echo err >&2; test $RANK = 0 || exit 3; sleep 100"
    with pytest.raises(RanksFailed, match=r"rank 1 ended with code 3\nout\nerr"):
        network.run(["sh", "-c", failing], timeout_s=20)
    with pytest.raises(RanksFailed, match=r"not done after 0\.3 s"):
        network.run(["sh", "-c", "sleep 100 & sleep 100"], timeout_s=0.3)
    for name in names():
        if name.startswith(network._name):
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, check=True)
            assert not pids.stdout


HOLDS = """
import sys, time
from benchmarks.networking.hosts import Network
with Network(2) as network:
    print(network._name, flush=True)
    network.run(["sleep", "100"], timeout_s=100)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left(network: Network, number: signal.Signals) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert holder.stdout is not None
    name = holder.stdout.readline().strip()
    assert len([n for n in names() if n.startswith(f"{name}-")]) == 3
    holder.send_signal(number)
    assert holder.wait(20) != 0
    holder.stdout.close()
    if number == signal.SIGKILL:  # the next one cleans up
        with Network(2):
            pass
    assert not [n for n in names() if n.startswith(f"{name}-")]
    assert [n for n in names() if n.startswith(network._name)], "another's was removed"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda patch: patch.setattr(os, "geteuid", lambda: 1000), "need root"),
        (lambda patch: patch.setenv("PATH", ""), r"need ip and tc \(package iproute2\)"),
        (lambda patch: patch.setattr(sys, "platform", "darwin"), "on Linux only; this is darwin"),
    ],
)
def test_the_reason_why_there_can_be_none(
    change: Callable[[pytest.MonkeyPatch], None], reason: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        with pytest.raises(Unavailable, match=reason), Network(2):
            pass


def test_one_host_is_no_network() -> None:
    with pytest.raises(ValueError, match="a network of 1 hosts; it can have 2 to 64"):
        Network(1)


class NoNetwork:
    """Stands for one in which the times are known."""

    def __init__(self, hosts: int) -> None:
        self.mbit: float | None = None

    def __enter__(self) -> NoNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def limit(self, mbit: float | None) -> None:
        self.mbit = mbit


def test_the_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(network: Any, work: Any, contestants: Any, **_: Any) -> dict[str, Measured]:
        said = "bucket_cap_mb=auto: 2 it is; ..."
        times = {"hand": [10.0, 20.0, 30.0], "trainer": [9.0, 20.0, 60.0]}
        found = {}
        for name, who in contestants.items():
            is_best = who.options.get("bucket_cap_mb") == 2
            found[name] = Measured([t - is_best for t in times[who.by]], said)
        return found

    monkeypatch.setattr(program, "Network", NoNetwork)
    monkeypatch.setattr(program, "measure", measure)
    for mode, last in (
        ("steps", "2 none 20 20 1.000"),
        ("buckets", "2 none 20 20 20 20 19 20 20 20 20 20 2 2 20 1.053"),
    ):
        monkeypatch.setattr(sys, "argv", ["network", mode, "--mbit", "5", "none", "--markdown"])
        program.main()
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 4
        assert lines[-1].replace("|", " ").split() == last.split()


def contestants() -> list[tuple[float, str]]:
    work = steps.Workload(depth=2, width=8, batch=4, compute_ms=12, steps=3, rounds=1)
    both = steps.Contestant("hand", {"bucket_cap_mb": 1}), steps.Contestant("trainer")
    return [steps.train(work, who) for who in both]


def test_both_take_the_time_of_the_computation() -> None:
    for step_ms, said in itertools.chain(*on_ranks(2, contestants)):
        assert step_ms > 12
        assert not said
