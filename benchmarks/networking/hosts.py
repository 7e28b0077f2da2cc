"""A network of hosts on one machine, with as little bandwidth as one likes.

    with Network(2, mbit=200) as network:
        outputs = network.run([sys.executable, "-m", "my.program"])

A host is a network namespace, joined to a switch (a bridge in one more namespace) by a cable (a
veth pair) whose both ends let no more than ``mbit`` through (tc's token bucket filter). All hosts
share the machine's processor and memory: only what the network costs is as on several machines.

It needs Linux, root, and the programs ``ip`` and ``tc``.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
MOST_HOSTS = 64
_PREFIX = "ddp"  # then the process that made it, a number, and the host: ddp-4711-1-host0
_FIRST_PORT = 29500
_POLL_S = 0.02
_TAIL = 4000  # characters of what a rank wrote that go into an error

_numbers = itertools.count(1)


class Unavailable(RuntimeError):  # noqa: N818 - no fault of the caller
    """Raised where no namespaces can be made; says why."""


class RanksFailed(RuntimeError):  # noqa: N818 - reads better where it is caught
    """Raised when a command fails in a host, or takes too long; says what it wrote."""


class Network:
    """A network of hosts, while its ``with`` block lasts.

    Its namespaces are removed, and whatever runs in them is killed, however the block ends: also by
    Ctrl-C and SIGTERM. What a killed process has left behind is removed when the next network is
    made. Several networks, of one process or of several, do not meet.

    Attributes:
        hosts: How many there are.
        mbit: What each host can send, and can receive, in megabits per second; None if unlimited.
    """

    def __init__(self, hosts: int, mbit: float | None = None) -> None:
        """Note what is wanted; the network is made at ``with``.

        Args:
            hosts: How many.
            mbit: The limit, in both directions of each host; None for what the kernel can do.

        Raises:
            ValueError: For fewer than 2 hosts, or too many for their addresses.
        """
        if not 2 <= hosts <= MOST_HOSTS:
            raise ValueError(f"a network of {hosts} hosts; it can have 2 to {MOST_HOSTS}")
        self.hosts = hosts
        self.mbit = mbit
        self._name = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        self._switch = f"{self._name}-switch"
        self._runs = itertools.count()
        self._stack = ExitStack()

    def __enter__(self) -> Network:
        """Make the namespaces.

        Raises:
            Unavailable: Without root, without ``ip`` and ``tc``, or where the kernel refuses.
        """
        _require()
        with ExitStack() as stack:
            stack.enter_context(_ended_by_sigterm())
            stack.callback(_remove, f"{self._name}-")
            _remove_stale()
            self._build()
            self.limit(self.mbit)
            self._etc = self._names(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Remove the namespaces."""
        self._stack.close()

    def limit(self, mbit: float | None) -> None:
        """Let every host send and receive ``mbit`` megabits per second from now on; None: any."""
        ends = [(self._switch, f"host{number}") for number in range(self.hosts)]
        ends += [(self._host(number), "eth0") for number in range(self.hosts)]
        for namespace, device in ends:
            where = ["tc", "-netns", namespace, "qdisc"]
            if mbit is not None:
                shape = ["tbf", "rate", f"{mbit}mbit", "burst", "256k", "latency", "50ms"]
                _call(*where, "replace", "dev", device, "root", *shape)
            elif self.mbit is not None:
                _call(*where, "delete", "dev", device, "root")
        self.mbit = mbit

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        ranks_per_host: int = 1,
        env: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Run ``command`` as every rank, in its host, with the environment that torchrun sets.

        So a Trainer in it joins as under torchrun, and ``init_process_group("gloo")`` works too.

        Args:
            command: A program and its arguments; it starts in the folder of the project.
            timeout_s: The longest that it may take.
            ranks_per_host: How many ranks each host has.
            env: Variables to set besides. By default a rank has one thread (OMP_NUM_THREADS).

        Returns:
            What each rank wrote to its standard output, in rank order.

        Raises:
            RanksFailed: If a rank ends with a code that is not 0 (the first that does so is named),
                or when the time is up. All other ranks are killed then.
        """
        shared = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.getenv("PYTHONPATH")])]),
            "GLOO_SOCKET_IFNAME": "eth0",
            "NCCL_SOCKET_IFNAME": "eth0",
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(_FIRST_PORT + next(self._runs)),
            "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "WORLD_SIZE": str(self.hosts * ranks_per_host),
            "LOCAL_WORLD_SIZE": str(ranks_per_host),
            "GROUP_WORLD_SIZE": str(self.hosts),
            **(env or {}),
        }
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            outputs = [Path(folder, str(rank)) for rank in range(self.hosts * ranks_per_host)]
            ranks = []
            for rank, output in enumerate(outputs):
                host, local_rank = divmod(rank, ranks_per_host)
                own = {"RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": host}
                process = subprocess.Popen(
                    ["ip", "netns", "exec", self._host(host), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=stack.enter_context(output.open("wb")),
                    stderr=stack.enter_context(output.with_suffix(".errors").open("wb")),
                    cwd=ROOT,
                    env=os.environ | shared | {name: str(value) for name, value in own.items()},
                    start_new_session=True,
                )
                stack.callback(_end, process)
                ranks.append(process)
            stack.callback(self._kill_all)  # what they have started, too
            problem = _wait(ranks, timeout_s)
            self._kill_all()
            texts = [output.read_text(errors="replace") for output in outputs]
            if problem is not None:
                reason, rank = problem
                errors = outputs[rank].with_suffix(".errors").read_text(errors="replace")
                raise RanksFailed(
                    f"{' '.join(command)}: {reason}\n{(texts[rank] + errors)[-_TAIL:]}"
                )
            return texts

    def popen(
        self,
        host: int,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        disks: Mapping[Path, Path] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start one program in a host; it is killed, at the latest, when the network is removed.

        The host is named ``host0``, ``host1``, ..., and knows the others by these names.

        Args:
            host: Which.
            command: A program and its arguments.
            env: Variables to set besides.
            disks: Folders that this program, and what it starts, finds elsewhere: what lies at the
                first path is, for them, what lies at the second.
            options: Of `subprocess.Popen`.
        """
        mounts = {Path("/etc", own.name): own for own in self._etc} | (disks or {})
        steps = [f"mount --bind {own} {path}" for path, own in mounts.items()]
        steps += [f"echo host{host} > /proc/sys/kernel/hostname", 'exec "$@"']
        inside = ["unshare", "--uts", "sh", "-ec", "\n".join(steps), "sh", *command]
        set_ = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
        return subprocess.Popen(
            ["ip", "netns", "exec", self._host(host), *inside],
            env=os.environ | set_ | (env or {}),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **options,
        )

    def kill(self, host: int) -> None:
        """Kill all that runs in a host, at once, as when it loses its power."""
        _kill_in(self._host(host))

    def connect(self, host: int, connected: bool) -> None:
        """Pull a host's cable out of the switch, without a word to anybody; or plug it in again."""
        state = "up" if connected else "down"
        _call("ip", "-netns", self._switch, "link", "set", f"host{host}", state)

    def _build(self) -> None:
        for name in (self._switch, *map(self._host, range(self.hosts))):
            _call("ip", "netns", "add", name)
        inside = ["ip", "-netns", self._switch, "link"]
        _call(*inside, "add", "bridge", "type", "bridge")
        _call(*inside, "set", "bridge", "up")
        for number in range(self.hosts):
            host, port = self._host(number), f"host{number}"
            peer = ["type", "veth", "peer", "name", port, "netns", self._switch]
            _call("ip", "-netns", host, "link", "add", "eth0", *peer)
            for namespace, device in ((self._switch, port), (host, "eth0")):
                # Without an IPv6 address, which would not be ready for the first second.
                setting = ["ip", "-netns", namespace, "link", "set", device]
                _call(*setting, "addrgenmode", "none")
            _call(*inside, "set", port, "master", "bridge", "up")
            _call("ip", "-netns", host, "address", "add", f"{address(number)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _call("ip", "-netns", host, "link", "set", device, "up")

    def _names(self, folder: Path) -> list[Path]:
        """Write the files of /etc by which the hosts know each other's names, and no others."""
        known = [f"{address(host)} host{host}" for host in range(self.hosts)]
        files = {
            "hosts": ["127.0.0.1 localhost", *known],
            "resolv.conf": ["nameserver 127.0.0.1"],  # nobody: it says so at once
        }
        for name, lines in files.items():
            Path(folder, name).write_text("\n".join([*lines, ""]))
        return [folder / name for name in files]

    def _host(self, number: int) -> str:
        return f"{self._name}-host{number}"

    def _kill_all(self) -> None:
        for number in range(self.hosts):
            _kill_in(self._host(number))


def _require() -> None:
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if sys.platform != "linux":
        raise Unavailable(f"network namespaces are there on Linux only; this is {sys.platform}")
    if missing:
        raise Unavailable(f"network namespaces need {' and '.join(missing)} (package iproute2)")
    if os.geteuid() != 0:
        raise Unavailable("network namespaces need root; run this as root, as in a container")


def address(host: int) -> str:
    """Return a host's address."""
    return f"10.0.0.{host + 1}"


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"no network here: `{' '.join(command)}` says: {done.stderr.strip()}")
    return done.stdout


def _wait(ranks: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> tuple[str, int] | None:
    """Wait for all, or for the first that fails; return what went wrong, and in which rank."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes):
            if code:
                return f"rank {rank} ended with code {code}", rank
        if None not in codes:
            return None
        if time.monotonic() > deadline:
            return f"not done after {timeout_s:g} s", codes.index(None)
        time.sleep(_POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _kill_in(namespace: str) -> None:
    for pid in _call("ip", "netns", "pids", namespace).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _namespaces() -> list[str]:
    lines = _call("ip", "netns", "list").splitlines()
    return [line.split()[0] for line in lines if line.startswith(f"{_PREFIX}-")]


def _remove(prefix: str) -> None:
    """Remove the namespaces whose names begin so; their devices go with them."""
    for name in _namespaces():
        if name.startswith(prefix):
            _kill_in(name)
            _call("ip", "netns", "delete", name)


def _remove_stale() -> None:
    """Remove what processes that were killed have left."""
    for owner in {name.split("-")[1] for name in _namespaces()}:
        if not Path("/proc", owner).exists():
            _remove(f"{_PREFIX}-{owner}-")


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM end this process by an exception, so that it cleans up."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
