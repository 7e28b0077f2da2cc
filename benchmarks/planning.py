"""Does `plan` come true? Measured on two hosts, it predicts the steps of three and four.

    python -m benchmarks.planning                     # ten minutes; root, for network namespaces
    python -m benchmarks.planning --mbit 200 --markdown

Hosts are network namespaces with a limit on what they send and receive (`networking/hosts.py`).
All of them share this machine's cores, so layers here *sleep* for as long as they would compute:
four hosts then do not slow each other down, as hosts with accelerators of their own do not. The
gradients (8 MiB) are real, and so are DDP, gloo and the network.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.common import above_zero, scratch, table
from benchmarks.networking.hosts import Network
from benchmarks.resting import rest
from trainer import TaskModule, Trainer

LAYERS, WIDTH = 8, 512  # 1 MiB of gradients each
SAMPLE_S = 0.5e-3  # of one layer's forward; its backward takes twice as long
GLOBAL_BATCH_SIZE, STEPS, WARM_UP = 48, 12, 4
BUCKET_CAP_MB = 2.0
BOUND = 0.1  # of the relative error, on three and four hosts


class Layer(nn.Linear):
    """A linear layer on a slow accelerator."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations."""
        # In backward the weight's gradient is there once the time is over.
        return rest(super().forward(x), len(x) * SAMPLE_S).relu()


class Task(TaskModule):
    """Notes when each step ends."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.ended: list[float] = []

    def forward(self, batch: Any) -> Tensor:
        """Return the outputs (n, width)."""
        outputs: Tensor = self.net(batch[0])
        return outputs

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """Return the mean square of the outputs."""
        return outputs.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def after_optimizer_step(self) -> None:
        """Note the time."""
        self.ended.append(time.perf_counter())


def on_host(what: str) -> dict[str, Any] | None:
    """Measure as one of the ranks: plan, or only time some steps of a fit; rank 0 tells."""
    data, task = TensorDataset(torch.ones(GLOBAL_BATCH_SIZE * 4, WIDTH)), Task()
    options: dict[str, Any] = {
        "global_batch_size": GLOBAL_BATCH_SIZE,
        "bucket_cap_mb": BUCKET_CAP_MB,
        "accelerator": "cpu",
        "num_threads": 1,
        "callbacks": False,
        "logger": False,
    }
    with scratch() as folder:
        trainer = Trainer(**options, max_steps=STEPS + WARM_UP, run_dir=str(folder))
        if what == "steps":
            trainer.fit(task, train=data)
            times = task.ended[WARM_UP - 1 :]
            return {"step_s": median(b - a for a, b in itertools.pairwise(times))}
        report = trainer.plan(task, train=data, max_ranks=4)
        if report is None:
            return None
        from trainer.planning.options import PlanConfig
        from trainer.planning.scaling import Scaling

        scaling = Scaling(report.measured, trainer.config, PlanConfig(max_ranks=4))
        expected = {ranks: scaling.own_step(ranks) for ranks in (2, 3, 4)}
        return {
            "facts": report.facts,
            "step_s": {n: step.step_s for n, step in expected.items()},
            "exposed_s": {n: step.exposed_s for n, step in expected.items()},
        }


def on_network(hosts: int, mbit: float, what: str) -> dict[str, Any]:
    """Measure on so many hosts."""
    command = [sys.executable, "-m", "benchmarks.planning", "--on-host", what]
    with Network(hosts, mbit=mbit) as network:
        outputs = network.run(command, timeout_s=300)
    found: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return found


def compare(mbits: Sequence[float], markdown: bool) -> tuple[str, float]:
    """Return the table, and the largest error on three and four hosts."""
    rows, worst = [], 0.0
    for mbit in mbits:
        plan = on_network(2, mbit, "plan")
        print("; ".join(f"{name}: {text}" for name, text in plan["facts"].items()), flush=True)
        for hosts in (2, 3, 4):
            expected_s, exposed_s = plan["step_s"][str(hosts)], plan["exposed_s"][str(hosts)]
            measured_s = on_network(hosts, mbit, "steps")["step_s"]
            error = expected_s / measured_s - 1
            worst = max(worst, abs(error) if hosts > 2 else 0.0)
            cells = [f"{s * 1e3:.0f}" for s in (expected_s, exposed_s, measured_s)]
            rows.append([f"{mbit:g}", str(hosts), *cells, f"{error:+.1%}"])
    header = ["Mbit/s", "hosts", "simulated ms", "of it exposed", "measured ms", "error"]
    return table(header, rows, markdown), worst


def main() -> None:
    """Print the table; end with code 1 if the bound is broken."""
    parser = argparse.ArgumentParser(description="Predict steps on shaped hosts.")
    parser.add_argument("--mbit", type=above_zero, nargs="+", default=[50.0, 200.0, 1000.0])
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--on-host", choices=("plan", "steps"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.on_host:
        print(json.dumps(on_host(arguments.on_host)))
        return
    text, worst = compare(arguments.mbit, arguments.markdown)
    print(text)
    sys.exit(worst > BOUND)


if __name__ == "__main__":
    main()
