"""Two machines, which are network namespaces: they go, come back, and share no disk."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import ENV, PIPED, SCRIPT, Running, fit_here, logged

from benchmarks.networking.hosts import Network, Unavailable

pytestmark = pytest.mark.timeout(300)

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# Ranks that are told of other machines in each round, so that a machine may come and go.
COMES_AND_GOES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Hosts:
    """Two hosts, and the folder in which each of them runs the program."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.folder = folder
        self.run_dir = folder / "job" / "run"
        self.own_disks = False
        self.started: list[Running] = []
        (folder / "job").mkdir()
        for host in range(2):
            self.disk(host).mkdir()
        self.set_pace("0")

    def disk(self, host: int) -> Path:
        return self.folder / f"disk{host}"

    def set_pace(self, seconds: str) -> None:
        """Have every step take so long."""
        for place in (self.folder / "job", self.disk(0), self.disk(1)):
            (place / "pace").write_text(seconds)

    def torchrun(
        self, host: int, *flags: str, options: tuple[str, ...] = (), **env: str
    ) -> Running:
        return self.start(host, *TORCHRUN, *flags, options=options, **env)

    def start(self, host: int, *command: str, options: tuple[str, ...] = (), **env: str) -> Running:
        """Start the program on a host, by this command."""
        command = (*command, str(SCRIPT), str(self.run_dir), *options)
        disks = {self.folder / "job": self.disk(host)} if self.own_disks else {}
        process = self.network.popen(host, list(command), env=ENV | env, disks=disks, **PIPED)
        self.started.append(Running(process))
        return self.started[-1]

    def static(self, host: int, rank: int | None = None, options: tuple[str, ...] = ()) -> Running:
        """Start one of two machines whose numbers are given."""
        rank = host if rank is None else rank
        first = host if rank == 0 else 1 - host
        flags = ["--nnodes=2", f"--node-rank={rank}", f"--master-addr=host{first}"]
        return self.torchrun(host, *flags, "--max-restarts=3", options=options)

    def elastic(self, host: int, options: tuple[str, ...] = ()) -> Running:
        """Start one of one or two machines."""
        flags = ["--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=host0:29400"]
        flags += ["--rdzv-id=job", "--rdzv-conf=last_call_timeout=3", "--max-restarts=3"]
        options = ('resume="auto"', *options)
        return self.torchrun(host, *flags, options=options, **COMES_AND_GOES)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    try:
        with Network(2) as network:
            made = Hosts(network, tmp_path)
            yield made
        for running in made.started:
            running.end()
    except Unavailable as error:
        pytest.skip(str(error))


def ended(machines: list[Running], weights: str, steps: int) -> None:
    """Rank 0's machine has the result, and all have the weights of one process alone."""
    for machine in machines:
        assert machine.end() == 0, machine.said
    results = [f"ENDED {weights} {steps}\n", *[f"ENDED {weights} None\n"] * (len(machines) - 1)]
    found = [line for machine in machines for line in machine.lines if line.startswith("ENDED")]
    assert found == results


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([sys.executable], "1 process on machine 0 of 2 (a pod in which PET_NNODES is set)"),
        (TORCHRUN, "2 processes, started by torchrun (TORCHELASTIC_RUN_ID is"),
    ],
    ids=["pods", "torchrun"],
)
def test_two_machines_train_as_one_process_does(
    command: list[str], said: str, hosts: Hosts
) -> None:
    """As a TrainJob's pods: all that we, or torchrun, have to know is in its variables."""
    shared = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"}
    shared |= {"PET_MASTER_ADDR": "host0", "PET_MASTER_PORT": "29500"}
    machines = [hosts.start(n, *command, **shared, PET_NODE_RANK=str(n)) for n in range(2)]
    weights, events = fit_here(hosts.folder)
    ended(machines, weights, 24)
    assert f"launcher: {said}" in machines[0].said
    assert logged(hosts.run_dir) == events
    assert not list(hosts.run_dir.glob(".*-*"))  # by which the disks were told apart
    assert not (hosts.run_dir / "elsewhere.json").exists()


@pytest.mark.opt_in
def test_a_machine_dies_and_comes_back(hosts: Hosts) -> None:
    hosts.set_pace("0.2")
    machines = [hosts.static(0), hosts.static(1)]
    weights, events = fit_here(hosts.folder)
    machines[0].wait_for("STEP 7 of 2")
    hosts.network.kill(1)
    machines[0].wait_for("rank 0, step")
    machines[1] = hosts.static(1)
    ended(machines, weights, 24)
    assert "restarting from" in machines[0].said
    assert logged(hosts.run_dir) == events


@pytest.mark.opt_in
def test_a_cable_is_pulled_and_put_back(hosts: Hosts) -> None:
    hosts.set_pace("0.2")
    machines = [hosts.static(n, options=("timeout_s=5", "start_timeout_s=90")) for n in range(2)]
    weights, _ = fit_here(hosts.folder)
    machines[0].wait_for("STEP 7 of 2")
    hosts.network.connect(1, False)
    machines[0].wait_for("rank 1 did not answer: stopped, gone, or without the GIL")
    machines[0].wait_for("rank 0 waits at host0:29500 for rank 1")
    hosts.network.connect(1, True)
    ended(machines, weights, 24)


@pytest.mark.opt_in
def test_a_run_goes_on_with_fewer_machines_and_then_with_more(hosts: Hosts) -> None:
    hosts.set_pace("0.1")
    options = ("max_steps=120",)
    machines = [hosts.elastic(n, options) for n in range(2)]
    weights, events = fit_here(hosts.folder, max_steps=120)
    machines[0].wait_for("STEP 7 of 2")
    hosts.network.kill(1)
    machines[0].wait_for(" of 1\n")
    machines[1] = hosts.elastic(1, options)
    machines[0].wait_for("stopped by SIGTERM")  # by torchrun, for the new machine; and saved
    ended(machines, weights, 120)
    last = [line for line in machines[0].lines if line.startswith("STEP")][-1]
    assert last == "STEP 120 of 2\n"
    assert logged(hosts.run_dir) == events


@pytest.mark.opt_in
def test_machines_without_a_common_disk(hosts: Hosts) -> None:
    hosts.own_disks = True
    weights, _ = fit_here(hosts.folder)
    first = [hosts.static(n, options=("max_steps=12",)) for n in range(2)]
    assert [machine.end() for machine in first] == [0, 0], first[0].said + first[1].said
    saved = [hosts.disk(n) / "run" / "checkpoints" / "step-00000012" for n in range(2)]
    assert [place.exists() for place in saved] == [True, False]

    # The machine that has nothing is alone.
    alone = hosts.torchrun(1, "--nnodes=1", options=('resume="auto"',))
    assert alone.end() != 0
    assert "host0 began to save this run at step 12, in" in alone.said

    # It is rank 0's now, and the other one has the checkpoints.
    options = ('resume="auto"',)
    second = [hosts.static(1, rank=0, options=options), hosts.static(0, rank=1, options=options)]
    ended(second, weights, 24)
    assert "getting step-00000012 from the machine of rank 1" in second[0].said
