"""What a rank needs in memory, beside hand-written DDP under torchrun.

    python -m benchmarks.memory                     # two ranks; two minutes
    python -m benchmarks.memory --data 1024 --markdown

A net of 84 MB is trained with AdamW for a few steps (weights, gradients and the optimizer's state
are 336 MB per rank), and saved. The processes are looked at from outside, every few milliseconds;
the figures are peaks.

A rank's own memory is its share of what is not backed by a file: a page that several processes
share counts in parts (the kernel's PSS, of anonymous and shared memory). Code of libraries and
mapped files are left out, since they are shared by whatever else runs on the machine. The resident
set (VmHWM) counts each page in every process that has it, forked or not, files included.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import at_least, scratch, table
from benchmarks.remembering.net import STEPS

RANKS = 2
LIMIT_S = 300
MB = 1024  # kB, in which the kernel counts
_LOOK_S = 0.01


class Peak(NamedTuple):
    """Megabytes.

    Attributes:
        training: The most that a rank had of its own until its last step.
        saving: The same until its end.
        resident: The largest resident set of a rank.
        everything: All processes of the run together, at one moment.
    """

    training: float = 0.0
    saving: float = 0.0
    resident: float = 0.0
    everything: float = 0.0


def by_hand(data: int) -> list[str]:
    """Return the command for hand-written DDP."""
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    return ["-m", *torchrun, "-m", "benchmarks.remembering.hand_written", str(data)]


def by_trainer(*options: str) -> Callable[[int], list[str]]:
    """Return how to make the command for the Trainer."""
    program = ["-m", "benchmarks.remembering.with_trainer"]
    return lambda data: [*program, str(data), str(RANKS), *options]


REFERENCE = "hand-written DDP"
CONTESTANTS = {
    REFERENCE: (by_hand, {}),
    "Trainer": (by_trainer(), {}),
    "Trainer, fresh interpreters": (by_trainer(), {"TRAINER_START_METHOD": "fresh"}),
    "Trainer, saving synchronously": (by_trainer("synchronous"), {}),
    "Trainer, reproducible": (by_trainer("reproducible"), {}),
}


def run(contestant: str, data: int) -> Peak:
    """Run a program and watch it.

    Raises:
        RuntimeError: If it failed.
    """
    command, others = CONTESTANTS[contestant]
    with scratch() as folder, (folder / "output").open("w+") as output:
        env = os.environ | {"OMP_NUM_THREADS": "1", "BENCHMARK_FOLDER": str(folder)} | others
        arguments = [sys.executable, *command(data)]
        process = subprocess.Popen(arguments, env=env, stdout=output, stderr=output)
        deadline = time.monotonic() + LIMIT_S
        peak = Peak()
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
            peak = look(process.pid, folder, peak)
            time.sleep(_LOOK_S)
        if process.returncode:
            raise RuntimeError(f"{' '.join(arguments)}:\n{(folder / 'output').read_text()}")
        return peak


def look(pid: int, folder: Path, before: Peak) -> Peak:
    """Return the peak, with this moment."""
    own = {pid: _own(pid) for pid in _family(pid)}
    ranks = {int(path.name.rpartition("-")[2]) for path in folder.glob("step-1-*")} & own.keys()
    training = [own[pid] for pid in ranks if not (folder / f"step-{STEPS}-{pid}").exists()]
    return Peak(
        max([before.training, *training]),
        max([before.saving, *(own[pid] for pid in ranks)]),
        max([before.resident, *(_field(pid, "status", "VmHWM") for pid in ranks)]),
        max(before.everything, sum(own.values())),
    )


def _family(pid: int) -> list[int]:
    found = [pid]
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _family(int(child))
    return found


def _own(pid: int) -> float:
    return _field(pid, "smaps_rollup", "Pss_Anon") + _field(pid, "smaps_rollup", "Pss_Shmem")


def _field(pid: int, file: str, name: str) -> float:
    with suppress(OSError):  # it has ended
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) / MB
    return 0.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument(
        "--data", type=at_least(1), nargs="+", default=[16, 512], help="MB of samples"
    )
    given = parser.parse_args()
    for data in given.data:
        peaks = {name: run(name, data) for name in CONTESTANTS}
        rows = []
        for name, peak in peaks.items():
            row = [name]
            for own, theirs in zip(peak, peaks[REFERENCE], strict=True):
                row += [f"{own:,.0f}", f"{own / theirs:.2f}"]
            rows.append(row)
        header = [f"{RANKS} ranks, {data} MB of data"]
        for what in ("MB of a rank, training", "and saving", "resident", "all processes"):
            header += [what, "ratio"]
        print(table(header, rows, given.markdown), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
