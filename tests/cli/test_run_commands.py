import shlex
import signal
import socket
import sqlite3
import subprocess
from unittest import mock

import pytest

from cope_sweep.store import Store, read_submission
from cope_sweep.sweep.jobs import JobOutcome
from tests.cli.conftest import TINY
from tests.helpers.processes import until

pytestmark = pytest.mark.slow  # trains

FAILS = "{train.lr: 1e30, train.clip: null}"

OPTUNA = "search: {kind: optuna, samples: 3, space: {train.lr: {log_uniform: [1e-4, 1e-2]}}}\n"


def test_run_trains_everything_and_prints_the_table(trained):
    sweep, table = trained.first["sweep"], trained.first["table"]
    assert (sweep["trained"], sweep["reused"], sweep["failed"], sweep["exit_code"]) == (4, 0, 0, 0)
    assert [row["row"] for row in table["rows"]] == ["CoPE", "none"]
    for row in table["rows"]:
        assert row["metrics"]["in_dist/token_error"]["n"] == 2


def test_run_records_in_mlflow(shell):
    sweep = shell.json("run", "tiny", "--local", "--set", "seeds=[0]", "--set", "model.position=[]")["sweep"]
    assert (sweep["trained"], sweep["tracking_errors"]) == (1, [])
    with sqlite3.connect(shell.folder / "store" / "mlflow.db") as database:
        (runs,) = database.execute("SELECT COUNT(*) FROM runs").fetchone()
    assert runs == 1 + 1  # the sweep and its run


def test_run_shows_what_to_do_next(trained):
    out, _ = trained("run", "tiny", "--local")
    assert "Nothing to train: all 4 runs are finished." in out
    assert "cope-sweep report tiny " in out
    assert "cope-sweep serve " in out
    out, _ = trained("run", "tiny", "--local", "--no-mlflow", "--store", "./store", "--set", "seeds=[0]")
    assert "cope-sweep report tiny --set 'seeds=[0]' " in out
    out, _ = trained("retry", "tiny", "--failed", "--local", "--no-mlflow", "--set", "seeds=[0,9]")
    assert "Nothing to train: 2 of 4 runs are finished" in out


def test_what_to_do_next_names_another_folder_of_ablation_files(shell):
    (shell.folder / "ablations").rename(shell.folder / "mine")
    words = ("run", "tiny", "--local", "--no-mlflow", "--ablations", "mine", "--max-runs", "1")
    out, _ = shell(*words, code=130)
    assert "cope-sweep report tiny --ablations mine " in out
    assert "cope-sweep serve --ablations mine " in out


def test_the_shown_commands_can_be_called(trained):
    """Also where the folder of the commands is not on the path, as with `python -m cope_sweep.cli`."""
    with mock.patch.dict(trained.environment, PATH="/nowhere"):
        out, _ = trained("run", "tiny", "--local", "--no-mlflow")
    (line,) = [line for line in out.splitlines() if " report tiny" in line]
    subprocess.run([*shlex.split(line.split(" report ")[0]), "--help"], check=True, stdout=subprocess.DEVNULL)


def test_a_new_seed_trains_only_the_missing_runs(trained):
    more = trained.json("run", "tiny", "--local", "--no-mlflow", "--groups", "1", "--set", "seeds=[0,1,2]")
    assert (more["sweep"]["trained"], more["sweep"]["reused"]) == (2, 4)


def test_rows_are_trained_by_commands_of_their_own(shell):
    words = ("run", "tiny", "--local", "--no-mlflow")
    assert [run["row"] for run in shell.json("plan", "tiny", "--rows", "none")["runs"]] == ["none", "none"]
    outcome = shell.json(*words, "--rows", "model.position=CoPE", "--set", "resources.cpus=2")
    assert (outcome["sweep"]["trained"], [row["row"] for row in outcome["table"]["rows"]]) == (2, ["CoPE"])
    record = Store(shell.folder / "store").sweep(outcome["sweep"]["sweep_id"])
    assert record.command[record.command.index("--rows") + 1] == "model.position=CoPE"
    assert shell.json(*words)["sweep"]["trained"] == 2, "the other row"
    shell.refuses("unknown_row", "run", "tiny", "--local", "--rows", "COPE", row="COPE")


def test_a_set_that_changes_all_values_of_an_axis_is_said(shell):
    """Once per command. Not of a key that is no part of the axis, or of an axis itself."""
    shorter = "{kind: selective_copy, tokens: 1, blanks: 2, dense_blanks: 1, sparse_blanks: 4, vocabulary: 6}"
    longer = shorter.replace("tokens: 1", "tokens: 3")
    (task,) = [line for line in TINY.splitlines(keepends=True) if line.startswith("  task:")]
    axis = f"  task: {{short: {shorter}, long: {longer}}}\nseeds:"
    shell.write("tasks", TINY.replace(task, "").replace("seeds:", axis))
    note = "note: --set task.blanks=3 applies to all 2 values of the axis task"
    for command in (["plan"], ["run", "--local", "--no-mlflow", "--max-runs", "1"]):
        _, err = shell(*command, "tasks", "--set", "task.blanks=3", code=0 if command == ["plan"] else 130)
        assert err.count(note) == 1
    for unchanged in ("train.steps=4", f"task={longer}", "model.position=[cope]"):
        assert "applies to" not in shell("plan", "tasks", "--set", unchanged)[1]


def test_a_failed_run_does_not_stop_the_others(shell):
    shell.write(
        "tiny",
        TINY.replace("none: []", "broken: []") + f"when: [{{if: {{model.position: broken}}, set: {FAILS}}}]\n",
    )
    out, _ = shell("run", "tiny", "--local", "--no-mlflow", code=1)
    assert "2 runs failed. " in out
    assert "cope-sweep status tiny shows the errors; repeat the command to try them again." in " ".join(out.split())
    statuses = [run["status"] for run in shell.json("status", "tiny")["runs"]]
    assert (statuses.count("finished"), statuses.count("failed")) == (2, 2)
    sweep = shell.json("run", "tiny", "--local", "--no-mlflow", "--keep-failed", code=1)["sweep"]
    assert (sweep["trained"], sweep["failed"], sweep["sweep_id"]) == (0, 2, None)
    out, err = shell("run", "tiny", "--local", "--no-mlflow", "--keep-failed", code=1)
    assert "cope-sweep retry tiny --failed tries them again." in " ".join(out.split())
    assert "to train" not in err
    assert "2 finished · 2 failed" in err
    _, err = shell("run", "tiny", "--local", "--no-mlflow", "--max-runs", "1", code=130)
    assert "1 run to train" in err
    again = shell.json("run", "tiny", "--local", "--no-mlflow", code=1)["sweep"]
    assert (again["failed"], again["sweep_id"] is None) == (2, False)


@pytest.mark.parametrize(
    ("options", "reason", "left"),
    [
        (["--max-runs", "1"], "the budget of 1 run is used up", 3),
        (["--max-failures", "1"], "the budget of 1 failed run is used up", 3),
        (["--time-budget", "0.000001s"], "the time budget of 1e-06 s is used up", 4),
    ],
)
def test_a_used_up_budget_is_said(shell, options, reason, left):
    shell.write("tiny", TINY + f"when: [{{if: {{model.position: [CoPE, none]}}, set: {FAILS}}}]\n")
    out, _ = shell("run", "tiny", "--local", "--no-mlflow", *options, code=130)
    text = f"Interrupted with {left} runs to do: {reason}; repeat the command to continue from there."
    assert text in " ".join(out.split())
    assert (
        f"stopped: {reason}"
        in shell.json("run", "tiny", "--local", "--no-mlflow", *options, code=130)["sweep"]["notes"]
    )


def wait_until_it_trains(shell, process):
    """Read the progress until a line shows the long run, then its curve: the next line comes 10 s later."""
    assert any("/100000" in line and line.startswith("running") for line in process.stderr), "it ended by itself"
    folders = Store(shell.folder / "store").run_folders()
    until(lambda: any(row["step"] > 10 for folder in folders for row in folder.curve()))


def test_ctrl_c_checkpoints_and_the_same_command_continues(shell):
    """One run finishes, one fails, one is interrupted: the exit code is that of the interruption."""
    text = TINY.replace("CoPE: [cope], none: []", "none: []").replace("every: 3", "every: 100000")
    fails = "when: [{if: {train.steps: 7}, set: {train.lr: 1e30, train.clip: null}}]\n"
    shell.write("tiny", text.replace("grid:\n", f"{fails}grid:\n  train.steps: [6, 7, 100000]\n"))
    words = ("run", "tiny", "--local", "--no-mlflow", "--set", "seeds=[0]")

    process = shell.start(*words)
    wait_until_it_trains(shell, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "1 run failed" in out
    assert "Interrupted with 1 run to do; repeat the command to continue from there." in " ".join(out.split())
    runs = {run["steps"]: run for run in shell.json("status", "tiny", "--set", "seeds=[0]")["runs"]}
    assert {steps: run["status"] for steps, run in runs.items()} == {6: "finished", 7: "failed", 100000: "interrupted"}
    assert shell.json("status")[0]["status"] == "interrupted"

    shown = []

    def continues():
        """In this process, which starts sooner. A first call may only come to import torch."""
        _, err = shell(*words, "--time-budget", "2s", code=130)
        shown[:] = [line for line in err.splitlines() if line.startswith("running") and "/100000" in line]
        return shown

    until(continues)
    assert " step 0/" not in shown[0], "it shows where the run continues"
    run = next(run for run in shell.json("status", "tiny", "--set", "seeds=[0]")["runs"] if run["steps"] == 100000)
    assert run["status"] == "interrupted"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--local", "--set", "model.heads=3"], "invalid_value"),
        (["--local", "--scale", "huge"], "unknown_scale"),
        (["--local", "--mlflow", "ftp://x"], "unsupported_tracking"),
        (["--local", "--store", "ablations/tiny.yaml/store"], "not_writable"),
    ],
)
def test_bad_input_starts_no_training(shell, words, code):
    shell.refuses(code, "run", "tiny", *words)
    assert {run["status"] for run in shell.json("status", "tiny")["runs"]} == {"pending"}


def test_a_cluster_that_does_not_answer_is_an_error_before_training(shell):
    # In a process of its own: one that is connected to Ray already stays connected.
    process = shell.start("run", "tiny", "--no-mlflow", "--address", "127.0.0.1:1")  # nothing listens there
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "127.0.0.1:1" in " ".join(err.split())
    assert {run["status"] for run in shell.json("status", "tiny")["runs"]} == {"pending"}


def test_a_ray_job_needs_a_lasting_store(shell):
    shell.environment["RAY_JOB_CONFIG_JSON_ENV_VAR"] = "{}"
    shell.refuses("temporary_store", "run", "tiny", "--local")
    assert not (shell.folder / "store").exists()


@pytest.fixture
def jobs(monkeypatch):
    """The jobs that `submit` starts, in the place of a cluster (tests/sweep starts a real one)."""
    started = []

    def submit(arguments, cluster, *, follow, on_line, job_id=None, name=None):
        assert name == "tiny"
        on_line("[a log line]")
        started.append((arguments, cluster.address, cluster.environment, follow))
        return JobOutcome(job_id or "job-1", "FAILED", 3, "driver [lost]")

    monkeypatch.setattr("cope_sweep.sweep.jobs.check_cluster", lambda cluster: None)
    monkeypatch.setattr("cope_sweep.sweep.jobs.submit_job", submit)
    return started


def test_a_submitted_sweep_starts_without_its_mlflow_and_a_person_is_told(shell, jobs):
    away = ("--mlflow", "http://127.0.0.1:1")
    shell.refuses("no_server", "run", "tiny", "--local", *away)
    shell("submit", "tiny", "--no-follow", "--set", "seeds=[0]", *away, code=3)
    (arguments, *_) = jobs[0]
    _, err = shell(*arguments, "--local")
    assert "note: no MLflow server answers" in " ".join(err.split())
    assert shell.json("status", "tiny")["runs"][0]["status"] == "finished"


def test_submit_sends_the_command_and_exits_with_its_code(shell, jobs):
    sets = ("--set", "seeds=[0]", "--set", "train.steps=2")
    index = f"sqlite:///{shell.folder}/elsewhere.db"
    more = ("--time-budget", "2h", "--max-runs", "3", "--mlflow", "http://head:5000")
    out, err = shell("submit", "tiny", *sets, *more, "--index", index, code=3)
    (arguments, address, environment, follow) = jobs[0]
    store = Store(shell.folder / "store", index=index)
    (sweep,) = store.index.sweeps()
    assert arguments == ["run", "--submission", sweep.sweep_id, "--store", str(store.root)]
    submission = read_submission(store, sweep.sweep_id)
    assert (submission.sets, submission.max_runs, submission.mlflow) == (["seeds=[0]", "train.steps=2"], 3, more[-1])
    assert (submission.time_budget_s, submission.file_text) == (7200, TINY)
    assert environment == {"COPE_SWEEP_INDEX": index}  # not among the arguments: it may hold a password
    assert (address, follow) == ("http://127.0.0.1:8265", True)
    assert err.splitlines()[-1] == "[a log line]"
    assert "2 runs to train: about" in err
    assert out == f"job {sweep.sweep_id}: FAILED (driver [lost])\n"
    assert (sweep.status, sweep.runs) == ("failed", 2)  # its job has ended, and the sweep had not begun


def test_rows_are_looked_at_before_the_job_is_sent(shell, jobs):
    shell.refuses("unknown_row", "submit", "tiny", "--rows", "CoPEE", row="CoPEE")
    assert not jobs
    _, err = shell("submit", "tiny", "--rows", "CoPE", code=3)
    assert "2 runs to train: about" in err
    (sweep,) = Store(shell.folder / "store").index.sweeps()
    assert sweep.runs == 2


def test_submit_to_a_store_that_only_the_cluster_can_reach(shell, jobs):
    words = [
        "submit",
        "tiny",
        "--no-follow",
        "--max-runs",
        "2",
        "--address",
        "http://192.0.2.1:8265",
        "--store",
        "/shared/store",
    ]
    assert shell.json(*words, code=3)["job_id"] == "job-1"
    assert jobs[0][0] == ["run", "tiny", "--store", "/shared/store", "--max-runs", "2"]
    assert jobs[0][3] is False
    out, _ = shell(*words, code=3)
    assert "ray job logs job-1 --address http://192.0.2.1:8265 --follow   follows its log" in out
    assert "ray job stop job-1" in out


def test_submit_without_its_log_says_what_to_type_next(shell, jobs):
    out, _ = shell("submit", "tiny", "--no-follow", code=3)
    (sweep,) = Store(shell.folder / "store").index.sweeps()
    assert f"status {sweep.sweep_id} " in out
    assert f"stop {sweep.sweep_id}   stops it" in out
    assert f"ray job logs {sweep.sweep_id} --address http://127.0.0.1:8265 --follow" in out


@pytest.mark.thorough
def test_serve_names_the_port_that_is_taken(trained):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = trained.start("serve", "--port", port)
        _, err = process.communicate(timeout=120)
    assert process.returncode in (1, 2)
    assert port in err
    assert "Traceback" not in err


def test_a_search_is_continued_and_every_command_shows_its_rows(shell):
    shell.write("tiny", TINY.replace("seeds: [0, 1]", "seeds: [0]") + OPTUNA)
    words = ("run", "tiny", "--local", "--no-mlflow")
    out, err = shell(*words, "--max-runs", "1", code=130)
    assert "tiny: A tiny copy: 3 to suggest · starting workers" in err
    assert "1 finished · 2 to suggest" in err
    assert "with 2 runs to do" in out
    first = shell.json("table", "tiny", "--format", "json")["rows"]
    sweep = shell.json(*words)["sweep"]
    assert (sweep["trained"], sweep["reused"], sweep["not_started"]) == (2, 1, 0)
    rows = shell.json("table", "tiny", "--format", "json")["rows"]
    assert len({row["row"] for row in rows}) == 3
    assert rows[0] == first[0]
    assert shell.json("status", "tiny")["counts"] == shell.json("plan", "tiny")["counts"] == {"finished": 3}
    assert "all 3 runs are finished" in shell(*words)[0]
