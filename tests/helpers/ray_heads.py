"""Clusters that `ray start --head` starts: with a dashboard, and with token authentication."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from cope_sweep.sweep.cluster import connection_error
from tests.helpers.processes import free_port, until


@contextlib.contextmanager
def started_head(environment: Mapping[str, str], *, token: str, metrics_port: int | None = None) -> Iterator[str]:
    """A cluster of one node with one CPU, on the loopback interface; the address of its dashboard."""
    port, dashboard = free_port(), free_port()
    # A folder of its own, because `ray start` takes clusters below the same RAY_TMPDIR for one.
    folder = tempfile.mkdtemp(prefix="ch", dir="/tmp")
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_TMPDIR": folder}
    # Ray's default ports may be those of another cluster on this machine.
    options = [f"--port={port}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={free_port()}"]
    options += [f"--ray-client-server-port={free_port()}"]
    options += ["--num-cpus=1", "--disable-usage-stats", f"--metrics-export-port={metrics_port or free_port()}"]
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", *options],
        env={**environment, **own}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until(lambda: process.poll() is not None or connection_error("127.0.0.1", dashboard) is None)
        assert process.poll() is None
        yield f"http://127.0.0.1:{dashboard}"
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        shutil.rmtree(folder, ignore_errors=True)
