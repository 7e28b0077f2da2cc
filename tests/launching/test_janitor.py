"""What is left of processes is ended and removed."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support import is_running

from trainer.launching import janitor
from trainer.launching.janitor import Janitor


class Group:
    """A process group that ignores SIGTERM: a leader and its child."""

    def __init__(self):
        script = "trap '' TERM; sleep 60 & echo $!; wait"
        self.leader = subprocess.Popen(
            ["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True
        )
        self.pids = [self.leader.pid, int(self.leader.stdout.readline())]

    def running(self):
        self.leader.poll()
        return [pid for pid in self.pids if is_running(pid)]

    def end(self):
        for pid in self.running():
            os.kill(pid, signal.SIGKILL)
        self.leader.wait()
        self.leader.stdout.close()


@pytest.fixture
def groups():
    made = [Group(), Group()]
    yield made
    for group in made:
        group.end()


def test_process_groups_are_ended_and_nothing_is_left(groups):
    group, other = groups
    cleaner = Janitor()
    Path(cleaner.folder, "sockets").mkdir()
    ours = Path(f"/dev/shm/torch_{os.getpid()}_1_0")  # as torch names it
    others = Path(f"/dev/shm/torch_{os.getpid()}0_1_0")
    for file in (ours, others):
        file.touch()
    try:
        janitor.note(cleaner.folder)
        cleaner.watch(other.pids)
        cleaner.watch([group.leader.pid])
        cleaner.clean()
        assert not group.running()
        assert len(other.running()) == 2
        assert not ours.exists()
        assert others.exists()
        assert not Path(cleaner.folder).exists()
    finally:
        for file in (ours, others):
            file.unlink(missing_ok=True)


def test_what_is_meant_to_run_is_left_alone(groups):
    group, _ = groups
    cleaner = Janitor()
    cleaner.watch([group.leader.pid])
    cleaner.dismiss()
    assert not Path(cleaner.folder).exists()
    assert len(group.running()) == 2


def test_every_process_of_the_machine_is_no_group():
    cleaner = Janitor()
    with pytest.raises(AssertionError):
        cleaner.watch([1])
    cleaner.dismiss()


def test_forked_process_does_not_keep_the_janitor_waiting():
    cleaner = Janitor()
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        janitor._pipes.discard(cleaner._pipe)
        os.close(cleaner._pipe)  # as if this process had ended
        cleaner._shell.wait(timeout=20)
        assert not Path(cleaner.folder).exists()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_janitor_that_somebody_has_stopped_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(janitor, "_PATIENCE_S", 0.2)
    cleaner = Janitor()
    os.kill(cleaner._shell.pid, signal.SIGSTOP)
    cleaner.clean()
    assert not Path(cleaner.folder).exists()
    assert cleaner._shell.returncode == -signal.SIGKILL
