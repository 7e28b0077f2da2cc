"""Real ranks: what they return, how they fail, and that nothing of them stays behind."""

import json
import os
import re
import signal
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from program import Program

pytestmark = pytest.mark.timeout(600)  # many programs are run in one fixture

SCRIPT = Path(__file__).with_name("launched.py")
SOON_S = 30  # for what comes at once, on a busy machine; else it would take a minute or more


def scenario(name, folder, *args, method="fork"):
    command = [sys.executable, "-W", "error::UserWarning", str(SCRIPT), name, *args]
    forced = {} if method is None else {"TRAINER_START_METHOD": method}
    return Program(command, folder, **forced)


def times(word, stdout):
    """The moments that the program printed under this word, on this machine's one clock."""
    return [float(time) for time in re.findall(rf"{word} AT (\S+)", stdout)]


STARTED = "launcher: 2 processes on this machine, started here"

WAYS_TO_FAIL = ["own", "deaf", "unpicklable", "exit", "leave", "die", "kill", "stop"]

# Those that end by themselves, by the folder in which they are started.
PROGRAMS = {
    "notebook": lambda folder: notebook(folder),
    "caught": lambda folder: scenario("caught", folder, *WAYS_TO_FAIL),
    "train": lambda folder: scenario("train", folder, method=None),
    "once per machine": lambda folder: scenario("once_per_machine", folder),
    "two launches": lambda folder: scenario("two_launches", folder, method=None),
    "torchrun": lambda folder: torchrun("fail_under_launcher", folder),
    "values": lambda folder: scenario("values", folder),
    "busy parent": lambda folder: scenario("busy_parent", folder),
    "ends": lambda folder: scenario("ends", folder),
    "module": lambda folder: module(folder),
    "uncaught": lambda folder: scenario("uncaught", folder),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Each of these programs: exit code, output, errors, and when it was over; two at a time."""

    def end(name, folder):
        program = PROGRAMS[name](folder)
        # Torchrun leaves a folder of logs.
        return *program.end(within=200, files=int(name == "torchrun")), time.monotonic()

    folders = [tmp_path_factory.mktemp("program") for _ in PROGRAMS]  # not safe in threads
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(PROGRAMS, pool.map(end, PROGRAMS, folders), strict=True))


def test_values_come_back_from_launch_after_launch_without_a_guard(ended):
    code, stdout, stderr, _ = ended["values"]
    assert (code, stderr) == (0, "")
    assert stdout == f"{STARTED} (fork); gloo on cpu\n" * 2 + "VALUES ARE RIGHT\n"


def test_fresh_ranks_train_a_task_of_the_main_module_and_are_started_again(ended):
    code, stdout, stderr, _ = ended["train"]
    assert code == 0
    died = "error: rank 1 ended with exit code 9 before its work was done\nrestart 1 of 1\n"
    assert stderr == died
    reason = "fresh interpreters, because CUDA is in use in this process"
    assert stdout.count(f"{STARTED} ({reason}); gloo on cpu\n") == 2
    assert stdout.endswith("TRAINED\n")


def test_failing_rank_ends_the_run_and_is_shown_once(ended):
    code, stdout, stderr, over = ended["uncaught"]
    (failed,) = times("FAILS", stdout)
    assert over - failed < SOON_S  # the others wait in a collective of five minutes
    assert code == 1
    assert stderr.count("rank 1, step 12:") == 1
    assert stderr.count("in fail_on_rank_1") == 1
    assert stderr.rstrip().endswith("OwnError: rank one is unwell")
    assert "Connection" not in stderr
    assert "elastic" not in stderr


def test_callers_get_the_ranks_own_exceptions(ended):
    code, stdout, stderr, _ = ended["caught"]
    assert (code, stderr) == (0, "")
    assert "ERRORS ARE RIGHT" in stdout
    failed, caught = times("FAILS", stdout), times("CAUGHT", stdout)
    assert len(failed) == len(caught) == len(WAYS_TO_FAIL)
    assert all(after - before < SOON_S for before, after in zip(failed, caught, strict=True))


@pytest.mark.parametrize(("method", "whole_group"), [("fork", True), ("fresh", False)])
def test_ctrl_c_ends_the_ranks_and_interrupts_the_caller(tmp_path, method, whole_group):
    program = scenario("wait", tmp_path, method=method)
    program.wait_until_ready()
    # The caller, its janitor, two ranks and their loaders' workers.
    assert len(program.processes()) == 6
    send = os.killpg if whole_group else os.kill
    send(program.process.pid, signal.SIGINT)
    code, _, stderr = program.end(within=SOON_S)
    assert code == -signal.SIGINT  # a shell shows 130
    assert stderr.count("Traceback") == 1
    assert stderr.rstrip().endswith("KeyboardInterrupt")


def test_ctrl_z_stops_the_ranks_too_and_they_go_on(tmp_path):
    program = scenario("wait", tmp_path)
    program.wait_until_ready()
    ranks = [pid for pid in program.processes() if parent_of(pid) == program.process.pid]
    assert len(ranks) >= 2
    os.kill(program.process.pid, signal.SIGTSTP)
    wait_until(lambda: state_of(program.process.pid) == "T")
    wait_until(lambda: [state_of(pid) for pid in ranks].count("T") == 2)  # the janitor is not
    os.kill(program.process.pid, signal.SIGCONT)
    wait_until(lambda: all(state_of(pid) != "T" for pid in [program.process.pid, *ranks]))
    os.kill(program.process.pid, signal.SIGTERM)
    assert program.end(within=SOON_S)[0] == -signal.SIGTERM


def wait_until(holds):
    deadline = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def parent_of(pid):
    return int(fields_of(pid)[1])


def state_of(pid):
    return fields_of(pid)[0]


def fields_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def test_terminated_caller_takes_the_ranks_with_it(tmp_path):
    program = scenario("wait", tmp_path)
    program.wait_until_ready()
    for _ in range(3):
        os.kill(program.process.pid, signal.SIGTERM)
    code, _, stderr = program.end(within=SOON_S)
    assert (code, stderr) == (-signal.SIGTERM, "")  # a shell shows 143


@pytest.mark.parametrize("method", ["fork", "fresh"])
def test_nothing_survives_a_killed_caller(tmp_path, method):
    program = scenario("children", tmp_path, "fork", "fork", method=method)
    program.wait_until_ready()
    program.process.kill()
    code, _, stderr = program.end(within=SOON_S)
    assert (code, stderr) == (-signal.SIGKILL, "")


def test_nothing_survives_a_killed_rank(tmp_path):
    program = scenario("children", tmp_path, "fork", "spawn")
    ranks = [int(pid) for pid in program.wait_until_ready().split()[-3:-1]]
    os.kill(ranks[1], signal.SIGKILL)
    code, _, stderr = program.end(within=SOON_S)
    assert code == 1
    assert "rank 1 was killed by SIGKILL" in stderr.splitlines()[-1]
    assert stderr.count("Traceback") == 1  # the caller's
    assert "leaked" not in stderr


def test_torchrun_starts_ranks_again_and_nothing_survives_if_it_is_killed(tmp_path):
    program = torchrun("restarted", tmp_path, max_restarts=1)
    told = program.wait_until_ready()
    assert "restarting from" in told
    program.process.kill()
    assert program.end(within=SOON_S, files=1)[0] == -signal.SIGKILL
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == [3, 6, 9]


def test_ranks_of_a_busy_parent_do_not_hang(ended):
    code, stdout, stderr, _ = ended["busy parent"]
    assert (code, stderr) == (0, "")
    assert "NO HANG" in stdout


def test_of_two_launches_at_once_in_one_process_only_one_forks(ended):
    code, stdout, stderr, _ = ended["two launches"]
    assert (code, stderr) == (0, "")
    others = "fresh interpreters, because this process runs other ranks too"
    lines = [f"{STARTED} ({how}); gloo on cpu" for how in ("fork", others, "fork")]
    assert stdout.splitlines() == [*lines, "ALL ARE DONE"]


def test_all_is_done_however_the_ranks_end(ended):
    code, stdout, stderr, _ = ended["ends"]
    assert code == 0
    started = f"{STARTED} (fork); gloo on cpu"
    assert stdout.splitlines() == [started, "THREAD OF RANK 0 IS THROUGH", started, "ENDED"]
    still = "still ran after timeout_s=1: it ends with the rank"
    assert stderr == f"rank 1 is done, but its thread 'server' {still}\n"


def test_work_once_per_machine_may_be_long_and_its_error_reaches_all(ended):
    code, stdout, stderr, _ = ended["once per machine"]
    assert (code, stderr) == (0, "")
    assert "ONCE" in stdout


def module(folder):
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "helper.py").write_text("def total(values):\n    return sum(values)\n")
    (package / "main.py").write_text(
        textwrap.dedent("""
            from trainer import distributed
            from trainer.config import TrainerConfig
            from trainer.launching.launcher import launch

            def job():
                from . import helper

                return helper.total(distributed.all_gather_object(distributed.rank() + 1))

            print("total", launch(job, config=TrainerConfig(devices=2, accelerator="cpu")))
        """)
    )
    command = [sys.executable, "-m", "package.main"]
    return Program(command, folder, TRAINER_START_METHOD="fresh")


def test_program_run_as_a_module(ended):
    code, stdout, stderr, _ = ended["module"]
    assert (code, stderr) == (0, "")
    assert "total 3" in stdout


def notebook(folder):
    cells = [
        """
        import os
        import torch
        from trainer import TaskModule, Trainer

        class CellError(ValueError):
            pass

        class Line(TaskModule):
            def __init__(self, fails=False):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.zeros(()))
                self.fails = fails

            def forward(self, batch):
                return batch * self.weight

            def loss(self, outputs, batch):
                if self.fails and self.run.rank == 1:
                    raise CellError("from a cell")
                return (outputs - 2 * batch).square().mean()

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=1.0)

        points = torch.linspace(0, 1, 10)
        options = {"accelerator": "cpu", "logger": False, "run_dir": "run"}
        trainer = Trainer(devices=2, global_batch_size=4, max_epochs=3, **options)
        """
    ]
    for method in ("fork", "fresh"):
        cells += [
            f"""
            os.environ["TRAINER_START_METHOD"] = {method!r}
            task = Line()
            result = trainer.fit(task, train=points, val=points)
            print("trained", result.step, abs(task.weight.item() - 2) < 0.2, *result.metrics)
            """,
            """
            try:
                trainer.fit(Line(fails=True), train=points, val=points)
            except CellError as error:
                print("caught", error)
            """,
        ]
    program = f"""
import nbclient, nbformat.v4 as v4, textwrap
cells = [v4.new_code_cell(textwrap.dedent(cell)) for cell in {cells!r}]
notebook = v4.new_notebook(cells=cells)
nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
print("WHAT THE CELLS SHOW")
for cell in notebook.cells:
    for output in cell.outputs:
        print(output.get("text", output), end="")
"""
    folders = {"IPYTHONDIR": str(folder), "JUPYTER_RUNTIME_DIR": str(folder)}
    return Program([sys.executable, "-c", program], folder, **folders)


def test_notebook(ended):
    """A task defined in a cell is trained, an error of a cell's class comes back, and so again."""
    code, stdout, stderr, _ = ended["notebook"]
    assert code == 0, stderr
    stdout = stdout.partition("WHAT THE CELLS SHOW\n")[2]
    trained = [line for line in stdout.splitlines() if line.startswith("trained 9 True")]
    assert len(trained) == 2
    assert all("val/loss" in line for line in trained)
    assert stdout.count("caught from a cell") == 2
    # What a rank prints is seen in the cell.
    assert len(re.findall("done +9 steps, 3 epochs", stdout)) == 2
    assert "warn" not in stdout.lower()


def torchrun(name, folder, *args, **options):
    """Run a scenario under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(SCRIPT), name, *args]
    return Program(command, folder)


def test_torchruns_ranks_are_used_as_they_are_and_their_failure_is_shown_once(ended):
    code, stdout, stderr, over = ended["torchrun"]
    assert "RANK 0 IS RIGHT" in stdout
    assert "RANK 1 IS RIGHT" in stdout
    start = "launcher: 2 processes, started by torchrun (TORCHELASTIC_RUN_ID is set"
    # From rank 0, one for each launch.
    assert stdout.count(f"{start}; not used: devices=5, num_nodes=3); gloo on cpu") == 2
    assert stdout.count(f"{start}); gloo on cpu") == 1

    (failed,) = times("FAILS", stdout)
    assert over - failed < SOON_S
    assert code == 1
    assert stderr.count("rank 1, step 12:") == 1
    assert stderr.count("OwnError: rank one is unwell") == 1
    assert stderr.count("rank 0, step 12: ends because another rank did") <= 1


def test_sruns_tasks_find_each_other(tmp_path):
    shared = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "MASTER_ADDR": "localhost",
        "SLURM_NODEID": "0",
    }
    tasks = [
        Program(
            [sys.executable, str(SCRIPT), "under_launcher"],
            tmp_path,
            **shared,
            SLURM_PROCID=str(n),
            SLURM_LOCALID=str(n),
        )
        for n in range(2)
    ]
    for number, task in enumerate(tasks):
        code, stdout, stderr = task.end(within=60)
        assert (code, stderr) == (0, "")
        assert f"RANK {number} IS RIGHT" in stdout
        assert f"RANK {number} LEAVES []" in stdout  # its threads could abort it
