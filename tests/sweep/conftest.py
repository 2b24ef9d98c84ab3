"""A two-node Ray cluster on the loopback interface, private to these tests, and both executors."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cope_sweep.sweep.local_executor import run_local
from tests.helpers.processes import free_port
from tests.helpers.sweep_runs import EventLog, train_by


@pytest.fixture(scope="session")
def ray_environment() -> Iterator[dict[str, str]]:
    """The environment of every process that uses Ray in these tests: a private home and no authentication."""
    # Ray's sockets are below RAY_TMPDIR, and the path of a socket may have 107 bytes at most.
    folder = tempfile.mkdtemp(prefix="cs", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", f"{folder}/home")
        patch.setenv("RAY_TMPDIR", f"{folder}/r")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_worker_niceness", "0")  # else a busy machine gives the workers no time
        patch.setenv("RAY_timeout_ms_task_wait_for_death_info", "90000")  # as `connected` sets it before it connects
        for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            patch.delenv(name, raising=False)
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # each process would compile the same sources
        (Path(folder) / "home").mkdir()
        (Path(folder) / "r").mkdir()
        yield dict(os.environ)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster_nodes(ray_environment: dict[str, str], thorough: bool) -> Iterator[Any]:
    """A cluster of two nodes with one CPU each. This process is connected to it."""
    import ray
    from ray.cluster_utils import Cluster

    # A thorough test needs the dashboard: it tells where a process was that ended before it reported anything.
    # Ray's default ports may be those of another cluster on this machine.
    head = {"num_cpus": 1, "include_dashboard": thorough, "dashboard_port": free_port(), "include_log_monitor": False}
    nodes = Cluster(initialize_head=True, head_node_args=head | {"dashboard_agent_listen_port": free_port()})
    nodes.add_node(num_cpus=1, dashboard_agent_listen_port=free_port())
    ray.init(address=nodes.address, log_to_driver=False)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture
def cluster(cluster_nodes: Any) -> str:
    """The address of the cluster."""
    return str(cluster_nodes.address)


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def executor(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`train_by` with each of the executors."""
    if request.param == "local":
        return partial(train_by, run_local)
    request.getfixturevalue("cluster")
    from cope_sweep.sweep.ray_executor import run_on_ray

    return partial(train_by, run_on_ray)


@pytest.fixture
def events() -> EventLog:
    return EventLog()
