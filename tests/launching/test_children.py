"""Loader workers and the like end with the process that started them."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from support import is_running

from trainer.launching import children


def fork_sleeper():
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    return pid


def be_killed():
    """Start processes, tell of them, and be killed."""
    with children.taken_along():
        worker = fork_sleeper()
        found = []
        thread = threading.Thread(target=lambda: found.append(fork_sleeper()))
        thread.start()
        thread.join()
    server = fork_sleeper()  # meant to live on
    folder = children._own_janitor(os.getpid()).folder
    noted = Path(folder, "pids").read_text().split()
    assert noted == [str(pid) for pid in (os.getpid(), worker, *found)]
    print(worker, found[0], server, folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_process_takes_its_workers_along():
    program = [sys.executable, "-c", "from test_children import be_killed; be_killed()"]
    paths = {"PYTHONPATH": ":".join(map(str, Path(__file__).parents[:3]))}
    with subprocess.Popen(program, stdout=subprocess.PIPE, env=os.environ | paths) as process:
        assert process.stdout is not None
        *pids, folder = process.stdout.readline().decode().split()
    worker, of_thread, server = map(int, pids)
    assert process.returncode == -signal.SIGKILL
    try:
        deadline = time.monotonic() + 10
        while is_running(worker) or Path(folder).exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        # The kernel would end the other one with its thread, not with its process.
        assert is_running(of_thread)
        assert is_running(server)
    finally:
        for pid in (of_thread, server):
            os.kill(pid, signal.SIGKILL)


def test_the_end_of_a_child_is_seen_at_once():
    with subprocess.Popen(["sleep", "60"]) as child:
        begin = time.monotonic()
        children.wait_for_one([child.pid], 0.05)
        assert time.monotonic() - begin >= 0.05
        assert children.exit_code(child.pid) is None
        child.kill()
        children.wait_for_one([child.pid], 60)
        assert children.exit_code(child.pid) == -signal.SIGKILL
        assert time.monotonic() - begin < 30
    children.wait_for_one([child.pid], 0.05)  # it is gone
    assert children.exit_code(child.pid) == 0  # whoever has waited for it knows better
