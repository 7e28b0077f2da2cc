"""Which launcher is found, how many ranks there are, and what one rank alone does."""

import errno
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from trainer import distributed
from trainer.config import TrainerConfig
from trainer.diagnosis.failures import Failure, RankError, death_of, follows_from_another
from trainer.launching import joining, launcher, slurm, starting
from trainer.launching.launcher import find_launcher, launch, local_ranks
from trainer.launching.rank import in_child
from trainer.launching.starting import threads_per_rank

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,2,1",
    "MASTER_ADDR": "node-1",
}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, "self"),
        (TORCHRUN, "torchrun"),
        (SRUN, "slurm"),
        (SRUN | TORCHRUN, "torchrun"),  # srun started torchrun
        ({"RANK": "0", "WORLD_SIZE": "2"}, "self"),  # left over from something else
        ({k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"}, "self"),  # a batch script
        (SRUN | {"SLURM_STEP_ID": "4294967290"}, "self"),  # salloc's shell
        (SRUN | {"SLURM_PTY_PORT": "40000"}, "self"),  # srun --pty bash
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, "self"),  # srun -n1 in a larger allocation
    ],
)
def test_launcher_is_found_in_the_environment(env, expected):
    assert find_launcher("auto", env)[0] == expected


def test_option_beats_what_is_found():
    assert find_launcher("self", TORCHRUN | SRUN)[0] == "self"
    assert find_launcher("slurm", TORCHRUN | SRUN)[0] == "slurm"
    plain = {k: v for k, v in TORCHRUN.items() if k != "TORCHELASTIC_RUN_ID"}
    assert find_launcher("torchrun", plain)[0] == "torchrun"


def test_launcher_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"torchrun did not start this process: RANK, .* not set"):
        find_launcher("torchrun", {})
    with pytest.raises(ValueError, match="srun did not start this process: SLURM_PROCID"):
        find_launcher("slurm", {})


def test_slurm_variables_are_translated():
    assert slurm.torchrun_env(SRUN) == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "3",
        "MASTER_ADDR": "node-1",
        "MASTER_PORT": str(15000 + 3456 + 202),
    }


def test_slurms_first_host_is_the_master():
    hosts = {k: v for k, v in SRUN.items() if k != "MASTER_ADDR"}
    hosts["SLURM_STEP_NODELIST"] = "node[3-5],other"
    assert slurm.torchrun_env(hosts)["MASTER_ADDR"] == "node3"


def test_tasks_per_node_are_unfolded():
    assert slurm._tasks_per_node("2(x3),1") == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4"}, "; not used: RANK=3, WORLD_SIZE=4 (unset them, or set "),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}, "; SLURM has 8 tasks for this job: srun st"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}, ""),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ""),
        ({}, ""),
    ],
)
def test_what_looks_like_a_launcher_and_is_none_is_told(env, said):
    assert launcher._ignored(env).startswith(said)
    assert bool(launcher._ignored(env)) == bool(said)


def test_restarts_that_could_not_tell_are_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    with pytest.raises(ValueError, match=r"--max-restarts=3 keeps nothing .*set run_dir=<folder>"):
        joining._check_restarts(TrainerConfig())
    joining._check_restarts(TrainerConfig(resume="auto"))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    joining._check_restarts(TrainerConfig())
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    joining._check_restarts(TrainerConfig())


def test_machines_that_start_their_own_ranks_are_not_started_again(monkeypatch):
    for name, value in (("MASTER_ADDR", "x"), ("MASTER_PORT", "1"), ("NODE_RANK", "0")):
        monkeypatch.setenv(name, value)
    config = TrainerConfig(num_nodes=2, max_restarts=1, accelerator="cpu")
    with pytest.raises(ValueError, match="max_restarts=1 with several machines that start their"):
        launch(int, config=config)


def test_several_machines_need_a_launcher():
    with pytest.raises(ValueError, match=r"torchrun --nnodes=2 --nproc-per-node=4 .*"):
        launch(int, config=TrainerConfig(devices=4, num_nodes=2, accelerator="cpu"))


def test_devices_auto_is_every_core():
    assert local_ranks("auto", "cpu") == starting.cores()


def test_more_cuda_devices_than_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert local_ranks("auto", "cuda") == 2
    with pytest.raises(ValueError, match=r"devices=3, .* shows 2 CUDA device.*accelerator=cpu"):
        local_ranks(3, "cuda")


def test_accelerator(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert distributed.accelerator("auto") == "cpu"
    with pytest.raises(ValueError, match="accelerator=cuda, but torch finds no CUDA device"):
        distributed.accelerator("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert distributed.accelerator("auto") == "cuda"
    assert distributed.accelerator("cpu") == "cpu"


def test_threads_per_rank(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(starting, "cores", lambda: 8)
    auto, five = TrainerConfig(), TrainerConfig(num_threads=5)
    assert threads_per_rank(auto, 3) == 2
    assert threads_per_rank(auto, 16) == 1
    assert threads_per_rank(auto, 1) is None  # torch's own choice
    assert threads_per_rank(five, 3) == threads_per_rank(five, 1) == 5
    one = TrainerConfig(reproducible=True, micro_batch_size=1)
    assert threads_per_rank(one, 1) == threads_per_rank(one, 3) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_per_rank(auto, 3) is None
    assert threads_per_rank(five, 3) == 5
    assert threads_per_rank(one, 3) == 1


def test_ranks_of_a_launcher_do_not_share_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert distributed._cuda_device(1) == torch.device("cuda", 1)
    joining._check_devices(2)
    with pytest.raises(ValueError, match=r"started 3 ranks .* shows 2 CUDA devices; .*-node=2\)"):
        joining._check_devices(3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # each rank is shown its own only
    joining._check_devices(3)
    assert distributed._cuda_device(2) == torch.device("cuda", 0)


def test_start_method(monkeypatch):
    monkeypatch.delenv("TRAINER_START_METHOD", raising=False)
    assert starting.start_method(others_run=False) == ("fork", "")
    with monkeypatch.context() as patch:
        pool_worker = SimpleNamespace(daemon=True)
        patch.setattr(starting.multiprocessing, "current_process", lambda: pool_worker)
        assert starting.start_method(others_run=False) == ("fresh", "this is a daemonic process")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert starting.start_method(others_run=False) == ("fork", "")  # asks a child
    could_not = ("fresh", "a process forked from this one could not train on CUDA")
    with monkeypatch.context() as patch:  # as beside threads that the child does not have
        patch.setattr(starting, "_PROBE_S", 0.2)
        patch.setattr(torch.Tensor, "backward", lambda tensor: time.sleep(5))
        assert starting.start_method(others_run=False) == could_not
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert starting.start_method(others_run=False) == could_not
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert starting.start_method(others_run=False) == ("fresh", "CUDA is in use in this process")
    monkeypatch.setenv("TRAINER_START_METHOD", "spawn")
    with pytest.raises(ValueError, match="TRAINER_START_METHOD=spawn"):
        starting.start_method(others_run=False)


def test_work_that_cannot_be_sent_leaves_nothing_open(monkeypatch):
    monkeypatch.setenv("TRAINER_START_METHOD", "fresh")
    config = TrainerConfig(devices=2, accelerator="cpu")

    def start():
        with pytest.raises(ValueError, match=r"cannot be sent to the ranks: .*make it picklable"):
            launch(print, threading.Lock(), config=config)
        return len(os.listdir("/proc/self/fd"))

    start()  # imports what may stay open
    assert start() == start()


def test_one_rank_runs_in_this_process(capsys):
    before = torch.get_num_threads()
    local = object()

    def job(value):
        assert not in_child()
        assert not distributed.is_initialized()
        return value, torch.get_num_threads()

    config = TrainerConfig(accelerator="cpu", num_threads=before + 1)
    assert launch(job, local, config=config) == (local, before + 1)
    assert torch.get_num_threads() == before
    assert launch(job, local, config=TrainerConfig(accelerator="cpu")) == (local, before)
    assert capsys.readouterr().out == "launcher: 1 process, this one; cpu\n" * 2


def test_group_of_the_script_is_used(capsys):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        config = TrainerConfig(accelerator="cpu")
        assert launch(distributed.all_gather_object, "mine", config=config) == ["mine"]
        assert "started by script (it has set up a process group)" in capsys.readouterr().out
        assert distributed.is_initialized()
    finally:
        distributed.teardown()


def test_group_of_the_script_must_tell_the_machine(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo")
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="LOCAL_RANK and LOCAL_WORLD_SIZE are not in the"):
        joining._check_group("cpu")
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    with pytest.raises(ValueError, match="backends cuda:nccl; it needs cpu:gloo,cuda:nccl: init"):
        joining._check_group("cuda")
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    with pytest.raises(ValueError, match="cuda:gloo; it needs cpu:gloo,cuda:nccl"):
        joining._check_group("cuda")


def test_exception_travels_with_its_traceback():
    def fail():
        raise KeyError("gone")

    try:
        fail()
    except KeyError as error:
        failure = Failure.of(error, 3, "step 7")
    again = failure.error()
    assert type(again) is KeyError
    assert again.args == ("gone",)
    assert "rank 3, step 7:\nTraceback" in str(again.__cause__)
    assert not failure.secondary
    assert follows_from_another(again)  # it was another rank's


def test_exception_that_cannot_load_becomes_a_rank_error():
    class TwoArgumentsError(Exception):
        def __init__(self, name, value):
            super().__init__(f"{name}={value}")

    error = Failure.of(TwoArgumentsError("a", 1), 0, "").error()
    assert type(error) is RankError
    assert str(error).endswith("TwoArgumentsError: a=1")


def test_huge_exception_arrives_in_part():
    error = Failure.of(ValueError(b"x" * 10_000_000), 0, "step 1").error()
    assert type(error) is RankError
    assert len(str(error)) < 2_000_000
    assert str(error.__cause__).startswith('\n"""\nrank 0, step 1:')


def test_broken_link_is_no_cause():
    gloo = RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:1")
    assert follows_from_another(gloo)
    with pytest.raises(ValueError, match="mine") as wrapped:
        raise ValueError("mine") from gloo
    assert follows_from_another(wrapped.value)
    assert not follows_from_another(RuntimeError("shapes differ"))


def test_death_is_described():
    assert "killed by SIGSEGV" in str(death_of(1, -11))
    assert "ran out of memory" in str(death_of(1, -9))
    assert "exit code 3" in str(death_of(1, 3))


def test_a_result_for_which_there_is_no_room(monkeypatch):
    def save(*args):
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            raise RuntimeError("unexpected pos")  # as torch's zip writer does when it is closed

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(RankError, match="No space left on device; make room there, or set TMPDIR"):
        launch(int, config=TrainerConfig(devices=2, accelerator="cpu"))
