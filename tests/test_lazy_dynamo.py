"""Torch's compiler is not loaded for a training that compiles nothing, and is there when asked."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from support import Regression, fit_on, samples

PATHS = f"{Path(__file__).parent}:{Path(__file__).parents[1]}"


def is_loaded() -> bool:
    return "torch._dynamo.eval_frame" in sys.modules


class Looks(Regression):
    def after_optimizer_step(self) -> None:
        assert not is_loaded()


def train_and_compile(folder: str, started: float) -> None:
    """Train, in ranks and here, then compile: the real compiler knows all that it would have."""
    import torch

    from trainer import startup
    from trainer.lazy_dynamo import defer_dynamo, load_dynamo

    start = startup.noted()
    # The kernel tells in hundredths of a second when a process was started.
    assert start is not None
    assert started - 0.011 <= start.began <= time.monotonic() - time.thread_time()
    assert [name for name, _ in start.ends] == ["import"]

    defer_dynamo()
    stand_in = sys.modules["torch._dynamo"]
    mode = stand_in.utils.get_optimize_ddp_mode()
    for world_size in (2, 1):
        fit_on(world_size, Looks(), Path(folder, str(world_size)), train=samples(8), max_steps=2)
    method: Any = torch.optim.Optimizer.add_param_group
    kept = vars(method.__wrapped__)
    assert kept["__dynamo_disable"] is method.__wrapped__
    assert not is_loaded()

    task = Regression()
    optimizer = task.configure_optimizers()

    @torch.compile(backend="eager")
    def step() -> None:
        optimizer.zero_grad()
        task.loss(task(samples(4).tensors), samples(4).tensors).backward()
        optimizer.step()

    assert is_loaded()
    step()
    task.configure_optimizers()
    assert torch._dynamo is sys.modules["torch._dynamo"] is load_dynamo() is not stand_in
    assert mode == torch._dynamo.utils.get_optimize_ddp_mode()
    assert stand_in.config is torch._dynamo.config  # who has kept it is served too
    assert kept["__dynamo_disable"].__module__ == "torch._dynamo.eval_frame"
    print("RIGHT")


def test_it_is_loaded_when_something_compiles(tmp_path: Path) -> None:
    call = f"train_and_compile({str(tmp_path)!r}, {time.monotonic()})"
    text = f"from test_lazy_dynamo import train_and_compile; {call}"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {PATHS.split(':')!r}\n{text}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.endswith("RIGHT\n"), done.stderr
