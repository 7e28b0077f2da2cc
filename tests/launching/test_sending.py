"""What is large is in memory once for all ranks of a machine, however they were started."""

import os
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from support import Regression, samples

from trainer import Callback, TaskModule, Trainer, distributed, startup
from trainer.config import TrainerConfig
from trainer.diagnosis.failures import RankError
from trainer.launching.launcher import launch
from trainer.launching.sending import receive, send

MANY = 2 << 20  # numbers of four bytes


def shared_bytes(address: int) -> int:
    """How much of the mapping at this address other processes have too; the ends are others."""
    found, is_here = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            name, *values = line.split()
            if not name.endswith(":"):
                start, end = (int(part, 16) for part in name.split("-"))
                is_here = start <= address < end
            elif is_here and name in ("Shared_Clean:", "Shared_Dirty:"):
                found += 1024 * int(values[0])
    return found


def look(tensor: torch.Tensor, array: np.ndarray[Any, Any]) -> list[Any]:
    total = float(tensor.sum()) + float(array.sum())
    distributed.barrier()  # all have read it
    noted = startup.noted()
    mine = {
        "total": total,
        "shared": [
            shared_bytes(start + 2 * MANY) for start in (tensor.data_ptr(), array.ctypes.data)
        ],
        "parts": [] if noted is None else [name for name, _ in noted.ends],
        "compiler": "torch._dynamo.eval_frame" in sys.modules,
    }
    return distributed.all_gather_object(mine)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("method", ["fork", "fresh"])
def test_ranks_share_tensors_and_arrays(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setenv("TRAINER_START_METHOD", method)
    startup.begin()
    startup.note("before")
    config = TrainerConfig(devices=2, accelerator="cpu")
    tensor, array = torch.ones(MANY), np.ones((2, MANY // 2), np.float32)
    for found in launch(look, tensor, array, config=config):
        assert found["total"] == 2 * MANY
        assert min(found["shared"]) > 0.9 * 4 * MANY
        assert found["parts"] == ["before", "launch", "join"]
        if method == "fresh":
            assert not found["compiler"]


@pytest.mark.skipif(sys.platform != "linux", reason="writes to /dev/full")
def test_a_full_disk_is_told_from_what_cannot_be_pickled() -> None:
    with pytest.raises(OSError, match=r"cannot be written to /dev/full.*No space.*set TMPDIR"):
        send([torch.ones(MANY), np.ones(MANY)], "/dev/full")
    with pytest.raises(OSError, match="set TMPDIR"):
        send(["small"], "/dev/full")
    with pytest.raises(ValueError, match=r"cannot be sent to the ranks: .*make it picklable"):
        send([torch.ones(MANY), (number for number in range(3))], os.devnull)


def identity(value: Any) -> Any:
    return value


def raise_unread() -> None:
    raise RuntimeError("cannot come back")


class Unreadable:
    def __reduce__(self) -> Any:
        return raise_unread, ()


def cannot_send(trainer: Trainer, task: TaskModule, train: Any) -> str:
    with pytest.raises(ValueError, match="cannot be sent to the ranks: ") as found:
        trainer.fit(task, train=train)
    return str(found.value)


def test_what_cannot_be_sent_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TRAINER_START_METHOD", "fresh")
    options: dict[str, Any] = {"devices": 2, "max_steps": 1, "run_dir": str(tmp_path)}
    trainer, data, lock = Trainer(**options, accelerator="cpu"), samples(4), threading.Lock()
    task = Regression()
    task.net[2].parts = [0, {"lock": lock}]
    told = cannot_send(trainer, task, data)
    assert told.startswith("task.net.2.parts[1]['lock'] cannot be sent to the ranks: cannot pickle")
    assert told.endswith("or unset TRAINER_START_METHOD, so that the ranks can be forked")
    data.again, data.lock = data, lock
    assert cannot_send(trainer, Regression(), data).startswith("train.lock cannot")
    callback = Callback()
    callback.lock = lock  # type: ignore[attr-defined]
    trainer = Trainer(**options, accelerator="cpu", callbacks=[callback])
    assert cannot_send(trainer, Regression(), samples(4)).startswith("callbacks[0].lock cannot")
    monkeypatch.delenv("TRAINER_START_METHOD")
    with pytest.raises(ValueError, match=r"the line `launcher: \.\.\.` says why"):
        send([lock], os.devnull)


def test_an_error_while_a_rank_reads_its_work_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_START_METHOD", "fresh")
    config = TrainerConfig(devices=2, accelerator="cpu")
    with pytest.raises(
        RankError, match="cannot unpickle it: RuntimeError: cannot come back; make"
    ) as found:
        launch(identity, Unreadable(), config=config)
    assert "raise_unread" in str(found.value.__cause__), "the traceback shows where"


def test_arrays_arrive_as_they_were(tmp_path: Any) -> None:
    numbers = np.arange(MANY, dtype=">i2")
    arrays = {
        "numbers": numbers,
        "read-only": np.frombuffer(bytes(MANY), dtype=np.uint8),
        "columns": np.asfortranarray(np.ones((1000, 300))),
        "part": np.arange(MANY)[::2],
        "days": np.full(200_000, "2020-02-29", dtype="datetime64[D]"),
        "records": np.zeros(100_000, dtype=[("x", "f8"), ("name", "U2")]),
        "objects": np.full(200_000, None),
        "small": np.ones(()),
    }
    tensor = torch.ones(MANY)
    path = str(tmp_path / "work")
    send((arrays, tensor, tensor[5:]), path)
    found, whole, part = receive(path)
    for name, array in arrays.items():
        other = found[name]
        assert (other.dtype, other.shape) == (array.dtype, array.shape), name
        assert other.flags.writeable == array.flags.writeable, name
        assert (other == array).all(), name
    assert part.data_ptr() == whole.data_ptr() + 20
    whole.zero_()  # this process's own from now on
    assert receive(path)[1].sum() == MANY
