"""A run in which a rank hangs ends in time and says which, where, and what the others wait for."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from program import Program

pytestmark = pytest.mark.timeout(600)  # many programs are run in one fixture

PROGRAM = Path(__file__).with_name("hanging.py")
LIMIT_S = 3.0
SOON_S = 30.0  # for the reports, on a busy machine

# Of each fit: the headline, a line of the stack that is shown, and the other rank.
EXPECTED = {
    "load": (
        "rank 1 hangs loading data for .* at step 3, and the others wait for it",
        "in __getitem__\n    hang(self.how)",
        "rank 0: in backward for .* waits for bucket 1 of ",
    ),
    "load everywhere": (
        "ranks 0, 1 hang loading data for .* at step 3; no rank waits for another",
        "in __getitem__\n    hang(self.how)",
        None,
    ),
    "forward": (
        "rank 1 hangs in forward for .* at step 3, and the others wait for it",
        "in forward\n    hang(self.how)",
        r"rank 0: in backward for .* waits for bucket 1 of 2, all_reduce #\d+ \(",
    ),
    "backward": (
        "rank 1 hangs in backward for .* at step 3, after bucket 1 of 2, and the others",
        'in backward\n    hang("backward")',
        r"rank 0: in backward for .* waits for bucket 2 of 2, all_reduce #\d+ \(",
    ),
    "gil": (
        "rank 1 hangs in forward for .* most likely because compiled code holds the GIL",
        "in hang\n    ctypes.PyDLL(None).usleep",
        "rank 0: in backward for .* waits for bucket 1 of ",
    ),
    "stopped": (
        r"rank 1 hangs in forward for .* it is stopped by a signal \(SIGSTOP\)",
        "no Python stack can be had",
        "rank 0: in backward for .* waits for bucket 1 of ",
    ),
    "skipped": (
        r"the ranks wait for different collectives: rank 0 for all_reduce #1 in group \d+ "
        r"\(20 bytes\), rank 1 for all_reduce #\d+ \(\d+ bytes\)",
        "in after_optimizer_step\n    dist.all_reduce(torch.ones(5), group=self.group)",
        "rank 1, .* at step 4, waits for ",
    ),
    "validation": (
        "rank 1 hangs evaluating for .* at step 5, and the others wait for it",
        "in eval_forward\n    hang(self.how)",
        r"rank 0: evaluating for .* at step 5, waits for \w+ #\d+ \(",
    ),
    "callback": (
        "rank 0 hangs in callbacks for .* at step 6, and the others wait for it",
        "in on_save\n    hang(self.how)",
        "rank 1: ",
    ),
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Programs that run at the same time: they wait most of it."""
    together = [sys.executable, str(PROGRAM), *EXPECTED]
    alone = [sys.executable, str(PROGRAM), "worker"]
    task = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "MASTER_ADDR": "localhost",
        "SLURM_NODEID": "0",
    }
    started = [
        Program(together, tmp_path_factory.mktemp("together")),
        Program(alone, tmp_path_factory.mktemp("alone")),
        Program([*alone[:2], "one rank"], tmp_path_factory.mktemp("one")),
    ]
    folder = tmp_path_factory.mktemp("tasks")
    started += [
        Program(alone, folder, **task, SLURM_PROCID=str(n), SLURM_LOCALID=str(n)) for n in range(2)
    ]
    try:
        together, alone, one, *tasks = [
            program.end(within=150) for program in started
        ]  # nothing is left
    finally:
        for pid in [pid for program in started for pid in program.processes()]:
            os.kill(pid, signal.SIGKILL)
    return {"together": together, "alone": alone, "one": one, "tasks": tasks}


@pytest.fixture(scope="module")
def found(programs):
    """What came of each fit: type, message and text of its error, and the seconds until then."""
    code, stdout, stderr = programs["together"]
    assert (code, stderr) == (0, "")
    hung = {how: float(at) for how, at in re.findall(r"HANGS (.+) AT (\S+)", stdout)}
    told = json.loads(stdout.partition("FOUND ")[2])
    return {how: (*error, at - hung.get(how, at)) for how, (*error, at) in told.items()}


@pytest.mark.parametrize("how", EXPECTED)
def test_hang(found, how):
    kind, message, text, seconds = found[how]
    headline, in_stack, others = EXPECTED[how]
    assert kind == "RankError"
    assert re.match(headline, message), message
    assert text.splitlines()[0] == message
    assert in_stack in text
    assert others is None or re.search(others, text), text
    assert seconds < LIMIT_S + SOON_S
    assert ("raise it if this may take longer" in message) == (
        how not in ("gil", "stopped", "skipped")
    )


def test_program_ends_and_shows_the_loader_worker_that_blocks(programs):
    code, _, stderr = programs["alone"]
    assert code == 1
    assert re.search(r"RankError: rank 1 hangs loading data for .* at step 3", stderr)
    own, _, worker = stderr.partition("its child process")
    assert "in epoch\n    for micro in self._loader" in own
    assert "hang(self.how)" not in own
    assert "in __getitem__\n    hang(self.how)" in worker


def test_one_rank_that_could_be_started_again_is_watched(programs):
    code, _, stderr = programs["one"]
    assert code == 1
    told = re.findall(r"rank 0 hangs in forward for .* at step 3\. timeout_s=3 allows", stderr)
    assert len(told) >= 2, stderr
    assert stderr.count("restart 1 of 1") == 1


def test_ranks_of_a_launcher_watch_each_other(programs):
    assert [code for code, *_ in programs["tasks"]] == [1, 1]
    stderr = "".join(stderr for *_, stderr in programs["tasks"])
    assert stderr.count("rank 1 hangs loading data for") == 1
    assert "in __getitem__\n    hang(self.how)" in stderr
    assert re.search("rank 0: in backward for .* waits for bucket 1 of 2", stderr)
