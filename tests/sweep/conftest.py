"""A two-node Ray cluster on the loopback, private to these tests; both executors, behind one fixture."""

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cope_sweep.record import Event, Ledger
from cope_sweep.spec import Resources, RunSpec
from cope_sweep.sweep.executor import Executor
from cope_sweep.sweep.local import run_local
from tests.tiny import tiny_run


@pytest.fixture(scope="session")
def ray_environment() -> Iterator[dict[str, str]]:
    """The environment of everything that speaks to Ray here: no one else's files, no authentication, bytecode kept."""
    # Sockets live below RAY_TMPDIR, and their paths may not be longer than 107 bytes.
    folder = tempfile.mkdtemp(prefix="cs", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", f"{folder}/home")
        patch.setenv("RAY_TMPDIR", f"{folder}/r")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            patch.delenv(name, raising=False)
        if os.environ.get("PYTHONDONTWRITEBYTECODE"):
            # A worker group compiles 10 s of modules, each time anew.
            patch.delenv("PYTHONDONTWRITEBYTECODE")
            patch.setenv("PYTHONPYCACHEPREFIX", f"{tempfile.gettempdir()}/cope-sweep-pycache-{os.getuid()}")
        (Path(folder) / "home").mkdir()
        (Path(folder) / "r").mkdir()
        yield dict(os.environ)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster(ray_environment: dict[str, str]) -> Iterator[str]:
    """Two nodes with one CPU each; this process is connected to them. Yields the address."""
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": True})
    nodes.add_node(num_cpus=1)
    ray.init(address=nodes.address, log_to_driver=False)
    yield nodes.address
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "store", create=True)


@pytest.fixture(params=["local", "ray"])
def executor(request: pytest.FixtureRequest) -> Executor:
    if request.param == "local":
        return run_local
    request.getfixturevalue("cluster")
    from cope_sweep.sweep.schedule import run_on_ray

    return run_on_ray


def seeds(count: int, **overrides: object) -> list[RunSpec]:
    return [tiny_run(seed=seed, **overrides) for seed in range(count)]


ONE_GROUP = Resources(groups=1, device="cpu", checkpoint_every_s=0.2)


class Heard(list[Event]):
    """Events in order; sets `stop` when `until` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.stop = threading.Event()
        self.times_s: list[float] = []

    def __call__(self, event: Event) -> None:
        self.append(event)
        self.times_s.append(time.monotonic())

    def of(self, run: RunSpec) -> list[Event]:
        return [event for event in self if event.run_id == run.run_id]

    def ends(self) -> list[tuple[str, str]]:
        """(run id, status) of the events that end runs, in order."""
        return [(event.run_id, event.status) for event in self if event.status not in ("running", "pending")]


@pytest.fixture
def heard() -> Heard:
    return Heard()
