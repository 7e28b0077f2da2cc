"""Stacks of processes that do not run Python."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import threading
import time
from pathlib import Path

from trainer import api
from trainer.diagnosis import stacks
from trainer.launching import joining, launcher, rank


def blocked() -> None:
    ctypes.PyDLL(None).usleep(30_000_000)  # holds the GIL


def dive(depth: int) -> None:
    blocked() if depth == 0 else deeper(depth - 1)


def deeper(depth: int) -> None:
    dive(depth)


def test_stack_of_a_process_that_holds_the_gil(tmp_path: Path) -> None:
    path = tmp_path / "dumps"
    path.touch()
    child = os.fork()
    if child == 0:
        stacks.dump_on_signal(path.open("a"))
        threading.Thread(target=queue.Queue().get, daemon=True).start()  # waits for work
        dive(30)
    text, tries = "", 0
    while "in blocked" not in text and tries < 100:
        time.sleep(0.05)
        found, tries = stacks.of_another(child, path), tries + 1
        text = stacks.described(found)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(found) == 2
    assert text.endswith("in blocked\n    ctypes.PyDLL(None).usleep(30_000_000)  # holds the GIL\n")
    assert " more ...\n" in text
    assert text.count("in dive") < 15
    assert "another thread" not in text


def test_a_process_that_would_die_of_the_signal_is_left_alone(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        signal.pause()
    assert stacks.of_another(child, tmp_path / "none") == []
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_other_threads_of_this_process_that_do_something() -> None:
    go, done = threading.Event(), threading.Event()

    def works() -> None:
        go.set()
        while not done.is_set():
            sum(range(1000))

    working = threading.Thread(target=works)
    working.start()
    go.wait()
    found: list[str] = []
    asks = threading.Thread(target=lambda: found.append(stacks.described(stacks.of_this_process())))
    asks.start()
    asks.join()
    done.set()
    working.join()
    assert "in test_other_threads" in found[0].partition("  in another thread:\n")[0]
    assert "in works" in found[0].partition("  in another thread:\n")[2]


def test_the_way_to_the_job_is_known() -> None:
    """The files in which a rank's job is called, wherever they lie."""
    for module in (api, launcher, joining, rank):
        assert stacks._JOB_STARTS.search(str(module.__file__)), module
