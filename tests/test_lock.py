"""One fit at a time writes to a folder."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from trainer import lock
from trainer.launching import attempt
from trainer.launching.attempt import Attempt
from trainer.lock import check_free, is_held, locked

# Takes the lock as the second attempt of a launch, forks a child as a loader does, and waits.
HOLDER = """
import os, sys, time
from pathlib import Path
from trainer import lock
from trainer.launching import attempt
from trainer.lock import locked
lock._WAIT_S = 0.2
attempt.enter(attempt.Attempt("launch", 1))
with locked(Path(sys.argv[1])):
    child = os.fork()
    if child:
        print(child, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lock, "_WAIT_S", 0.2)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


@pytest.mark.timeout(60)
def test_another_process_is_named_and_a_killed_one_forgotten(tmp_path, monkeypatch):
    check_free(tmp_path)
    assert is_held(tmp_path) is False
    assert list(tmp_path.iterdir()) == []
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    child = None
    try:
        child = int(holder.stdout.readline())
        assert is_held(tmp_path) is True
        for refused in (lambda: locked(tmp_path).__enter__(), lambda: check_free(tmp_path)):
            with pytest.raises(ValueError, match=rf"process {holder.pid} on .* is training in"):
                refused()
        for number, is_free in ((0, False), (1, False), (2, True)):  # 2: on another machine
            monkeypatch.setattr(attempt, "_entered", Attempt("launch", number))
            if is_free:
                check_free(tmp_path)
            else:
                with pytest.raises(ValueError, match="is training in"):
                    check_free(tmp_path)
        holder.kill()
        holder.wait()
        assert is_held(tmp_path) is False
        monkeypatch.setattr(attempt, "_entered", Attempt())
        os.kill(child, 0)  # lives on
        with locked(tmp_path):
            threads = ThreadPoolExecutor(1)
            refused = threads.submit(check_free, tmp_path).exception()
            assert str(refused).startswith(f"process {os.getpid()} on ")
            assert is_held(tmp_path) is True
            busy = subprocess.run(command, capture_output=True, text=True, timeout=30)
            assert f"process {os.getpid()} on" in busy.stderr  # it is locked as before
        check_free(tmp_path)
    finally:
        holder.kill()
        if child is not None:
            os.kill(child, signal.SIGKILL)
        holder.communicate()


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with locked(tmp_path):
        pass
    assert is_held(tmp_path) is None
