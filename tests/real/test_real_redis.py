"""A head of Ray whose state is in a real Redis, as in deploy/kuberay: its GCS is killed in the middle of a sweep."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cope_sweep.store import Store
from cope_sweep.sweep.cluster import connection_error
from tests.helpers.fault_sweeps import LONG, RUN, SHORT, attempts, is_training, logged, write_ablation
from tests.helpers.processes import free_port, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PASSWORD = "p" * 24


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[str]:
    """The address of a Redis that asks for a password and writes what it holds, with the settings of deploy/kuberay."""
    if not shutil.which("redis-server"):
        pytest.skip("needs redis-server: on Debian, redis-server")
    port = free_port()
    settings = f"port {port}\nbind 127.0.0.1\nrequirepass {PASSWORD}\nappendonly yes\ndir {tmp_path}\n"
    server = subprocess.Popen(["redis-server", "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    server.stdin.write(settings)
    server.stdin.close()
    try:
        until(lambda: connection_error("127.0.0.1", port) is None)
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


class Node:
    """`ray start --block`, with the processes that it starts."""

    def __init__(self, folder: Path, *options: str, **environment: str) -> None:
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats", *options]
        command += [f"--dashboard-agent-listen-port={free_port()}", f"--metrics-export-port={free_port()}"]
        (folder / "home").mkdir(parents=True, exist_ok=True)
        own = {"RAY_TMPDIR": str(folder), "HOME": str(folder / "home"), "RAY_AUTH_MODE": "disabled"} | environment
        self.output = folder / "output"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(command, env=os.environ | own, stdout=output, stderr=output)

    def family(self) -> list[psutil.Process]:
        """The processes of the node."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self) -> None:
        """End all processes of the node."""
        family = self.family() if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def test_a_sweep_goes_on_after_the_gcs_was_killed_and_started_again(
    redis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = write_ablation(tmp_path / "redis.yaml", {"Short": SHORT, "Long": 4 * LONG})
    store = Store(tmp_path / "store", create=True)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    port = free_port()
    # Ray's sockets are in these folders, and the path of a socket may have 107 bytes at most.
    folders = [Path(f"/tmp/rr{os.getpid()}{part}") for part in "abw"]
    head_options = ["--head", f"--port={port}", "--num-cpus=0", f"--redis-password={PASSWORD}"]
    head_options += [f"--dashboard-port={free_port()}", f"--ray-client-server-port={free_port()}"]
    command = [*RUN, str(tmp_path / "redis.yaml"), "--store", str(store.root), "--no-mlflow"]
    command += ["--address", f"127.0.0.1:{port}"]

    def start_head(folder: Path) -> Node:
        node = Node(folder, *head_options, RAY_REDIS_ADDRESS=redis)
        until(lambda: node.process.poll() is not None or connection_error("127.0.0.1", port) is None)
        assert node.process.poll() is None, node.output.read_text()
        return node

    with contextlib.ExitStack() as stack:
        for folder in folders:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        head = start_head(folders[0])
        stack.callback(lambda: head.kill())
        worker = Node(folders[2], f"--address=127.0.0.1:{port}", "--num-cpus=2")
        stack.callback(worker.kill)
        first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        until(lambda: first.poll() is not None or is_training(store, plan.runs[1].run_id), timeout_s=300)
        assert first.poll() is None, first.stdout.read()
        (gcs,) = [each for each in head.family() if each.name() == "gcs_server"]
        gcs.kill()
        head.kill()  # as the container ends with its GCS
        head = start_head(folders[1])
        output, _ = first.communicate(timeout=300)
        assert first.returncode in (0, 130), output  # Ray's client waits for its GCS; or the sweep ends, and says so
        again = subprocess.run(command, capture_output=True, text=True, timeout=400)
        assert again.returncode == 0, again.stdout + again.stderr
        assert worker.process.poll() is None  # the new head has found the old worker
    assert [store.status(run.run_id) for run in plan.runs] == ["finished", "finished"]
    assert max(attempts(store, plan)) <= 2
    for run in plan.runs:
        assert max(Counter(logged(store, run.run_id)).values()) == 1
