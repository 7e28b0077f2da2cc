"""The run under attack: a small, reproducible fit that tells how far it is.

    python -m benchmarks.soaking.program '{"folder": "/tmp/soak", ...}'

It trains with everything that a resume has to restore: dropout, noise on the samples, momentum, a
schedule, metrics. Short sleeps in each part of a step leave time to be attacked there.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Dataset

from trainer import Callback, OptimizerSetup, TaskModule, Trainer

SAMPLES, GLOBAL_BATCH, MICRO_BATCH, EPOCHS, RANKS = 320, 16, 4, 3, 2
STEPS = SAMPLES // GLOBAL_BATCH * EPOCHS
SAVE_EVERY = 4


@dataclass(frozen=True)
class Spec:
    """What a run does.

    Attributes:
        folder: Holds what it writes and its events.
        options: Of the Trainer, beside the usual ones.
        remote: Whether it writes to a url.
        torchrun: Whether torchrun starts it.
        pace_s: How long each forward, backward and update sleeps, and the loading of a micro-batch.
        does: A harm that the run does to itself, once; see `Harm`.
        where: In which part of a step.
        rank: On which rank.
        step: At which step at the earliest.
    """

    folder: str
    options: dict[str, Any] = field(default_factory=dict)
    remote: bool = False
    torchrun: bool = False
    pace_s: float = 0.005
    does: str = ""
    where: str = ""
    rank: int = 0
    step: int = 0

    @property
    def run_dir(self) -> Path:
        """Where the run writes on this machine."""
        folder = Path(self.folder)
        copies = folder / "runs" / "file" / self.folder.lstrip("/") / "store"
        return copies if self.remote else folder / "run"

    @property
    def url(self) -> str:
        """Where it writes, if that is a url."""
        return f"file://{self.folder}/store"

    @property
    def events(self) -> Path:
        """One line for each event: its name, the time, the attempt, and the step."""
        return Path(self.folder, "events")

    def dumped(self) -> str:
        """Return it as the program's argument."""
        return json.dumps(asdict(self))


class Harm:
    """Does what ``spec.does`` says, once in the life of the run, however often it starts."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._done = Path(spec.folder, "harmed")

    def at(self, where: str, step: int) -> None:
        """Do it if this is the place."""
        spec = self.spec
        if where != spec.where or step < spec.step or os.environ.get("RANK", "0") != str(spec.rank):
            return
        try:
            self._done.touch(exist_ok=False)
        except FileExistsError:
            return
        tell(spec, "harm", step)
        getattr(self, spec.does)()

    def fail(self) -> None:
        """Raise an exception."""
        raise RuntimeError("the soak test raises this")

    def leave(self) -> None:
        """End the process as if all were well."""
        os._exit(0)

    def crash(self) -> None:
        """Read from address 0."""
        ctypes.string_at(0)

    def fill_memory(self) -> None:
        """Ask for more memory than the process may have."""
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))
        self.hoard = [torch.zeros(2**22) for _ in range(100)]

    def kill(self) -> None:
        """Die as the kernel kills when memory runs out."""
        os.kill(os.getpid(), signal.SIGKILL)

    def sleep(self) -> None:
        """Hang, as in a read from a server that does not answer."""
        time.sleep(3600)

    def hold_gil(self) -> None:
        """Hang in compiled code that keeps the GIL."""
        ctypes.PyDLL(None).sleep(3600)

    def stop(self) -> None:
        """Be stopped."""
        os.kill(os.getpid(), signal.SIGSTOP)


def tell(spec: Spec, what: str, step: int) -> None:
    """Note an event; whole, whoever else writes."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    line = f"{what} {time.monotonic()} {attempt} {step}\n"
    file = os.open(spec.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, line.encode())
    os.close(file)


class Noisy(Dataset[Any]):
    """Samples with noise of their own in every epoch."""

    def __init__(self, spec: Spec, harm: Harm) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(SAMPLES, 32, generator=generator)
        self.y = self.x.sin().sum(dim=1)
        self.pause_s = spec.pace_s / MICRO_BATCH
        self.harm = harm
        self.drawn = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        is_worker = torch.utils.data.get_worker_info() is not None
        self.drawn += 1
        # Of each global batch, this rank draws its part.
        self.harm.at("worker" if is_worker else "loader", self.drawn * RANKS // GLOBAL_BATCH)
        time.sleep(self.pause_s)
        return self.x[index] + 0.1 * torch.randn(32), self.y[index]


class Net(TaskModule):
    """A small net whose parts sleep."""

    def __init__(self, spec: Spec, harm: Harm) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(32, 128), nn.Tanh(), nn.Dropout(0.2), nn.Linear(128, 128), nn.Tanh(),
            nn.Linear(128, 1),
        )  # fmt: skip
        self.spec = spec
        self.harm = harm

    def forward(self, batch: Any) -> Tensor:
        """Sleep, and compute."""
        self.harm.at("forward", self.run.step)
        time.sleep(self.spec.pace_s)
        outputs: Tensor = self.net(batch[0])
        if outputs.requires_grad:
            outputs.register_hook(self.in_backward)  # type: ignore[no-untyped-call]
        return outputs.squeeze(1)

    def eval_forward(self, batch: Any) -> Tensor:
        """Be a place of its own."""
        self.harm.at("validation", self.run.step)
        return self.forward(batch)

    def in_backward(self, gradient: Tensor) -> None:
        """Sleep."""
        self.harm.at("backward", self.run.step)
        time.sleep(self.spec.pace_s)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """Return the mean squared error."""
        return nn.functional.mse_loss(outputs, batch[1])

    def configure_optimizers(self) -> Any:
        """Use state that has to be restored."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
        return OptimizerSetup(optimizer, StepLR(optimizer, 20, 0.5), interval="step")

    def before_optimizer_step(self) -> None:
        """Sleep."""
        self.harm.at("optimizer", self.run.step)
        time.sleep(self.spec.pace_s)

    def after_optimizer_step(self) -> None:
        """Tell that a step is done."""
        if self.run.rank == 0:
            tell(self.spec, "step", self.run.step + 1)


class Sleepy(Callback):
    """A callback that takes its time."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    def on_log(self, run: Any, metrics: Any) -> None:
        """Sleep."""
        time.sleep(self.spec.pace_s)


def train(spec: Spec) -> str:
    """Train as ``spec`` says, and return a hash of the last weights."""
    harm = Harm(spec)
    usual: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": RANKS,
        "run_dir": spec.url if spec.remote else str(spec.run_dir),
        "reproducible": True,
        "global_batch_size": GLOBAL_BATCH,
        "micro_batch_size": MICRO_BATCH,
        "max_epochs": EPOCHS,
        "log_every_n_steps": 5,
        "validate_every_n_steps": 7,
        "limit_val_batches": 5,
        "checkpoint": {"every_n_steps": SAVE_EVERY},
        "timeout_s": 20,
        "start_timeout_s": 60,
        "callbacks": {"sleepy": Sleepy(spec)},
        "logger": {"jsonl": {"_target_": "trainer.loggers.JsonlLogger"}},
    }
    trainer = Trainer(**{**usual, **spec.options})
    task, data = Net(spec, harm), Noisy(spec, harm)
    Path(spec.folder).mkdir(parents=True, exist_ok=True)
    tell(spec, "fit", 0)
    trainer.fit(task, train=data, val=data)
    return sha256(b"".join(w.numpy().tobytes() for w in task.state_dict().values())).hexdigest()


if __name__ == "__main__":
    print("DONE", train(Spec(**json.loads(sys.argv[1]))), flush=True)
