"""`submit`, against a real `ray start --head` that asks for a token; and what is said where it cannot be."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import psutil
import pytest

from cope_sweep.record import Ledger
from cope_sweep.sweep.executor import ClusterError
from cope_sweep.sweep.submit import JobOutcome, entrypoint, submit

ROOT = Path(__file__).parents[2]
TOKEN = "a" * 64
ABLATION = """\
title: Tiny
base:
  task: {kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4, vocabulary: 6}
  model: {layers: 1, dim: 8, heads: 2}
  train: {steps: STEPS, batch: 4, lr: LR}
  evaluate: {every: 1000000, sequences: 8, final_sequences: 8}
metrics: [{name: in_dist/token_error, label: In-dist.}]
resources: {groups: 1, device: cpu}
"""


@dataclass(frozen=True)
class Head:
    """A cluster with token authentication."""

    address: str
    tree: Path
    """A checkout of this project, with ablations of its own."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def head(ray_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "cope_sweep", tree / "cope_sweep", ignore=shutil.ignore_patterns("__pycache__"))
    for name, steps, lr in (("good", 6, "1e-3"), ("bad", 300, "1e20"), ("long", 1_000_000, "1e-3")):
        (tree / f"{name}.yaml").write_text(ABLATION.replace("STEPS", str(steps)).replace("LR", lr))
    port, dashboard = free_port(), free_port()
    # A folder of its own: `ray start` counts the clusters below RAY_TMPDIR as one machine's.
    folder = tempfile.mkdtemp(prefix="ch", dir="/tmp")
    environment = ray_environment | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_TMPDIR": folder}
    # The agent's default port may be another cluster's on this machine; without an agent there are no jobs.
    options = [f"--port={port}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={free_port()}"]
    options += ["--num-cpus=1", "--disable-usage-stats"]
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", *options],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", dashboard)) == 0:
                    break
            time.sleep(0.2)
        yield Head(f"http://127.0.0.1:{dashboard}", tree)
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        shutil.rmtree(folder, ignore_errors=True)


def run(head: Head, name: str, store: Path, *more: str, **options: object) -> tuple[JobOutcome, list[str]]:
    lines: list[str] = []
    arguments = ["run", f"{name}.yaml", "--store", str(store), "--no-mlflow", *more]
    outcome = submit(
        arguments, address=head.address, working_dir=head.tree, token=TOKEN, on_line=lines.append, **options
    )  # type: ignore[arg-type]
    return outcome, lines


def test_a_job_trains_streams_its_log_and_ends_with_the_sweeps_own_code(head: Head, tmp_path: Path) -> None:
    outcome, lines = run(head, "good", tmp_path)
    assert outcome == JobOutcome(outcome.job_id, "SUCCEEDED", 0), lines
    assert any("finished" in line for line in lines)
    assert [folder.status for folder in Ledger(tmp_path).runs()] == ["finished"]


def test_failed_runs_are_exit_code_1(head: Head, tmp_path: Path) -> None:
    outcome, lines = run(head, "bad", tmp_path)
    assert (outcome.status, outcome.exit_code, outcome.message) == ("FAILED", 1, None), lines
    assert any("Diverged" in line for line in lines)


def test_bad_input_is_exit_code_2(head: Head, tmp_path: Path) -> None:
    outcome, _ = run(head, "good", tmp_path, "--set", "model.heads=3")
    assert outcome.exit_code == 2


def test_ctrl_c_stops_the_job_and_leaves_the_run_to_resume(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press_when_it_trains() -> None:
        while not any(folder.curve() for folder in Ledger(tmp_path).runs()):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    Thread(target=press_when_it_trains, daemon=True).start()
    outcome, lines = run(head, "long", tmp_path)
    assert outcome.exit_code == 130
    assert outcome.status == "STOPPED"
    assert any(line.startswith("stopping job") for line in lines)
    (folder,) = Ledger(tmp_path).runs()
    assert folder.status == "interrupted"
    assert folder.resume.exists()


def test_without_following_it_returns_at_once(head: Head, tmp_path: Path) -> None:
    outcome, lines = run(head, "good", tmp_path, follow=False)
    assert (outcome.status, outcome.exit_code, lines) == ("SUBMITTED", 0, [])


@pytest.mark.parametrize(("token", "message"), [(None, "asks for a token"), ("b" * 64, "does not accept the token")])
def test_the_token_is_asked_for(head: Head, monkeypatch: pytest.MonkeyPatch, token: str | None, message: str) -> None:
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.delenv("RAY_AUTH_MODE")
    with pytest.raises(ClusterError, match=f"{message}.*RAY_AUTH_TOKEN"):
        submit(["list"], address=head.address, working_dir=head.tree, token=token)


def test_nothing_answers() -> None:
    with pytest.raises(ClusterError, match="no Ray dashboard answers at 127.0.0.1:.*ray start --head"):
        submit(["list"], address=f"127.0.0.1:{free_port()}", working_dir=ROOT)


def test_something_else_answers() -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Other)
    Thread(target=server.serve_forever, daemon=True).start()
    with pytest.raises(ClusterError, match="is no Ray dashboard"):
        submit(["list"], address=f"127.0.0.1:{server.server_port}", working_dir=ROOT)
    server.shutdown()


def test_not_a_checkout(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="not a checkout of this project"):
        submit(["list"], address="127.0.0.1:8265", working_dir=tmp_path)


def test_the_entrypoint_falls_back_to_the_nodes_python() -> None:
    command = entrypoint(["run", "a b.yaml", "--set", "x=[1, 2]"])
    assert command.startswith(f"P={sys.executable}; [ -x $P ] || P=python; ")
    assert command.endswith("run 'a b.yaml' --set 'x=[1, 2]'")
