"""Submission of sweeps as Ray jobs: to a cluster with token authentication, and to scripted dashboards."""

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from logging.handlers import BufferingHandler
from pathlib import Path

import pytest

from cope_sweep import __version__
from cope_sweep.store import Store, Submission
from cope_sweep.sweep import jobs
from cope_sweep.sweep.jobs import Cluster, JobOutcome, job_outcome, submit_job
from tests.helpers.errors import raises
from tests.helpers.fault_sweeps import write_ablation
from tests.helpers.processes import TIMEOUT_S, free_port, until
from tests.helpers.ray_heads import started_head
from tests.helpers.scripted_cluster import VERSION, ScriptedCluster, serving_jobs
from tests.helpers.sweeps import sweep_record

ROOT = Path(__file__).parents[2]
TOKEN = "a" * 64


@dataclass(frozen=True)
class Head:
    """A cluster with token authentication."""

    address: str
    tree: Path
    """A checkout of this project, with ablations of its own."""


@pytest.fixture(scope="module")
def head(ray_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "cope_sweep", tree / "cope_sweep", ignore=shutil.ignore_patterns("__pycache__"))
    for name, steps in (("good", 6), ("long", 1_000_000)):
        write_ablation(tree / f"{name}.yaml", {"Only": steps})
    with started_head(ray_environment, token=TOKEN) as address:
        yield Head(address, tree)


def run(head: Head, name: str, store: Path, *more: str, **options: object) -> tuple[JobOutcome, list[str]]:
    lines: list[str] = []
    arguments = ["run", f"{name}.yaml", "--store", str(store), "--no-mlflow", *more]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_AUTH_MODE")
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        cluster = Cluster(head.address, head.tree)
        outcome = submit_job(arguments, cluster, on_line=lines.append, **options)
    return outcome, lines


@pytest.mark.thorough
def test_a_job_trains(head: Head, tmp_path: Path) -> None:
    outcome, lines = run(head, "good", tmp_path)
    assert outcome == JobOutcome(outcome.job_id, "SUCCEEDED", 0), lines
    assert any("finished" in line for line in lines)
    assert [folder.status for folder in Store(tmp_path).run_folders()] == ["finished"]


@pytest.mark.thorough
def test_bad_input_is_exit_code_2(head: Head, tmp_path: Path) -> None:
    outcome, _ = run(head, "good", tmp_path, "--set", "model.heads=3")
    assert outcome.exit_code == 2


@contextlib.contextmanager
def command(head: Head, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A command of a user who has the cluster's token, beside the ablations."""
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=head.tree,
        env=os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def trained_step(folder: Path) -> int:
    """How far the only run of a store is."""
    (run,) = Store(folder).run_folders() or (None,)
    return int(run.curve()[-1]["step"]) if run and run.curve() else 0


@pytest.mark.thorough
def test_ctrl_c_of_submit_stops_the_job_and_leaves_the_run_to_resume(head: Head, tmp_path: Path) -> None:
    words = ["submit", "long.yaml", "--address", head.address, "--working-dir", str(head.tree)]
    with command(head, sys.executable, "-m", "cope_sweep.cli", *words, "--store", str(tmp_path)) as process:
        until(lambda: process.poll() is not None or ((tmp_path / "runs").exists() and trained_step(tmp_path)))
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate()
    assert process.returncode == 130, output
    assert "stopping job" in output
    store = Store(tmp_path)
    (folder,) = store.run_folders()
    assert (folder.status, folder.resume.exists()) == ("interrupted", True)
    assert set(store.index.statuses().values()) == {"interrupted"}  # no lease is left
    (sweep,) = store.index.sweeps()
    assert sweep.status == "interrupted"


@pytest.mark.thorough
def test_a_sweep_that_was_asked_to_stop_is_a_stopped_job(head: Head, tmp_path: Path) -> None:
    outcome, _ = run(head, "long", tmp_path, "--max-runs", "1", follow=False)
    store: list[Store] = []

    def stop_it() -> bool:
        """Whether the sweep is there; it is asked to stop then."""
        if not store and (tmp_path / "runs").exists():
            store.append(Store(tmp_path))
        active = store[0].index.sweeps(("running",)) if store and trained_step(tmp_path) else []
        for each in active:
            store[0].index.request_stop(each.sweep_id)
        return bool(active)

    until(stop_it)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_AUTH_MODE")
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)

        def ended() -> JobOutcome | None:
            known = job_outcome(head.address, outcome.job_id)
            return known if known and known.status not in ("PENDING", "RUNNING") else None

        until(lambda: ended() is not None)
        assert ended() == JobOutcome(outcome.job_id, "STOPPED", 130)
    (sweep,) = store[0].index.sweeps()
    assert sweep.status == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize(("token", "code"), [("", "no_token"), ("b" * 64, "wrong_token")])
def test_a_token_is_required(head: Head, monkeypatch: pytest.MonkeyPatch, token: str, code: str) -> None:
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    with raises(code, address=head.address):
        submit_job(["list"], Cluster(head.address, head.tree))


@pytest.mark.slow
@pytest.mark.parametrize(
    "source", [pytest.param("RAY_AUTH_TOKEN_PATH", marks=pytest.mark.thorough), "~/.ray/auth_token"]
)
def test_the_token_is_that_of_ray_and_a_job_s_log_and_exit_code_are_passed_on(
    head: Head, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str
) -> None:
    """The token may be in a file."""
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text(f"{TOKEN}\n")
    if source == "RAY_AUTH_TOKEN_PATH":
        monkeypatch.setenv(source, str(file.rename(tmp_path / "token")))
    lines: list[str] = []
    outcome = submit_job(["--version"], Cluster(head.address, head.tree), on_line=lines.append)
    assert outcome == JobOutcome(outcome.job_id, "SUCCEEDED", 0), lines
    assert any(__version__ in line for line in lines)


@dataclass
class Dashboard(ScriptedCluster):
    """A dashboard with one job, which answers as its fields say."""

    statuses: list[str] = field(default_factory=lambda: ["SUCCEEDED"])
    """The status of the job at each request; the last one stays. "500" is an error of the server."""
    refusals: int = 0
    """How often the submission is refused because no agent is available."""
    refusal: str = "No available agent to submit job, please try again later."
    stop_refusals: int = 0
    """How often the request to stop is refused."""
    log_refusals: int = 0
    """How often the log is not given."""
    interrupt_at: int = 0
    """The request for the status at which Ctrl-C is pressed."""
    exit_code: int | None = None
    version: bytes = VERSION
    asked: Counter[str] = field(default_factory=Counter)
    """How often it was asked to start and to stop the job, and for its status."""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        match method, path.removeprefix("/api/").split("/"):
            case "GET", ["version"]:
                return 200, self.version
            case "POST", ["jobs", ""]:
                self.asked["start"] += 1
                if self.asked["start"] <= self.refusals:
                    return 500, self.refusal.encode()
                self.submitted.append(json.loads(body))
                return 200, b'{"job_id": "job-1", "submission_id": "job-1"}'
            case "POST", ["jobs", "job-1", "stop"]:
                self.asked["stop"] += 1
                if self.asked["stop"] <= self.stop_refusals:
                    return 500, b"busy"
                self.statuses = ["STOPPED"]
                return 200, b'{"stopped": true}'
            case "GET", ["jobs", "job-1"]:
                self.asked["status"] += 1
                if self.asked["status"] == self.interrupt_at:
                    os.kill(os.getpid(), signal.SIGINT)
                status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
                if status == "500":
                    return 500, b"busy"
                job = {"type": "SUBMISSION", "submission_id": "job-1", "status": status, "entrypoint": ""}
                return 200, json.dumps(job | {"driver_exit_code": self.exit_code, "message": "a message"}).encode()
            case "GET", ["jobs", ""] if self.statuses == ["500"]:
                return 500, b"busy"
            case "GET", ["jobs", "job-1", "logs"]:
                self.asked["log"] += 1
                if self.asked["log"] <= self.log_refusals:
                    return 500, b"busy"
                return 200, json.dumps({"logs": "first\nsecond"}).encode()
        return super().answer(method, path, body)


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dashboard]:
    monkeypatch.setattr(jobs, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with serving_jobs(Dashboard()) as scripted:
        yield scripted


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A working tree that looks like a checkout."""
    (tmp_path / "tree" / "cope_sweep").mkdir(parents=True)
    return tmp_path / "tree"


def test_a_submission_is_repeated_until_the_cluster_has_an_agent(dashboard: Dashboard, tree: Path) -> None:
    dashboard.refusals = 2
    lines: list[str] = []
    assert submit_job(["list"], Cluster(dashboard.url, tree), on_line=lines.append) == JobOutcome(
        "job-1", "SUCCEEDED", 0
    )
    assert dashboard.asked["start"] == 3
    assert lines == ["first", "second"]


def test_ray_logs_nothing_while_a_folder_is_sent(dashboard: Dashboard, tree: Path) -> None:
    for folder in (tree, tree / "cope_sweep"):
        (folder / ".gitignore").write_text("*.log\n")
    (tree / ".git").mkdir()
    kept = BufferingHandler(1000)
    loggers = [logging.getLogger(name) for name in jobs.RAY_UPLOAD_LOGGERS]
    for logger in loggers:
        logger.addHandler(kept)
    try:
        submit_job(["list"], Cluster(dashboard.url, tree))
    finally:
        for logger in loggers:
            logger.removeHandler(kept)
    assert [record.getMessage() for record in kept.buffer] == []


@pytest.mark.parametrize(
    ("refusal", "tries"), [("the job is invalid", 1), ("No available agent to submit job, please try again later.", 2)]
)
def test_a_refusal_that_stays_is_an_error(
    dashboard: Dashboard, tree: Path, monkeypatch: pytest.MonkeyPatch, refusal: str, tries: int
) -> None:
    monkeypatch.setattr(jobs, "AGENT_TIMEOUT_S", 1.0)
    dashboard.refusals, dashboard.refusal = 10**9, refusal
    with raises("job_refused") as error:
        submit_job(["list"], Cluster(dashboard.url, tree))
    assert refusal[:18] in str(error.value.data["reason"])
    assert min(dashboard.asked["start"], 2) == tries


def test_a_stop_request_is_repeated_until_it_is_accepted(dashboard: Dashboard, tree: Path) -> None:
    dashboard.statuses, dashboard.interrupt_at, dashboard.stop_refusals = ["RUNNING"], 3, 2
    lines: list[str] = []
    outcome = submit_job(["list"], Cluster(dashboard.url, tree), on_line=lines.append)
    assert outcome == JobOutcome("job-1", "STOPPED", 130)
    assert dashboard.asked["stop"] == 3
    assert lines == ["first", "stopping job job-1; runs write checkpoints first"]


def test_a_job_that_cannot_be_stopped_is_reported(
    dashboard: Dashboard, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "STOP_TIMEOUT_S", 0.05)
    monkeypatch.setattr(jobs, "KILL_TIMEOUT_S", 0.05)
    dashboard.statuses, dashboard.interrupt_at, dashboard.stop_refusals = ["RUNNING"], 1, 10**9
    outcome = submit_job(["list"], Cluster(dashboard.url, tree))
    assert (outcome.status, outcome.exit_code) == ("RUNNING", 130)
    assert "ray job stop job-1" in str(outcome.message)


@pytest.mark.parametrize(("stop_refusals", "status"), [(10**9, "running"), (0, "interrupted")])
def test_a_sweep_whose_job_could_not_be_stopped_goes_on(
    dashboard: Dashboard, tree: Path, monkeypatch: pytest.MonkeyPatch, stop_refusals: int, status: str
) -> None:
    if stop_refusals:
        monkeypatch.setattr(jobs, "STOP_TIMEOUT_S", 0.05)
        monkeypatch.setattr(jobs, "KILL_TIMEOUT_S", 0.05)
    dashboard.statuses, dashboard.interrupt_at, dashboard.stop_refusals = ["RUNNING"], 1, stop_refusals
    store = Store(tree.parent / "store", create=True)
    store.write_sweep(sweep_record("job-1", status="running"))
    submission = Submission.model_validate(
        {"sweep_id": "job-1", "submitted_ms": 0, "ablation": "a", "data": {}, "file_text": ""}
    )
    assert jobs.start_submission(submission, store, Cluster(dashboard.url, tree), follow=True).exit_code == 130
    assert store.sweep("job-1").status == status


def test_a_dashboard_may_fail_to_answer_for_a_while(dashboard: Dashboard, tree: Path) -> None:
    dashboard.statuses = ["RUNNING", "500", "500", "SUCCEEDED"]
    lines: list[str] = []
    assert submit_job(["list"], Cluster(dashboard.url, tree), on_line=lines.append).status == "SUCCEEDED"
    assert lines == ["first", "second"]


def test_the_end_of_a_log_is_asked_for_again(dashboard: Dashboard, tree: Path) -> None:
    dashboard.log_refusals = 3
    lines: list[str] = []
    assert submit_job(["list"], Cluster(dashboard.url, tree), on_line=lines.append).status == "SUCCEEDED"
    assert (lines, dashboard.asked["status"]) == (["first", "second"], 1)


def test_a_log_that_is_lost_does_not_hide_how_the_job_ended(
    dashboard: Dashboard, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "ANSWER_TIMEOUT_S", 0.05)
    dashboard.log_refusals = 10**9
    lines: list[str] = []
    assert submit_job(["list"], Cluster(dashboard.url, tree), on_line=lines.append).status == "SUCCEEDED"
    assert len(lines) == 1, "a note that the log is not complete"


def test_a_dashboard_that_does_not_list_its_jobs_is_an_error(dashboard: Dashboard) -> None:
    dashboard.statuses = ["500"]
    with raises("dashboard_lost", job="job-1", address=dashboard.url):
        job_outcome(dashboard.url, "job-1")


def test_a_lost_dashboard_is_an_error(dashboard: Dashboard, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "ANSWER_TIMEOUT_S", 0.05)
    dashboard.statuses = ["RUNNING", "500"]
    with raises("dashboard_lost", job="job-1"):
        submit_job(["list"], Cluster(dashboard.url, tree))


@pytest.mark.parametrize(
    ("status", "exit_code", "expected"),
    [
        ("FAILED", 1, JobOutcome("job-1", "FAILED", 1)),
        ("FAILED", 2, JobOutcome("job-1", "FAILED", 2)),
        ("FAILED", None, JobOutcome("job-1", "FAILED", 1, "a message")),
        ("STOPPED", None, JobOutcome("job-1", "STOPPED", 130)),
    ],
)
def test_outcomes(dashboard: Dashboard, tree: Path, status: str, exit_code: int | None, expected: JobOutcome) -> None:
    dashboard.statuses, dashboard.exit_code = [status], exit_code
    assert submit_job(["list"], Cluster(dashboard.url, tree)) == expected


def test_nothing_answers() -> None:
    address = f"127.0.0.1:{free_port()}"
    with raises("no_cluster", address=address):
        submit_job(["list"], Cluster(address, ROOT))


@pytest.mark.parametrize("version", [b"hello", b"{}", b"[]"])
def test_another_service_answers(dashboard: Dashboard, version: bytes) -> None:
    dashboard.version = version
    with raises("not_a_dashboard", address=dashboard.url):
        submit_job(["list"], Cluster(dashboard.url, ROOT))


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "http://"])
def test_an_address_that_is_none(address: str) -> None:
    with raises("invalid_address", address=address):
        submit_job(["list"], Cluster(address, ROOT))


def test_not_a_checkout(tmp_path: Path) -> None:
    with raises("no_checkout", file=str(tmp_path)):
        submit_job(["list"], Cluster(f"127.0.0.1:{free_port()}", tmp_path))


@pytest.mark.parametrize("is_there", [True, False], ids=["own", "the node's"])
def test_the_interpreter_of_a_job(
    dashboard: Dashboard, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """That of the submitting process, also in a folder with blanks; where the node does not have it, its own."""
    words = ["run", "a b.yaml", "--set", "x=[1, 2]"]
    own, other = tmp_path / "my env" / "python", tmp_path / "bin" / "python"
    for path in [own, other] if is_there else [other]:
        path.parent.mkdir()
        path.write_text('#!/bin/sh\nprintf "%s|" "$0" "$@"')
        path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(own))
    submit_job(words, Cluster(dashboard.url, tree), follow=False, name="small", job_id="20261124-101500-3f")
    (request,) = dashboard.submitted
    assert request["metadata"] == {"job_name": "small", "sweep_id": "20261124-101500-3f"}
    assert request["entrypoint"].startswith("python -m cope_sweep.cli run")
    monkeypatch.setenv("PATH", str(other.parent), prepend=os.pathsep)
    path_there = os.path.expandvars(request["runtime_env"]["env_vars"]["PATH"])  # as Ray does
    done = subprocess.run(
        ["sh", "-c", request["entrypoint"]], capture_output=True, text=True, check=True, env={"PATH": path_there}
    )
    assert done.stdout.split("|") == [str(own if is_there else other), "-m", "cope_sweep.cli", *words, ""]


@pytest.mark.parametrize("name", ["results/store", "my store", "a[b]*?!#"])
def test_a_store_inside_the_checkout_does_not_travel_with_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sent = []
    monkeypatch.setattr(jobs, "submit_job", lambda arguments, cluster, **_: sent.append(cluster))
    store = Store(tmp_path / name, create=True)
    submission = Submission.model_validate(
        {"sweep_id": "s", "submitted_ms": 0, "ablation": "a", "data": {}, "file_text": ""}
    )
    jobs.start_submission(submission, store, Cluster("127.0.0.1:8265", tmp_path))
    (tmp_path / ".gitignore").write_text("\n".join(sent[0].excludes))
    (tmp_path / "kept.py").write_text("")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    files = subprocess.run(
        ["git", "ls-files", "-o", "--exclude-standard"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert files.stdout.split() == [".gitignore", "kept.py"]


def test_urls_with_secrets_are_not_on_the_command_line_of_a_job() -> None:
    cluster = Cluster("127.0.0.1:8265", ROOT, environment={"A": "b"})
    urls = {"--store": "s3://key:secret@bucket", "--index": "postgresql://h/n", "--mlflow": None}
    cluster, arguments = jobs.job_options(cluster, urls)
    assert arguments == ["--index", "postgresql://h/n"]
    assert cluster.environment == {"A": "b", "COPE_SWEEP_STORE": "s3://key:secret@bucket"}


@pytest.mark.parametrize("address", ["http://u:secret[@h:1", "http://u:a/secret@h", "ftp://u:secret@h"])
def test_an_address_with_a_secret_is_not_shown(address: str) -> None:
    with raises("invalid_address") as caught:
        submit_job(["list"], Cluster(address, ROOT))
    assert "secret" not in f"{caught.value} {vars(caught.value)}"


def test_threads_hide_the_address_variables_from_one_another_s_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that begins while another one has hidden the variables does not see them put back."""
    monkeypatch.setenv("RAY_ADDRESS", "http://elsewhere:8265")
    inside, seen = threading.Event(), []

    def second() -> None:
        with jobs._without_address_variables():
            inside.wait(TIMEOUT_S)
            seen.append(os.environ.get("RAY_ADDRESS"))

    with jobs._without_address_variables():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.1)
    inside.set()
    thread.join()
    assert seen == [None]
    assert os.environ["RAY_ADDRESS"] == "http://elsewhere:8265"
