"""Loader workers and the like end with the process that started them."""

import os
import signal
import threading
import time
from pathlib import Path

from support import is_running

from trainer import children


def fork_sleeper():
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    return pid


def be_killed(tell):
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
    os.write(tell, f"{worker} {found[0]} {server} {folder}".encode())
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_process_takes_its_workers_along():
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            be_killed(tell)
        finally:
            os._exit(1)
    *pids, folder = os.read(told, 1000).decode().split()
    worker, of_thread, server = map(int, pids)
    os.close(told)
    os.close(tell)
    os.waitpid(child, 0)
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
