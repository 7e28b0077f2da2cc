"""What a step costs beside a hand-written loop: with the Trainer, and with other trainers.

    python -m benchmarks.overhead                          # all parts; a quarter of an hour
    python -m benchmarks.overhead tiny tiny-ddp            # two of them; a minute or so each
    python -m benchmarks.overhead --markdown               # the tables of docs/performance.md
    python -m benchmarks.overhead --clock wall             # on a machine that does nothing else

The time of a step is taken inside the net, which all contestants share: its ``forward`` reads the
clock in the first and in the last step that count, log events in between included. Nothing is
hooked into anybody's loop, and start, warm-up, the first log event (which builds what later ones
reuse) and the last checkpoint do not count. Contestants take turns, so that a change in the
machine's load meets all of them. A figure is the median over the rounds; a ratio is the median of
the ratios within a round. The clock counts the processor time of all threads, which other programs
on the machine disturb less than the time on the wall. Two ranks are started once, by torchrun, and
every contestant trains in the same two. Fabric comes with Lightning; Accelerate and Ignite take
part where they are installed (``pip install .[bench]``).
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.common import at_least, environment
from benchmarks.overhead.measuring import CLOCKS, measure, report
from benchmarks.overhead.parts import PARTS


def main() -> None:
    """Measure and print: what takes one process here, the rest under torchrun."""
    parser = argparse.ArgumentParser(
        "benchmarks.overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument(
        "--rounds", type=at_least(1), default=7, help="that count, after one to warm up"
    )
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="what is counted")
    parser.add_argument("--threads", type=at_least(1), default=1, help="per process")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    is_rank = "TORCHELASTIC_RUN_ID" in os.environ
    logging.disable(logging.WARNING)
    torch.set_num_threads(given.threads)
    if is_rank:
        dist.init_process_group("gloo")
    else:
        facts = environment("accelerate", "lightning", "pytorch-ignite")
        print(f"{facts}, {given.threads} threads, {given.clock} clock", end="\n\n", flush=True)
    ranks = dist.get_world_size() if is_rank else 1
    chosen = [PARTS[name] for name in given.parts or PARTS]
    for part in chosen:
        if part.ranks == ranks:
            work = replace(part.work(), threads=given.threads)
            found = measure(part, work, given.rounds, CLOCKS[given.clock])
            if not is_rank or dist.get_rank() == 0:
                print(report(part, work, found, given.markdown), end="\n\n", flush=True)
    if is_rank:
        dist.destroy_process_group()
        return
    for ranks in sorted({part.ranks for part in chosen} - {1}):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launcher, f"--nproc-per-node={ranks}", "-m", "benchmarks.overhead"]
        threads = {"OMP_NUM_THREADS": str(given.threads)}
        subprocess.run([*command, *sys.argv[1:]], check=True, env={**os.environ, **threads})


if __name__ == "__main__":
    main()
