"""What is told to a machine, or a pod, of the others; and what is refused."""

from __future__ import annotations

import pytest

from trainer.config import TrainerConfig
from trainer.launching.launcher import (
    find_launcher,
    is_one_of_several,
    speaks_for_all,
    this_machine,
)
from trainer.launching.machines import Machine

KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
OLD_OPERATOR = {  # before 1.7: it knows of no processes in a pod
    **KUBERNETES,
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "3",
    "RANK": "2",
}
OPERATOR = {  # nprocPerNode: "4"
    **OLD_OPERATOR,
    "WORLD_SIZE": "12",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "2",
}
AUTO = {**OPERATOR, "WORLD_SIZE": "3", "PET_NPROC_PER_NODE": "auto"}  # as it is without one
TRAIN_JOB = {
    **KUBERNETES,
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
}
ELASTIC = {
    **KUBERNETES,
    "PET_NNODES": "1:3",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "job-worker-0:23456",
    "PET_MAX_RESTARTS": "3",
}
BY_HAND = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "NODE_RANK": "2"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    def told(env: dict[str, str], **options: object) -> Machine | None:
        monkeypatch.setattr("os.environ", env)
        return this_machine(TrainerConfig.from_options({"accelerator": "cpu", **options}))

    return told


@pytest.mark.parametrize(
    ("env", "devices"), [(OLD_OPERATOR, None), (OPERATOR, 4), (AUTO, None), (TRAIN_JOB, 4)]
)
def test_a_pod_starts_its_own_ranks(env, devices, machine):
    assert find_launcher("auto", env)[0] == "kubernetes"
    assert machine(env) == Machine(2, 3, "job-master-0", 23456, devices)
    assert machine(env, num_nodes=3, devices=4, launcher="kubernetes").rank == 2
    assert is_one_of_several({})
    assert not speaks_for_all({})
    assert not is_one_of_several({"launcher": "self"})
    assert speaks_for_all({"launcher": "self"})


@pytest.mark.parametrize("told", ["gpu", "cpu"])
def test_a_pod_may_be_told_to_use_all_its_devices(told, machine):
    env = {**AUTO, "PET_NPROC_PER_NODE": told}
    assert machine(env) == Machine(2, 3, "job-master-0", 23456, "auto")
    assert machine(env, devices=2).devices is None  # which is the option's


@pytest.mark.parametrize(
    "env",
    [
        {k: v for k, v in OPERATOR.items() if k not in KUBERNETES},  # left over in a shell
        {**OPERATOR, "LOCAL_RANK": "1"},  # torchrun, or a script, has started this
        {**OLD_OPERATOR, "WORLD_SIZE": "1", "RANK": "0"},
        {**TRAIN_JOB, "PET_NNODES": "1"},
        {**ELASTIC, "PET_NNODES": "1:1"},
        KUBERNETES,
    ],
)
def test_a_pod_that_is_alone_or_that_another_launcher_uses(env, machine):
    assert find_launcher("auto", env) == ("self", "no launcher")
    with pytest.raises(ValueError, match="launcher=kubernetes, but this is no pod of a PyTorchJob"):
        machine(env, launcher="kubernetes")


def test_torchrun_in_a_pod_is_torchrun():
    local = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}
    assert find_launcher("auto", {**OPERATOR, **local})[0] == "torchrun"


def test_pods_that_only_torchrun_brings_together_do_not_train_alone(machine):
    with pytest.raises(ValueError, match=r"one of 1 to 3, .*write torchrun in place of python"):
        machine(ELASTIC)
    assert machine(ELASTIC, launcher="self") is None


@pytest.mark.parametrize(
    ("env", "options", "problem"),
    [
        (OPERATOR, {"num_nodes": 2}, "num_nodes=2, but this job has 3 pods; leave num_nodes out"),
        (OPERATOR, {"devices": 2}, r"devices=2, but the job's nprocPerNode \(PET_NPROC_PER_NODE"),
        ({**OPERATOR, "WORLD_SIZE": "8"}, {}, "WORLD_SIZE=8 fits neither PET_NNODES=3 nor PET_N"),
        ({**OLD_OPERATOR, "RANK": "3"}, {}, "RANK=3 with 3 machines; it must be 0 to 2"),
        ({**BY_HAND, "NODE_RANK": "3"}, {"num_nodes": 3}, "NODE_RANK=3 with 3 machines"),
        (
            {**BY_HAND, "WORLD_SIZE": "8"},
            {"num_nodes": 3, "devices": 2},
            "WORLD_SIZE=8 in the environment, but num_nodes=3 and devices=2; unset it",
        ),
        ({**BY_HAND, "NODE_RANK": "node-2"}, {"num_nodes": 3}, "NODE_RANK=node-2 in the environ"),
        ({**BY_HAND, "MASTER_PORT": "any"}, {"num_nodes": 3}, "MASTER_PORT=any .* a whole number"),
        ({**OPERATOR, "PET_NODE_RANK": "w-2"}, {}, "PET_NODE_RANK=w-2 in the environment is not"),
        ({}, {"num_nodes": 3}, r"torchrun --nnodes=3 .*(.|\n)*or set MASTER_ADDR, MASTER_PORT, N"),
    ],
)
def test_what_contradicts_itself_is_refused(env, options, problem, machine):
    with pytest.raises(ValueError, match=problem):
        machine(env, **options)


def test_machines_are_told_by_hand(machine):
    assert machine(BY_HAND, num_nodes=3) == Machine(2, 3, "job-master-0", 23456)
    assert machine(BY_HAND, num_nodes=3, launcher="self").rank == 2
    assert is_one_of_several({"num_nodes": 3})
    assert not speaks_for_all({"num_nodes": 3})
    assert machine({**BY_HAND, "WORLD_SIZE": "6"}, num_nodes=3, devices=2).rank == 2
    assert machine(BY_HAND) is None  # left over
    assert not is_one_of_several({})


def test_the_first_of_several_speaks_for_all(monkeypatch):
    monkeypatch.setattr("os.environ", {**BY_HAND, "NODE_RANK": "0"})
    assert is_one_of_several({"num_nodes": 3})
    assert speaks_for_all({"num_nodes": 3})
