from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support import on_ranks

from trainer import distributed, stopping
from trainer.stopping import STOP_SIGNALS, Agreement, Stop


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    stopping.forget()


def test_the_first_signal_counts() -> None:
    with stopping.noted():
        assert stopping.received() is None
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopping.received() == signal.SIGUSR1
    with stopping.noted():
        assert stopping.received() is None


def test_the_second_ctrl_c_interrupts(capfd: pytest.CaptureFixture[str]) -> None:
    with stopping.noted():
        os.kill(os.getpid(), signal.SIGINT)
        assert stopping.received() == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    told = "\nstopping after this step, and saving; Ctrl-C again stops at once\n"
    assert capfd.readouterr().err == told


def test_handlers_are_put_back_and_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    others = [signal.getsignal(number) for number in STOP_SIGNALS]
    try:
        with stopping.noted():
            os.kill(os.getpid(), signal.SIGTERM)
            assert stopping.received() is None
            assert signal.getsignal(signal.SIGINT) != others[0]
        assert [signal.getsignal(number) for number in STOP_SIGNALS] == others
    finally:
        signal.signal(signal.SIGTERM, before)


def test_processes_that_are_started_held_back_do_not_get_them() -> None:
    program = "print('READY', flush=True); input(); print('ALIVE')"
    with stopping.held_back():
        child = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    assert child.stdout is not None
    assert child.stdout.readline() == "READY\n"
    for number in STOP_SIGNALS:
        child.send_signal(number)
    assert child.communicate("\n", timeout=20) == ("ALIVE\n", None)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {*STOP_SIGNALS}


def agreements() -> Any:
    """Agree in steps of 10 ms, with a signal on rank 1 in step 50; rank 1 asks for nothing."""
    agreement = Agreement(0)
    agreed, rank = [], distributed.rank()
    for step in range(400):
        if step == 50 and rank == 1:
            stopping.note(signal.SIGTERM)
        if agreement.is_due(step):
            first = rank == 0 and not agreed
            agreed.append((step, agreement.reach(step, stop=first, save=first)))
            if agreed[-1][1].signal is not None:
                break
        time.sleep(0.01)
    try:
        stopping.check()
    except Stop:
        return agreed
    return None


def test_ranks_agree_at_the_same_steps_about_a_second_apart() -> None:
    found, other = on_ranks(2, agreements)
    assert found == other
    steps = [step for step, _ in found]
    assert len(steps) < 8
    assert max(after - before for before, after in pairwise(steps)) <= 120
    decisions = [decision for _, decision in found]
    assert decisions[0] == (True, True, None)
    assert set(decisions[1:-1]) == {(False, False, None)}
    assert decisions[-1] == (False, False, signal.SIGTERM)
    assert 50 <= steps[-1] <= 170


def test_a_resumed_run_does_not_count_the_steps_before() -> None:
    agreement = Agreement(1000)
    assert agreement.is_due(1000)
    agreement.reach(1000, stop=False, save=False)
    assert agreement.is_due(1001)


def test_a_ctrl_c_after_another_signal_interrupts_at_the_second(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with stopping.noted():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stopping.received() == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err.count("Ctrl-C") == 1


def test_one_rank_alone_need_not_wait_for_an_agreed_step() -> None:
    agreement = Agreement(0)
    agreement.reach(1000, stop=False, save=False)
    assert not agreement.is_due(1001)
    stopping.note(signal.SIGTERM)
    assert agreement.is_due(1001)
    with pytest.raises(Stop):
        stopping.check()


def test_the_end_of_a_process(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        stopping.end_process(signal.SIGTERM, 7, Path("saved"))
    assert ended.value.code == 143
    assert capsys.readouterr().err == "stopped by SIGTERM at step 7; checkpoint: saved\n"
    with pytest.raises(KeyboardInterrupt):
        stopping.end_process(signal.SIGINT, 7, None)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("exit 0", "scontrol requeue 5: the job is queued again"),
        ("echo no >&2; exit 1", "scontrol requeue 5: refused: no"),
        (None, "SLURM's scontrol is not here, so the job is not queued again"),
    ],
)
def test_a_slurm_job_is_queued_again(
    script: str | None,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("PATH", str(tmp_path))
    if script is not None:
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "scontrol").chmod(0o755)
    with pytest.raises(SystemExit):
        stopping.end_process(signal.SIGUSR1, 7, None)
    assert capsys.readouterr().err.splitlines()[1:] == [told]
