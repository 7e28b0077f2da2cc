"""Run as a program: launches the ranks of the scenario named on its command line, with no guard."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from trainer import distributed
from trainer.config import TrainerConfig
from trainer.failures import RankError
from trainer.launcher import in_child, launch


class OwnError(ValueError):
    """Of a class that only the main module knows."""


class Outcome:
    """Of a class that only the main module knows."""

    def __init__(self, rank, world_size, weights):
        self.rank, self.world_size, self.weights = rank, world_size, weights


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
    for method in ("fork", "fresh"):
        os.environ["TRAINER_START_METHOD"] = method
        first = run(facts, 2_000_000)
        assert type(first) is Outcome
        assert (first.rank, first.world_size) == (0, 2)
        assert first.weights.shape == (2_000_000,)
        assert first.weights.eq(3).all()
        before = process_state()
        assert run(facts, 3).weights.tolist() == [3.0, 3.0, 3.0]
        assert process_state() == before
    assert not in_child()
    assert not dist.is_initialized()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    del os.environ["TRAINER_START_METHOD"]
    torch.cuda.is_initialized = lambda: True
    run(facts, 3)
    print("VALUES ARE RIGHT")


def fail_on_rank_1(how):
    if dist.get_rank() == 1:
        if how == "own":
            raise OwnError("rank one is unwell")
        if how == "unpicklable":
            error = OwnError("cannot travel")
            error.lock = threading.Lock()
            raise error
        if how == "exit":
            sys.exit(7)
        if how == "die":
            os._exit(9)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(1000):  # waits for rank 1, which never comes
        distributed.all_reduce_sum(torch.ones(1))


def uncaught():
    run(fail_on_rank_1, "own")


def caught():
    with pytest.raises(OwnError, match=r"^rank one is unwell$") as own:
        run(fail_on_rank_1, "own")
    assert "rank 1, step 12:\nTraceback" in str(own.value.__cause__)
    with pytest.raises(RankError, match=r"^rank 1: OwnError: cannot travel$"):
        run(fail_on_rank_1, "unpicklable")
    with pytest.raises(
        RankError, match=r"^rank 1 ended with exit code 9 before its work was done$"
    ):
        run(fail_on_rank_1, "die")
    with pytest.raises(RankError, match=r"^rank 1 was killed by SIGKILL; if nobody did that by"):
        run(fail_on_rank_1, "kill")
    with pytest.raises(SystemExit) as ended:
        run(fail_on_rank_1, "exit")
    assert ended.value.code == 7
    print("ERRORS ARE RIGHT")


def killed():
    run(fail_on_rank_1, "kill")


def load_for_ever():
    loader = iter(DataLoader(Slow(), num_workers=1, batch_size=1))
    next(loader)
    ready()
    list(loader)


def wait():
    run(load_for_ever)


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
    torch.set_num_threads(2)
    parallel_step(2)
    assert run(train_step, 2, num_threads=2) == 2
    parallel_step(2)
    assert run(train_step, 2, num_threads=2) == 2
    assert torch.get_num_threads() == 2
    print("NO HANG")


def many():
    """Launch from eight threads at once."""
    results = {}

    def one(number):
        results[number] = run(facts, number + 1).weights.numel()

    threads = [threading.Thread(target=one, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: n + 1 for n in range(8)}
    print("EIGHT ARE DONE")


def once(folder, fails):
    """Two seconds of work in a group whose collectives may wait for one."""
    started = time.monotonic()

    def prepare():
        time.sleep(2)
        (Path(folder) / f"{fails}-{distributed.rank()}").touch()
        if fails:
            raise OwnError("no such data")

    distributed.run_once_per_machine(prepare, timeout_s=60)
    assert time.monotonic() - started >= 2


def too_late():
    distributed.run_once_per_machine(lambda: time.sleep(60), timeout_s=0.5)


def once_per_machine():
    folder = os.environ["TMPDIR"] + "/../once"
    Path(folder).mkdir()
    run(once, folder, False, timeout_s=1)
    with pytest.raises(OwnError, match=r"^no such data$") as failed:
        run(once, folder, True, timeout_s=1)
    assert "rank 0, step 12" in str(failed.value.__cause__)
    with pytest.raises(TimeoutError, match=r"machine 0 was not done after 0\.5 s"):
        run(too_late)
    assert sorted(path.name for path in Path(folder).iterdir()) == ["False-0", "True-0"]
    print("ONCE")


def under_launcher():
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))

    def job():
        assert not in_child()
        return distributed.all_gather_object(distributed.rank())

    for _ in range(2):
        result = run(job, devices=5)
        assert result == (None if rank else [0, 1]), result
    print(f"RANK {rank} IS RIGHT")


def fail_under_launcher():
    run(fail_on_rank_1, "own")


globals()[sys.argv[1]]()
