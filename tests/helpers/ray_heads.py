"""Clusters that `ray start --head` starts: with a dashboard, and with token authentication."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from cope_sweep.sweep.cluster import connection_error
from tests.helpers.processes import free_port, until

PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
"""Starts nodes of an autoscaler as processes of this machine. As `fake_multinode` it needs a file that Ray's wheel lacks."""


@contextlib.contextmanager
def started_head(environment: Mapping[str, str], *, token: str, metrics_port: int | None = None) -> Iterator[str]:
    """A cluster of one node with one CPU, on the loopback interface; the address of its dashboard."""
    dashboard = free_port()
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    options = ["--num-cpus=1", f"--metrics-export-port={metrics_port or free_port()}"]
    with _started(environment | own, free_port(), dashboard, options):
        yield f"http://127.0.0.1:{dashboard}"


@contextlib.contextmanager
def started_from_zero(environment: Mapping[str, str], config: Path) -> Iterator[str]:
    """A head without CPUs, and an autoscaler that starts up to two workers with one CPU each; the head's address.

    The autoscaler's settings go to the file `config`.
    """
    from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FAKE_HEAD_NODE_TYPE
    from ray.autoscaler._private.monitor import BASE_READONLY_CONFIG

    port = free_port()
    address = f"127.0.0.1:{port}"
    head = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
    workers = {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 2}
    settings = BASE_READONLY_CONFIG | {
        "max_workers": 2,
        "provider": {"type": "external", "module": PROVIDER, "gcs_address": address, "launch_multiple": True},
        "available_node_types": {FAKE_HEAD_NODE_TYPE: head, "cpu": workers},
        "head_node_type": FAKE_HEAD_NODE_TYPE,
    }
    config.write_text(json.dumps(settings))
    own = {
        "RAY_FAKE_CLUSTER": "1", "RAY_enable_autoscaler_v2": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
    }  # fmt: skip
    options = ["--node-ip-address=127.0.0.1", "--num-cpus=0", f"--autoscaling-config={config}"]
    with _started(environment | own, port, free_port(), options):
        yield address


@contextlib.contextmanager
def _started(environment: Mapping[str, str], port: int, dashboard: int, options: Sequence[str]) -> Iterator[None]:
    """`ray start --head` with these ports and options, until its dashboard answers."""
    # A folder of its own, because `ray start` takes clusters below the same RAY_TMPDIR for one.
    folder = tempfile.mkdtemp(prefix="ch", dir="/tmp")
    # Ray's default ports may be those of another cluster on this machine.
    ports = [f"--port={port}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={free_port()}"]
    ports += [f"--ray-client-server-port={free_port()}"]
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--disable-usage-stats"]
    process = subprocess.Popen(
        [*command, *ports, *options],
        env={**environment, "RAY_TMPDIR": folder}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until(lambda: process.poll() is not None or connection_error("127.0.0.1", dashboard) is None)
        assert process.poll() is None
        yield
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        shutil.rmtree(folder, ignore_errors=True)
