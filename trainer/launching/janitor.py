"""Who ends and removes what ranks leave behind, also when this process is killed.

It is a small shell in a session of its own, at the other end of a pipe. Its work begins when it is
told to, or when nobody holds this end of the pipe any more.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# A group first gets SIGTERM, which multiprocessing's resource tracker ignores: it ends by itself,
# and removes semaphores, when the other processes of its group have ended.
_SCRIPT = """
groups=
trap '' TERM INT HUP USR1
while read -r line && [ "$line" != end ]; do groups=$line; done
send() { for group in $groups; do kill -s $1 -- -$group; done; }
alive() {
    for stat in /proc/[0-9]*/stat; do
        read -r line < $stat && set -- ${line##*) }  # its state, its parent, its group
        [ "$1" != Z ] && case " $groups " in *" $3 "*) return 0; esac
    done
    return 1
}
for group in $groups; do kill -s KILL $group; done
send TERM
for wait in 0.05 0.1 0.2 0.5 1 0; do alive || break; sleep $wait; done
send KILL
while read -r pid; do
    for file in /dev/shm/torch_"$pid"_*; do [ -e "$file" ] && rm -f "$file"; done
done < "$1/pids"
for wait in 0.5 2 0; do rm -rf "$1" && exit; sleep $wait; done
"""

_PATIENCE_S = 10.0  # with the shell, which needs a few seconds at most

_pipes: set[int] = set()


def note(folder: str) -> None:
    """Have the janitor who removes ``folder`` remove what this process leaves in shared memory.

    That is a tensor which it was about to send when it was killed.
    """
    # Gone are the folders of a parent that was killed, and old ones where /tmp is cleaned.
    with suppress(FileNotFoundError), open(f"{folder}/pids", "a") as file:
        file.write(f"{os.getpid()}\n")


class Janitor:
    """Cleans up after processes that may be killed.

    Attributes:
        folder: A new temporary folder, which it removes.
    """

    def __init__(self, prefix: str = "trainer-", place: Path | None = None) -> None:
        """Make the folder and start the shell.

        Args:
            prefix: Begins the folder's name.
            place: Where the folder is; None is where temporary files go.
        """
        self.folder = tempfile.mkdtemp(prefix=prefix, dir=place)
        end, self._pipe = os.pipe()
        _pipes.add(self._pipe)
        self._shell = subprocess.Popen(
            ["sh", "-c", _SCRIPT, "trainer-janitor", self.folder],
            stdin=end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        os.close(end)

    def watch(self, leaders: Iterable[int]) -> None:
        """From now on clean up after these process groups, and after no others."""
        leaders = list(leaders)
        assert all(leader > 1 for leader in leaders), "group -1 would be every process"
        self._tell(" ".join(map(str, leaders)))

    def clean(self) -> None:
        """End the process groups and remove the folder, now."""
        self._tell("end")
        _pipes.discard(self._pipe)
        os.close(self._pipe)
        try:
            self._shell.wait(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:  # somebody has stopped it
            self._shell.kill()
            self._shell.wait()
        shutil.rmtree(self.folder, ignore_errors=True)  # it is there only if the shell was killed

    def dismiss(self) -> None:
        """Let the process groups be, and remove the folder."""
        self.watch([])
        self.clean()

    def _tell(self, line: str) -> None:
        with suppress(BrokenPipeError):  # the shell was killed
            os.write(self._pipe, f"{line}\n".encode())


def _forget() -> None:
    """In a forked process: it must not keep the pipes open."""
    while _pipes:
        os.close(_pipes.pop())


os.register_at_fork(after_in_child=_forget)
