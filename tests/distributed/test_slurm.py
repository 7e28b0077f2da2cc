"""Under the real SLURM, on this machine alone: its daemons run for these tests only."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running import ENV, SCRIPT, TESTS, clean_environ, fit_here, logged

pytestmark = [pytest.mark.opt_in, pytest.mark.timeout(400)]

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "scancel")
REQUEUE_S = 11  # after which SLURM starts a job again: that long its credentials are good, plus 1
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthInfo=socket={folder}/munge.socket,cred_expire={expires}
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=30
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """A SLURM cluster of one machine with four processors."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.folder, self.work = folder, work
        self.env = {**clean_environ(), **ENV, "SLURM_CONF": str(folder / "slurm.conf")}
        self.program = [sys.executable, str(SCRIPT), "-"]

    def run(self, *command: str, within_s: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.work,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )

    def submit(self, *lines: str) -> tuple[str, Path]:
        """Queue a batch script that runs the program; return the job's id and its output."""
        script = self.work / "job.sh"
        directives = "".join(f"#SBATCH {line}\n" for line in lines)
        command = " ".join(["srun", *self.program])
        script.write_text(f"#!/bin/sh\n{directives}{command}\necho CODE $?\n")
        done = self.run("sbatch", "--parsable", "--output=%j.out", "--open-mode=append", "job.sh")
        assert done.returncode == 0, done.stderr
        job = done.stdout.strip()
        return job, self.work / f"{job}.out"


def wait_for(text: str, output: Path, within_s: float = 120) -> str:
    deadline = time.monotonic() + within_s
    while True:
        said = output.read_text() if output.exists() else ""
        if text in said:
            return said
        assert time.monotonic() < deadline, f"not {text!r}:\n{said}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"SLURM needs {', '.join(missing)} (Debian's packages slurm-wlm and munge)")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    ports = [free_port(), free_port()]
    config = CONFIG.format(
        folder=folder, host=socket.gethostname(), ports=ports, expires=REQUEUE_S - 1
    )
    (folder / "slurm.conf").write_text(config)
    subprocess.run(["mungekey", "-c", "-k", folder / "key"], check=True)
    own = [f"--{name}={folder}/munge.{name}" for name in ("socket", "pid-file", "log-file")]
    own += [f"--seed-file={folder}/munge.seed", f"--key-file={folder}/key"]
    with_config = ["-D", "-f", str(folder / "slurm.conf")]
    commands = [
        ["munged", "--foreground", "--force", *own],
        ["slurmctld", *with_config],
        ["slurmd", *with_config],
    ]
    started = []
    try:
        for command in commands:
            output = (folder / f"{command[0]}.out").open("w")
            with output:
                started.append(subprocess.Popen(command, stdout=output, stderr=output))
            if command[0] == "munged":
                wait_until((folder / "munge.socket").exists)
        yield folder
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(30)


@pytest.fixture
def cluster(daemons: Path, tmp_path: Path) -> Cluster:
    found = Cluster(daemons, tmp_path)
    wait_until(lambda: "idle" in found.run("sinfo", "--noheader").stdout)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_tasks_of_srun_train_as_one_process_does(cluster: Cluster) -> None:
    done = cluster.run("srun", "--ntasks=2", "--job-name=line", *cluster.program)
    assert done.returncode == 0, done.stdout + done.stderr
    started = "launcher: 2 processes, started by slurm (srun started this process as task 0)"
    assert started in done.stdout
    weights, events = fit_here(cluster.work)
    assert sorted(x for x in done.stdout.splitlines() if x.startswith("ENDED")) == sorted(
        [f"ENDED {weights} 24", f"ENDED {weights} None"]
    )
    (run_dir,) = (cluster.work / "runs").iterdir()
    assert run_dir.name.startswith("line-")
    assert logged(run_dir) == events


@pytest.mark.parametrize("ended_by", ["time limit", "scancel", "requeue"])
def test_a_job_is_saved_queued_again_and_goes_on(ended_by: str, cluster: Cluster) -> None:
    is_limited = ended_by == "time limit"
    (cluster.work / "pace").write_text("2" if is_limited else "0.2")
    cluster.program.append("max_steps=60")
    # SLURM sends the signal up to a minute early, and counts in minutes: after one or two of them.
    limit = ["--time=3", "--signal=USR1@60"] if is_limited else []
    job, output = cluster.submit("--ntasks=2", "--job-name=line", "--requeue", *limit)
    wait_for("STEP 7 of 2", output)
    if ended_by == "scancel":
        cluster.run("scancel", "--signal=USR1", job)
    elif ended_by == "requeue":
        cluster.run("scontrol", "requeue", job)
    said = wait_for("restarting from", output, within_s=240)
    if ended_by != "requeue":  # else SLURM knows already
        assert "stopped by SIGUSR1 at step" in said
        assert f"scontrol requeue {job}: the job is queued again" in said
    (cluster.work / "pace").write_text("0")
    said = wait_for("CODE 0", output)
    weights, events = fit_here(cluster.work, max_steps=60)
    assert f"ENDED {weights} 60" in said
    assert logged(cluster.work / "runs" / f"line-{job}") == events


PAGE = (TESTS.parent / "docs" / "multi-node.md").read_text(encoding="utf-8")
SCRIPTS = [text for text in re.findall(r"```bash\n(.*?)```", PAGE, re.S) if "#SBATCH" in text]


@pytest.mark.parametrize("script", SCRIPTS, ids=["srun", "torchrun"])
def test_scripts_of_the_page_run(script: str, cluster: Cluster) -> None:
    """As they stand, but on the one machine that there is, without a GPU."""
    script = re.sub(r"#SBATCH --(gpus|cpus|time).*\n", "", script)
    for many, few in {"nodes=2": "nodes=1", "-node=8": "-node=2"}.items():
        script = script.replace(many, few)
    small = "recipes.mnist experiment=smoke trainer.max_steps=4"
    script = script.replace("recipes.mnist", small)
    python = Path(sys.executable).parent
    (cluster.work / "job.sh").write_text(script)
    cluster.env["PATH"] = f"{python}:{cluster.env['PATH']}"
    done = cluster.run("sbatch", "--wait", "--output=out", "job.sh")
    said = (cluster.work / "out").read_text()
    assert done.returncode == 0, done.stderr + said
    assert said.count("launcher: 2 processes, started by") == said.count("done        4 steps") == 1


def test_what_nobody_starts_as_several_is_one_process(cluster: Cluster) -> None:
    """A batch script, and a shell in an allocation, have SLURM's variables too."""
    train = [*cluster.program, "max_steps=2"]
    hint = "1 process, this one; SLURM has 2 tasks for this job: srun starts them; cpu"
    shell = cluster.run("salloc", "--ntasks=2", *train)
    assert hint in shell.stdout, shell.stderr
    (run_dir,) = (cluster.work / "runs").iterdir()
    assert run_dir.name[:2] == "20"  # the date: another run in the shell gets another folder

    (cluster.work / "job.sh").write_text("#!/bin/sh\n" + " ".join(train) + "\n")
    done = cluster.run("sbatch", "--wait", "--parsable", "--ntasks=2", "--output=out", "job.sh")
    assert hint in (cluster.work / "out").read_text()
    assert (cluster.work / "runs" / f"job.sh-{done.stdout.strip()}").is_dir()
