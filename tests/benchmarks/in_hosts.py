"""A rank in a host of its own: trains, then measures the network; rank 0 prints both."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from support import Regression, fit, samples

from benchmarks.networking.probe import all_reduce_s
from trainer import distributed

NUM_BYTES = 2 << 20


def train(run_dir: Path) -> list[float]:
    task = Regression()
    fit(task, run_dir, train=samples(13), global_batch_size=6, max_epochs=2)
    return [number for p in task.parameters() for number in p.flatten().tolist()]


def main() -> None:
    weights = train(Path(sys.argv[1]))
    seconds = all_reduce_s(NUM_BYTES, 2)
    if distributed.rank() == 0:
        print(json.dumps({"weights": weights, "seconds": seconds}))


if __name__ == "__main__":
    main()
