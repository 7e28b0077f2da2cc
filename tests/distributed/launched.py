"""Run as a program: launches the ranks of the scenario named on its command line, with no guard."""

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from trainer import TaskModule, Trainer, distributed
from trainer.config import TrainerConfig
from trainer.diagnosis.failures import RankError
from trainer.launching.children import settle_worker
from trainer.launching.launcher import launch
from trainer.launching.rank import in_child

ATTEMPT = "TORCHELASTIC_RESTART_COUNT"


class OwnError(ValueError):
    """Of a class that only the main module knows."""


class Outcome:
    """Of a class that only the main module knows."""

    def __init__(self, rank, world_size, weights):
        self.rank, self.world_size, self.weights = rank, world_size, weights


class Points(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index / 10


class Line(TaskModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, batch):
        assert os.environ["OMP_WAIT_POLICY"] == "passive"
        return batch * self.weight

    def loss(self, outputs, batch):
        if self.run.step == 4 and self.run.rank == 1 and os.environ[ATTEMPT] == "0":
            os._exit(9)
        return (outputs - 2 * batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def run(job, *args, **options):
    config = TrainerConfig.from_options({"devices": 2, "accelerator": "cpu", **options})
    return launch(job, *args, config=config, where=lambda: "step 12")


def ready():
    """Tell the test, once, that every rank is at work."""
    distributed.barrier()
    if dist.get_rank() == 0:
        print("READY", flush=True)


class Slow(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index >= 2:
            time.sleep(600)
        return index


def facts(size):
    weights = torch.full((size,), float(distributed.rank() + 1))
    distributed.all_reduce_sum(weights)
    assert in_child()
    assert distributed.broadcast_object({"from": distributed.rank()}, src=1) == {"from": 1}
    ranks = [distributed.local_rank(), distributed.local_world_size()]
    assert distributed.all_gather_object(ranks) == [[0, 2], [1, 2]]
    return Outcome(distributed.rank(), distributed.world_size(), weights)


def process_state():
    return dict(os.environ), os.getcwd(), torch.get_num_threads(), threading.active_count()


def values():
    run(facts, 3)  # imports what this process keeps
    before = process_state()
    outcome = run(facts, 2_000_000)
    assert type(outcome) is Outcome
    assert (outcome.rank, outcome.world_size) == (0, 2)
    assert outcome.weights.shape == (2_000_000,)
    assert outcome.weights.eq(3).all()
    assert process_state() == before
    assert not in_child()
    assert not dist.is_initialized()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    print("VALUES ARE RIGHT")


def train():
    """Fit and predict, without a fork, with classes that only the main module knows."""
    torch.cuda.is_initialized = lambda: True
    del os.environ["OMP_WAIT_POLICY"]
    task, options = Line(), {"callbacks": [], "logger": [], "accelerator": "cpu", "run_dir": "run"}
    options |= {"max_restarts": 1, "checkpoint": {"asynchronous": False}}
    trainer = Trainer(devices=2, global_batch_size=4, max_epochs=3, **options)
    result = trainer.fit(task, train=Points(), val=Points())
    assert (result.step, result.epoch, result.samples) == (9, 3, 30)
    assert task.weight.item() == pytest.approx(2, abs=0.2)
    error = task.weight.item() - 2
    assert result.metrics["val/loss"] == pytest.approx(error**2 * 0.285)
    before = process_state()
    predicted = trainer.predict(task, predict=Points())
    assert torch.equal(predicted, torch.arange(10, dtype=torch.float64) / 10 * task.weight)
    assert process_state() == before
    print("TRAINED")


def fail_on_rank_1(how):
    distributed.shorten_timeouts()
    distributed.barrier()  # a rank that still joins would tell of its peer's death
    if dist.get_rank() == 1:
        print(f"FAILS AT {time.monotonic()}", flush=True)
        if how in ("own", "deaf"):
            raise OwnError("rank one is unwell")
        if how == "unpicklable":
            error = OwnError("cannot travel")
            error.lock = threading.Lock()
            raise error
        if how == "exit":
            sys.exit(7)
        if how == "die":
            os._exit(9)
        if how == "leave":
            os._exit(0)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(300)
    for _ in range(1000):  # waits for rank 1, which never comes
        distributed.all_reduce_sum(torch.ones(1))


def uncaught():
    run(fail_on_rank_1, "own")


EXPECTED = {
    "own": (OwnError, r"^rank one is unwell$"),
    "deaf": (OwnError, r"^rank one is unwell$"),  # and the other rank does not die of SIGTERM
    "unpicklable": (RankError, r"^rank 1: OwnError: cannot travel$"),
    "exit": (RankError, r"^rank 1: SystemExit: 7$"),
    "leave": (RankError, r"^rank 1 ended with exit code 0 before its work was done$"),
    "stop": (RankError, r"^rank 1 hangs .* it is stopped by a signal \(SIGSTOP\)"),
    "die": (RankError, r"^rank 1 ended with exit code 9 before its work was done$"),
    "kill": (RankError, r"^rank 1 was killed by SIGKILL; if nobody did that by"),
}


def caught(*ways):
    for how in ways:
        kind, message = EXPECTED[how]
        with pytest.raises(kind, match=message) as error:
            run(fail_on_rank_1, how, start_timeout_s=300, timeout_s=2 if how == "stop" else 300)
        print(f"CAUGHT AT {time.monotonic()}", flush=True)
        if kind is OwnError:
            assert "rank 1, step 12:\nTraceback" in str(error.value.__cause__)
    print("ERRORS ARE RIGHT")


def load_for_ever():
    loader = iter(DataLoader(Slow(), num_workers=1, batch_size=1))
    next(loader)
    ready()
    list(loader)


def wait():
    run(load_for_ever)


def settle(worker):
    """As in the workers of a fit."""
    settle_worker()


def load_with_children(context):
    """Like it, and start a program that knows nothing of its parent."""
    options = {"multiprocessing_context": context, "worker_init_fn": settle}
    loader = iter(DataLoader(Slow(), num_workers=1, batch_size=1, **options))
    next(loader)
    program = subprocess.Popen(["sleep", "600"])
    pids = distributed.all_gather_object(os.getpid())
    if dist.get_rank() == 0:
        print("RANKS", *pids)
    ready()
    list(loader)
    program.kill()


def restarted():
    """Under torchrun: die at the first attempt, go on at the second, and wait to be killed."""
    os.environ["OMP_WAIT_POLICY"] = "passive"
    options = {"global_batch_size": 4, "max_epochs": 3, "checkpoint": {"every_n_steps": 1}}
    trainer = Trainer(callbacks=False, accelerator="cpu", run_dir="run", **options)
    result = trainer.fit(Line(), train=Points())
    assert result is None or result.step == 9
    children("fork", "spawn")


def children(*contexts):
    run(lambda: load_with_children(contexts[dist.get_rank()]))


def parallel_step(count):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten())
    images = torch.randn(16, 3, 34, 34)
    for _ in range(count):
        model(images).square().mean().backward()
        (torch.randn(400, 400) @ torch.randn(400, 400)).sum()
        torch.empty(4_000_000).copy_(torch.ones(4_000_000))
    return torch.get_num_threads()


def train_step(count):
    threads = parallel_step(count)
    distributed.barrier()
    return threads


def busy_parent():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as some daemons leave it
    torch.set_num_threads(2)
    parallel_step(2)
    assert run(train_step, 2, num_threads=2) == 2
    parallel_step(2)
    assert run(train_step, 2, num_threads=2) == 2
    assert torch.get_num_threads() == 2
    print("NO HANG")


def appeared(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def meet(mine, other):
    mine.touch()
    appeared(other)


def two_launches():
    """Launch beside ranks of another launch."""
    first, second = Path("first").absolute(), Path("second").absolute()
    thread = threading.Thread(target=run, args=(meet, first, second))
    thread.start()
    appeared(first)
    run(meet, second, first)
    thread.join()
    assert run(facts, 7).weights.numel() == 7
    print("ALL ARE DONE")


def leave_something(queue):
    def work():
        time.sleep(1)
        print(f"THREAD OF RANK {rank} IS THROUGH", flush=True)

    rank = distributed.rank()
    threading.Thread(target=work).start()
    if rank == 0:
        queue.put("a word")
    else:
        distributed.teardown = lambda: os.kill(os.getpid(), signal.SIGKILL)
    return "all is done"


POOL = ThreadPoolExecutor(1)


def leave_a_thread():
    if distributed.rank() == 1:
        threading.Thread(target=time.sleep, args=[60], name="server").start()
    else:
        POOL.submit(int)  # its thread then waits for more
    return "all is done"


def ends():
    """What ranks do once all of them are done: one waits for its thread, the other is killed."""
    queue = multiprocessing.Queue()
    assert run(leave_something, queue) == "all is done"
    assert queue.get(timeout=60) == "a word"
    assert run(leave_a_thread, timeout_s=1, start_timeout_s=60) == "all is done"
    print("ENDED")


def once(folder):
    """Work once per machine that needs longer than anything else may take."""
    distributed.shorten_timeouts()

    def prepare(name, seconds=0, error=None):
        time.sleep(seconds)
        (folder / f"{name}-{distributed.rank()}").touch()
        if error:
            raise error

    def done():
        return sorted(path.name for path in folder.iterdir())

    distributed.run_once_per_machine(lambda: prepare("long", 3), timeout_s=60)
    assert done() == ["long-0"]

    # Two machines with a rank each, as a script that set up the group itself would tell it.
    local_rank = os.environ["LOCAL_RANK"]
    os.environ["LOCAL_RANK"] = "0"
    del os.environ["GROUP_RANK"], os.environ["GROUP_WORLD_SIZE"]
    distributed.run_once_per_machine(lambda: prepare("two", distributed.rank()), timeout_s=60)
    assert done() == ["long-0", "two-0", "two-1"]

    os.environ["LOCAL_RANK"] = local_rank
    distributed.run_once_per_machine(lambda: prepare("bad", 0, OwnError("no data")), timeout_s=60)


def too_late():
    distributed.run_once_per_machine(lambda: time.sleep(60), timeout_s=0.5)


def once_per_machine():
    folder = Path("once")
    folder.mkdir()
    with pytest.raises(OwnError, match=r"^no data$") as failed:
        run(once, folder, timeout_s=2, start_timeout_s=60)
    assert "rank 0, step 12" in str(failed.value.__cause__)
    assert (folder / "bad-0").exists()
    assert not (folder / "bad-1").exists()
    with pytest.raises(TimeoutError, match=r"rank 0 was not done after 0\.5 s"):
        run(too_late)
    print("ONCE")


def under_launcher():
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))

    def gloo_threads():
        names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        return [name for name in names if "gloo" in name]

    def job():
        assert not in_child()
        layer = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        layer(torch.ones(1)).backward()
        assert gloo_threads()
        ranks = distributed.all_gather_object(distributed.rank())
        time.sleep(1.5 * rank)  # the store of srun's tasks is in rank 0
        distributed.wait_for_first_rank()
        return ranks

    atexit.register(lambda: print(f"RANK {rank} LEAVES {gloo_threads()}", flush=True))
    for _ in range(2):
        result = run(job, devices=5, num_nodes=3)
        assert result == (None if rank else [0, 1]), result
    print(f"RANK {rank} IS RIGHT")


def fail_under_launcher():
    under_launcher()
    run(fail_on_rank_1, "own")


if __name__ != "__mp_main__":  # a spawned loader worker
    globals()[sys.argv[1]](*sys.argv[2:])
