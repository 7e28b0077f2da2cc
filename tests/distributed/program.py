"""A program that a test starts, and what it leaves behind."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

from support import is_running

ROOT = Path(__file__).parents[2]


class Program:
    """A program in a process group of its own, whose processes and files can be found later."""

    def __init__(self, command, folder, **env):
        self.mark = f"TRAINER_TEST_MARK={uuid.uuid4()}"
        # Not in the folder: the path of a socket in it may have 107 characters.
        self.tmp = Path(tempfile.mkdtemp(prefix="test-"))
        self.shm = set(os.listdir("/dev/shm"))
        name, _, value = self.mark.partition("=")
        # A notebook's kernel behaves differently under pytest.
        ours = ("OMP_NUM_THREADS", "TRAINER_", "PYTEST_")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**inherited, "TMPDIR": str(self.tmp), "PYTHONPATH": paths, name: value, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_until_ready(self):
        """Wait for the word READY; return what was printed so far."""
        told = ""
        for line in self.process.stdout:
            told += line
            if line == "READY\n":
                return told
        raise AssertionError(f"never ready: {self.process.stderr.read()}")

    def end(self, within, files=0):
        """Wait for the program and all that it left behind; return (code, stdout, stderr)."""
        deadline = time.monotonic() + within
        try:
            stdout, stderr = self.process.communicate(timeout=within)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            for pid in self.processes():
                os.kill(pid, signal.SIGKILL)
            stdout, stderr = self.process.communicate()
            raise AssertionError(f"ran over {within} s: {stdout}\n{stderr}") from None
        while left := self.left(files):
            assert time.monotonic() < deadline, f"left after {within} s: {left}"
            time.sleep(0.05)
        shutil.rmtree(self.tmp)
        return self.process.returncode, stdout, stderr

    def left(self, files):
        """Return the processes, the shared memory and the files above ``files`` that are left."""
        # Importing torch's compiler makes a folder for its cache, whoever imports it.
        names = [p.name for p in self.tmp.iterdir() if not p.name.startswith("torchinductor_")]
        # Of torch's files, torch_PID_..., those of processes that run are other programs'.
        shared = [
            name
            for name in set(os.listdir("/dev/shm")) - self.shm
            if not (name.startswith("torch_") and is_running(int(name.split("_")[1])))
        ]
        return [*self.processes(), *shared, *names[files:]]

    def processes(self):
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes()
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if self.mark.encode() in environ and state != "Z":
                found.append(int(pid))
        return found
