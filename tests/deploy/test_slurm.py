"""deploy/slurm: the job is executed with commands of Slurm and Ray that record their arguments. No test starts Slurm."""

import contextlib
import fcntl
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray.scripts.scripts import cli as ray
from typer.main import get_command

from cope_sweep.cli.application import app

JOB = Path(__file__).parents[2] / "deploy" / "slurm" / "sweep.sbatch"
TEXT = JOB.read_text()
# https://slurm.schedmd.com/sbatch.html: "output environment variables".
VARIABLES = {
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_CPUS_PER_TASK": "16",
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_END_TIME": "",  # eight hours after the job begins
}
# Each field ends with the character 037. In sh alone: Python would start up to eight times for one job.
RECORDER = """#!/bin/sh
printf '%s\\037' "$(($# + 1))" "${0##*/}" "$@" "${RAY_AUTH_MODE:-}" >> "$CALLS"
case "${0##*/}" in
  scontrol) printf '%s\\nnode2\\n' "${FIRST:-node1}" ;;
  squeue) printf '%s\\n' "${ENDS:-NONE}" ;;
  pgrep) [ -n "${RAYLET:-}" ] ;;
  # Of `srun ray symmetric-run … -- COMMAND`, the command, which Ray executes on the first node; unless Ray does not start.
  srun)
    while [ "$1" != sh ] && [ "$1" != bash ]; do shift; done
    [ "$1" = bash ] || { "$@"; exit; }
    SLURM_NODEID="${NODE:-0}" "$@" ;;
  ray) [ "$1" = symmetric-run ] && [ -z "${RAY_FAILS:-}" ] || exit 0; while [ "$1" != -- ]; do shift; done; shift; "$@" ;;
  cope-sweep) exit 130 ;;
esac
"""


@pytest.fixture
def execute(tmp_path):
    """Execute the job: the process, and the recorded commands with their RAY_AUTH_MODE."""
    for name in ("scontrol", "squeue", "srun", "pgrep", "ray", "cope-sweep"):
        (tmp_path / name).write_text(RECORDER)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"

    def run(*words, **variables):
        ends = {"SLURM_JOB_END_TIME": str(int(time.time()) + 8 * 3600)}
        environment = (
            VARIABLES
            | ends
            | variables
            | {
                "PATH": f"{tmp_path}:{os.environ['PATH']}",
                "CALLS": str(calls),
                "TMPDIR": str(tmp_path),
            }
        )
        environment = {name: value for name, value in environment.items() if value is not None}
        done = subprocess.run(
            ["bash", JOB, *words], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        return done, recorded(calls.read_text()) if calls.exists() else []

    return run


def recorded(text):
    """The commands of a record, each with its RAY_AUTH_MODE: the number of its words, the words, and the mode."""
    fields = iter(text.split("\037")[:-1])
    return [([next(fields) for _ in range(int(count))], next(fields)) for count in fields]


def options(words):
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def test_slurm_reads_the_directives():
    """It ignores those after the first command."""
    assert "#SBATCH" in TEXT.partition("\nset -")[0]
    assert "#SBATCH" not in TEXT.partition("\nset -")[2]


def test_the_commands_that_are_executed(execute):
    done, calls = execute("quickstart", "--store", "/shared/store", "--set", "seeds=[0, 1]")
    assert done.returncode == 130, done.stderr  # that of the sweep: something is left
    assert "submit the same job again" in done.stderr
    token = next(call for call, _ in calls if call[0] == "ray")
    calls = {call[0]: (call, auth_mode) for call, auth_mode in calls}
    (scontrol, _), (srun, auth_mode), (sweep, _) = (calls[name] for name in ("scontrol", "srun", "cope-sweep"))
    assert token == ["ray", "get-auth-token", "--generate"]
    ray.commands["get-auth-token"].make_context("get-auth-token", token[2:])
    assert scontrol == ["scontrol", "show", "hostnames", "node[1-2]"]
    assert auth_mode == "token"  # of all processes that srun starts

    start = srun.index("ray")
    assert "--nodes=2" in srun
    separator = srun.index("--")
    symmetric = ray.commands["symmetric-run"].make_context("symmetric-run", srun[start + 2 : separator])
    assert srun[start : start + 2] == ["ray", "symmetric-run"]
    assert (symmetric.params["address"], symmetric.params["min_nodes"]) == ("node1:6379", 2)
    # What symmetric-run passes on has to be an option of `ray start`, which it does not set itself.
    passed = list(symmetric.params["ray_args_and_entrypoint"])
    assert not options(passed) & {"--head", "--node-ip-address", "--port", "--block"}
    started = ray.commands["start"].make_context("start", passed)
    assert (started.params["num_cpus"], started.params["disable_usage_stats"]) == (16, True)

    assert sweep[:2] == ["cope-sweep", "run"]
    run = get_command(app).commands["run"]
    values = run.make_context("run", sweep[2:]).params
    given = {parameter.opts[0]: values[parameter.name] for parameter in run.params if parameter.name in values}
    assert given["ablation"] == "quickstart"
    assert (given["--address"], given["--store"], given["--set"]) == ("node1:6379", "/shared/store", ["seeds=[0, 1]"])
    minutes = int(re.fullmatch(r"(\d+)m", sweep[sweep.index("--time-budget") + 1])[1])
    assert 8 * 60 - 10 - 5 <= minutes <= 8 * 60 - 10


def test_a_job_whose_ray_does_not_start_has_failed(execute):
    """`ray symmetric-run` exits with 0 then."""
    done, calls = execute("quickstart", RAY_FAILS="1")
    assert (done.returncode, "cope-sweep" in [call[0] for call, _ in calls]) == (1, False)
    assert "Ray did not start" in done.stderr


def test_a_job_without_an_ablation_starts_nothing(execute):
    done, calls = execute()
    assert done.returncode == 1
    assert "name an ablation" in done.stderr
    assert calls == []


def budget(calls):
    """The time budget of the sweep in minutes; None where it has none."""
    sweep = next(call for call, _ in calls if call[0] == "cope-sweep")
    return int(sweep[sweep.index("--time-budget") + 1].removesuffix("m")) if "--time-budget" in sweep else None


@pytest.mark.parametrize(("limit_s", "minutes"), [(3600, 50), (None, None)])
def test_an_older_slurm_is_asked_for_the_end_of_the_job(execute, limit_s, minutes):
    """Before 23.02, it does not set SLURM_JOB_END_TIME; a job without a limit has no end."""
    ends = "NONE" if limit_s is None else time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + limit_s))
    done, calls = execute("quickstart", SLURM_JOB_END_TIME=None, ENDS=ends)
    assert done.returncode == 130, done.stderr
    assert ["squeue", "--noheader", "--jobs", "17", "--format", "%e"] in [call for call, _ in calls]
    assert budget(calls) in ([None] if minutes is None else [minutes, minutes - 1])


def test_an_older_slurm_is_asked_for_the_end_of_one_task_of_an_array(execute):
    """The last task has the number of the whole array."""
    _, calls = execute("quickstart", SLURM_JOB_END_TIME=None, SLURM_ARRAY_JOB_ID="17", SLURM_ARRAY_TASK_ID="1")
    assert ["squeue", "--noheader", "--jobs", "17_1", "--format", "%e"] in [call for call, _ in calls]


def test_a_limit_that_is_too_short_is_said_before_ray_starts(execute):
    """Under 12 minutes, the guide says: of 11, a second after the start, not a whole one is left to train."""
    done, calls = execute("quickstart", SLURM_JOB_END_TIME=str(int(time.time()) + 11 * 60 - 1))
    assert (done.returncode, "srun" in [call[0] for call, _ in calls]) == (2, False)
    assert "--time=" in done.stderr
    _, calls = execute("quickstart", SLURM_JOB_END_TIME=str(int(time.time()) + 12 * 60))
    assert budget(calls) in [1, 2]


def test_another_ray_of_the_user_on_a_node_is_said_before_ray_starts(execute):
    done, calls = execute("quickstart", RAYLET="1")
    assert (done.returncode, "cope-sweep" in [call[0] for call, _ in calls]) == (2, False)
    assert "--exclusive" in done.stderr


def test_of_two_jobs_that_start_together_on_a_host_one_is_refused(execute, tmp_path):
    with (tmp_path / f"cope-sweep-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done, calls = execute("quickstart")
    assert (done.returncode, "srun" in [call[0] for call, _ in calls]) == (2, False)
    assert "--exclusive" in done.stderr


def test_ray_writes_into_files_of_its_own(execute, tmp_path):
    (tmp_path / "ray").unlink()
    (tmp_path / "cope-sweep").write_text("#!/bin/sh\necho the sweep; echo a warning >&2; exit 1\n")
    (tmp_path / "ray.py").write_text(
        "import subprocess, sys\n"
        "if '--' in sys.argv:\n"
        "    print('the head', flush=True)\n"
        "    sys.exit(subprocess.run(sys.argv[sys.argv.index('--') + 1:]).returncode)\n"
    )
    (tmp_path / "ray").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/ray.py" "$@"\n')
    (tmp_path / "ray").chmod(0o755)
    done, _ = execute("quickstart")
    assert (done.returncode, done.stdout, done.stderr) == (1, "the sweep\n", "a warning\n")
    assert (tmp_path / "cope-sweep-17-node0.log").read_text() == "the head\n"


def test_other_nodes_wait_for_the_head_and_leave_soon_after_it(execute, tmp_path):
    ray = tmp_path / "ray"
    ray.write_text('#!/bin/sh\n[ "$1" = get-auth-token ] || echo "waits $RAY_gcs_rpc_server_reconnect_timeout_s"\n')
    with socket.socket() as head:
        head.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # where the port is not free, somebody else listens
            head.bind(("127.0.0.1", 6379))
            head.listen()
        execute("quickstart", NODE="1", FIRST="127.0.0.1")
    assert (tmp_path / "cope-sweep-17-node1.log").read_text() == "waits 5\n"
    execute("quickstart")
    assert (tmp_path / "cope-sweep-17-node0.log").read_text() == "waits \n"
