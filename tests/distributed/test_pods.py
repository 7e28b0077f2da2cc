"""Machines that start their own ranks and find the others, as pods of a PyTorchJob do."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running import SCRIPT, Running, fit_here, logged

pytestmark = pytest.mark.timeout(200)

Start = Callable[..., Running]


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Start]:
    """Starts one of two pods, with what the training operator tells it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    started = []

    def start(rank: int, *options: str, **env: str) -> Running:
        told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        told |= {"RANK": str(rank), "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
        command = [sys.executable, str(SCRIPT), str(tmp_path / "run"), *options]
        loopback = {"GLOO_SOCKET_IFNAME": "lo"}
        started.append(Running.program(*command, cwd=tmp_path, **{**loopback, **told, **env}))
        return started[-1]

    yield start
    for running in started:
        running.kill()


@pytest.mark.opt_in
def test_pods_train_as_one_process_does(pod: Start, tmp_path: Path) -> None:
    pods = [pod(rank, "devices=1") for rank in range(2)]
    weights, events = fit_here(tmp_path)
    assert [each.end() for each in pods] == [0, 0], pods[0].said + pods[1].said
    assert pods[0].lines[-1] == f"ENDED {weights} 24\n"
    assert pods[1].lines[-1] == f"ENDED {weights} None\n"
    for rank, each in enumerate(pods):
        start = f"launcher: 1 process on machine {rank} of 2 (a pod in which RANK is set), started"
        assert each.lines[0].startswith(start)
    assert logged(tmp_path / "run") == events


@pytest.mark.opt_in
def test_pods_have_several_ranks_each(pod: Start, tmp_path: Path) -> None:
    pods = [pod(0, "devices=2"), pod(1, WORLD_SIZE="4", PET_NNODES="2", PET_NPROC_PER_NODE="2")]
    weights, _ = fit_here(tmp_path)
    assert [each.end() for each in pods] == [0, 0], pods[0].said + pods[1].said
    assert pods[0].lines[-1] == f"ENDED {weights} 24\n"
    assert "STEP 24 of 4\n" in pods[0].lines


@pytest.mark.opt_in
@pytest.mark.parametrize("told", [0, 1])
def test_a_signal_to_one_pod_saves_and_stops_all(told: int, pod: Start, tmp_path: Path) -> None:
    (tmp_path / "pace").write_text("0.2")
    pods = [pod(rank) for rank in range(2)]
    pods[0].wait_for("STEP 5 of 2")
    pods[told].process.send_signal(signal.SIGTERM)
    assert [each.end() for each in pods] == [143, 143], pods[0].said + pods[1].said
    assert "stopped by SIGTERM at step" in pods[0].said
    assert "stopped by" not in pods[1].said
    again = [pod(rank, 'resume="auto"') for rank in range(2)]
    weights, _ = fit_here(tmp_path)
    assert [each.end() for each in again] == [0, 0]
    assert again[0].lines[-1] == f"ENDED {weights} 24\n"


@pytest.mark.opt_in
@pytest.mark.parametrize("fails", [0, 1])
def test_a_failure_is_shown_where_it_happened(fails: int, pod: Start) -> None:
    pods = [pod(rank, FAILS_ON=str(fails)) for rank in range(2)]
    assert [each.end() for each in pods] == [1, 1], pods[0].said + pods[1].said
    assert f"rank {fails}, step 4:" in pods[fails].said
    assert "RuntimeError: an accident" in pods[fails].said
    other = pods[1 - fails].said
    assert f"rank {1 - fails} ends because a rank on another machine did" in other
    assert "an accident" not in other


@pytest.mark.opt_in
def test_a_rank_that_hangs_is_named_in_its_pod_and_pointed_to_in_the_other(
    pod: Start, tmp_path: Path
) -> None:
    (tmp_path / "pace").write_text("0.2")
    pods = [pod(rank, "timeout_s=5") for rank in range(2)]
    pods[0].wait_for("STEP 3 of 2")
    children = Path(f"/proc/{pods[1].process.pid}/task").glob("*/children")
    ranks = [int(pid) for path in children for pid in path.read_text().split()]
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    assert [each.end() for each in pods] == [1, 1], pods[0].said + pods[1].said
    assert "rank 1 hangs" in pods[1].said
    assert "it is stopped by a signal (SIGSTOP)" in pods[1].said
    assert "rank 0 waited too long for others in all_" in pods[0].said
    assert "on another machine, which has rank 1, or in the network" in pods[0].said


@pytest.mark.opt_in
def test_a_pod_that_does_not_come_is_named(pod: Start) -> None:
    alone = [pod(0, "start_timeout_s=18"), pod(1, "start_timeout_s=18", MASTER_PORT="1")]
    assert [each.end() for each in alone] == [1, 1]
    assert "rank 0 waits at 127.0.0.1:" in alone[0].said
    assert "rank 1 did not come to 127.0.0.1:" in alone[0].said
    assert "rank 1 waits for rank 0 at 127.0.0.1:1" in alone[1].said
    assert "rank 1 did not reach rank 0 at 127.0.0.1:1" in alone[1].said


@pytest.mark.opt_in
def test_the_wrong_network_interface_is_named(pod: Start) -> None:
    pods = [pod(rank, GLOO_SOCKET_IFNAME="nowhere") for rank in range(2)]
    assert [each.end() for each in pods] == [1, 1]
    assert "on every machine set GLOO_SOCKET_IFNAME" in pods[0].said
    assert "GLOO_SOCKET_IFNAME=nowhere, NCCL_SOCKET_IFNAME=unset" in pods[0].said
