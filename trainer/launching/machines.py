"""This machine among those of a run, where each machine starts its own ranks.

The operators of Kubernetes tell it to the pods of a job. Anyone else can tell it too: by
``num_nodes`` and the variables MASTER_ADDR, MASTER_PORT and NODE_RANK.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.config import TrainerConfig

BY_HAND = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")


@dataclass(frozen=True)
class Machine:
    """One of several machines.

    Attributes:
        rank: Its number.
        count: How many there are.
        address: Where rank 0 is found by the others.
        port: Likewise.
        devices: The ranks that each machine has, or auto; None where nobody has told.
    """

    rank: int
    count: int
    address: str
    port: int
    devices: int | str | None = None


def is_pod(env: Mapping[str, str]) -> bool:
    """Whether an operator of Kubernetes started this very program in one of several pods.

    What torchrun starts there has a LOCAL_RANK.
    """
    if "KUBERNETES_SERVICE_HOST" not in env or "LOCAL_RANK" in env:
        return False
    if "PET_NNODES" in env:  # 2 or 1:2
        return env["PET_NNODES"].rpartition(":")[2] != "1"
    told = all(name in env for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return told and env["WORLD_SIZE"] != "1"


def pod(env: Mapping[str, str], config: TrainerConfig) -> Machine:
    """Return what PyTorchJob (of the training operator) or TrainJob tells this pod.

    The operator's RANK is the pod's number, and its WORLD_SIZE the number of pods, times the
    processes in each where ``nprocPerNode`` is a number.

    Raises:
        ValueError: If only torchrun can bring the pods together, or if the variables contradict
            each other or the options.
    """
    told = env.get("PET_NPROC_PER_NODE", "")  # a number, cpu, gpu, or auto: also if nobody says so
    devices = int(told) if told.isdigit() else None
    world_size = number("WORLD_SIZE", env.get("WORLD_SIZE", "0"))
    count = env.get("PET_NNODES") or str(world_size // (devices or 1))
    rank, address, port = (
        next((name for name in names if name in env), None)
        for names in (
            ("PET_NODE_RANK", "RANK"),
            ("MASTER_ADDR", "PET_MASTER_ADDR"),
            ("MASTER_PORT", "PET_MASTER_PORT"),
        )
    )
    if ":" in count or rank is None or address is None or port is None:
        raise ValueError(
            f"this pod is one of {count.replace(':', ' to ')}, but its variables do not say which "
            "one, so only torchrun can bring them together: write torchrun in place of python in "
            "the job's command (or set launcher=self, to train in this pod alone)"
        )
    found = Machine(
        number(rank, env[rank]),
        number("PET_NNODES", count),
        env[address],
        number(port, env[port]),
        "auto" if told in ("cpu", "gpu") and config.devices == 1 else devices,
    )
    if world_size and world_size not in (found.count, found.count * (devices or 1)):
        raise ValueError(
            f"WORLD_SIZE={world_size} fits neither PET_NNODES={count} nor PET_NPROC_PER_NODE="
            f"{told or 'unset'}; is it left over from something else? Unset it"
        )
    _check_rank(found, rank)
    if config.num_nodes not in (1, found.count):
        raise ValueError(
            f"num_nodes={config.num_nodes}, but this job has {found.count} pods; leave num_nodes "
            f"out, or give the job {config.num_nodes} pods"
        )
    if devices is not None and config.devices not in (1, "auto", devices):
        raise ValueError(
            f"devices={config.devices}, but the job's nprocPerNode (PET_NPROC_PER_NODE) is "
            f"{devices}; leave one of them out"
        )
    return found


def by_hand(env: Mapping[str, str], config: TrainerConfig) -> Machine | None:
    """Return what the user tells this machine; None if it is told nothing.

    Raises:
        ValueError: If the variables contradict the options.
    """
    if not all(name in env for name in BY_HAND):
        return None
    rank, port = (number(name, env[name]) for name in ("NODE_RANK", "MASTER_PORT"))
    found = Machine(rank, config.num_nodes, env["MASTER_ADDR"], port)
    _check_rank(found, "NODE_RANK")
    world_size = number("WORLD_SIZE", env.get("WORLD_SIZE", "0"))
    devices = 1 if config.devices == "auto" else int(config.devices)
    if world_size and world_size not in (found.count, found.count * devices):
        raise ValueError(
            f"WORLD_SIZE={world_size} in the environment, but num_nodes={config.num_nodes} and "
            f"devices={config.devices}; unset it, or set the options so that they agree"
        )
    return found


def number(name: str, value: str) -> int:
    """Return the value of a variable that must be a whole number.

    Raises:
        ValueError: If it is something else.
    """
    try:
        return int(value)
    except ValueError:
        message = f"{name}={value} in the environment is not allowed; it must be a whole number"
        raise ValueError(message) from None


def _check_rank(machine: Machine, name: str) -> None:
    if not 0 <= machine.rank < machine.count:
        raise ValueError(
            f"{name}={machine.rank} with {machine.count} machines; it must be 0 to "
            f"{machine.count - 1}"
        )
