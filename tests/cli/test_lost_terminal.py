"""A sweep whose terminal is closed, and signals of clusters: as after SIGTERM, runs are saved and the command continues."""

import contextlib
import os
import pty
import shlex
import signal
import subprocess
import sys
import time

import psutil
import pytest

from cope_sweep.store import Store
from tests.cli.conftest import TINY
from tests.helpers.processes import until

pytestmark = pytest.mark.slow  # trains

SECONDS = 120
ENDLESS = TINY.replace("steps: 6", "steps: 1000000").replace("every: 3", "every: 100000").replace("CoPE: [cope], ", "")
ENDLESS = ENDLESS.replace("seeds: [0, 1]", "seeds: [0]\nresources: {groups: 1, checkpoint_every_s: 3600}")
ON_RAY = "--groups=1"
EXECUTORS = pytest.mark.parametrize("executor", ["--local", pytest.param(ON_RAY, marks=pytest.mark.thorough)])


def step_of(shell):
    """The last step that the only run has logged; 0 before there is one. The index would have it seconds later."""
    if not (shell.folder / "store" / "runs").exists():
        return 0
    curves = [folder.curve() for folder in Store(shell.folder / "store").run_folders()]
    return max((curve[-1]["step"] for curve in curves if curve), default=0)


def in_terminal(shell, command):
    """Start a shell command as the leader of a session with a terminal: its process, and the terminal's other side."""
    master, slave = pty.openpty()

    def take_terminal():
        os.setsid()
        os.close(os.open(os.ttyname(slave), os.O_RDWR))  # becomes the terminal of the session

    process = subprocess.Popen(
        command, cwd=shell.folder, env=shell.environment | {"TERM": "xterm"}, stdin=slave, stdout=slave, stderr=slave,
        preexec_fn=take_terminal,
    )  # fmt: skip
    os.close(slave)
    return process, master


def read_until(master, condition):
    """Read what is shown, as a terminal does, until the condition holds."""
    end = time.monotonic() + SECONDS
    os.set_blocking(master, False)
    while not condition():
        assert time.monotonic() < end
        with contextlib.suppress(OSError):  # nothing to read, or nobody writes
            os.read(master, 1 << 16)
        time.sleep(0.1)  # each look takes time from the command, which has yet to start


def run_command(executor):
    return [sys.executable, "-m", "cope_sweep.cli", "run", "tiny", executor, "--no-mlflow"]


def saved_step(shell):
    """The step at which the only run was saved, after its sweep has ended."""
    store = Store(shell.folder / "store")
    (folder,) = store.run_folders()
    assert folder.state["status"] == "interrupted"
    assert folder.resume.exists()
    (record,) = store.index.records(store.index.statuses()).values()
    assert record.status == "interrupted"
    assert store.index.leases([record.run_id]) == {}
    assert {sweep.status for sweep in store.index.sweeps()} == {"interrupted"}
    return record.step


@EXECUTORS
@pytest.mark.parametrize("shape", ["alone", "in a shell", "with a pipe"])
def test_a_closed_terminal_saves_runs_and_the_same_command_continues(shell, executor, shape):
    """Also as the job of a shell, which sends the signal once more; and where nobody reads its output any more."""
    shell.write("tiny", ENDLESS)
    words = run_command(executor)
    if shape == "alone":
        command = words
    else:
        script = f"{shlex.join(words)} {'2>&1 | cat' if shape == 'with a pipe' else ''}; echo ended"
        command = ["bash", "-i", "-c", script]
    process, master = in_terminal(shell, command)
    read_until(master, lambda: step_of(shell) >= 5)
    children = psutil.Process(process.pid).children(recursive=True)
    os.close(master)
    code = process.wait(timeout=SECONDS)
    if shape == "alone":
        assert code == 130
    psutil.wait_procs(children, timeout=SECONDS)
    assert not [each for each in children if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    reached = saved_step(shell)
    assert reached >= 5

    again = words[3:]
    if executor == ON_RAY:
        process = shell.start(*again)
        until(lambda: step_of(shell) > reached, SECONDS)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 130, err
        assert saved_step(shell) > reached
    else:

        def trains_further():
            """Continue in this process, which starts sooner. A first call may only come to import torch."""
            shell(*again, "--time-budget", "2s", code=130)
            return saved_step(shell) > reached

        until(trains_further, SECONDS)
    (folder,) = Store(shell.folder / "store").run_folders()
    assert "continues after step" in folder.log_text()


@pytest.mark.parametrize(
    ("executor", "signum"),
    [
        ("--local", signal.SIGUSR1),
        pytest.param(ON_RAY, signal.SIGUSR1, marks=pytest.mark.thorough),
        pytest.param(ON_RAY, signal.SIGHUP, marks=pytest.mark.thorough),
    ],
)
def test_a_signal_to_all_processes_of_a_job_saves_runs(shell, executor, signum):
    """Slurm sends SIGUSR1 to every process of a step; Ray's own processes have to survive it, and a repetition."""
    shell.write("tiny", ENDLESS)
    process = shell.start(*run_command(executor)[3:], start_new_session=True, stderr=subprocess.DEVNULL)
    until(lambda: step_of(shell) >= 5, SECONDS)
    os.killpg(process.pid, signum)
    time.sleep(0.02)
    os.killpg(process.pid, signum)
    process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert saved_step(shell) >= 5


def test_nohup_goes_on_without_its_terminal(shell):
    shell.write("tiny", ENDLESS)
    process, master = in_terminal(shell, ["nohup", *run_command("--local")])
    read_until(master, lambda: step_of(shell) >= 5)
    os.close(master)
    before = step_of(shell)
    until(lambda: step_of(shell) > before + 100, SECONDS)  # a run that a signal ends makes a few steps more at most
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=SECONDS) == 130
    assert saved_step(shell) > before
