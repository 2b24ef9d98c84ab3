"""Faults of what surrounds a sweep on a cluster: its database, its head, another driver, a node without the store."""

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from cope_sweep.config import expand, load_ablation
from cope_sweep.store import Event, Store
from cope_sweep.sweep.executor import Callbacks
from cope_sweep.sweep.ray_executor import run_on_ray
from cope_sweep.sweep.sweep import Sweep, SweepOutcome
from tests.helpers.fault_sweeps import LONG, RUN, SHORT, attempts, is_training, logged, until, write_ablation
from tests.helpers.processes import free_port
from tests.helpers.ray_heads import started_from_zero
from tests.helpers.sweep_runs import EventLog, Listener, other_sweep

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1200)]


def train(file: Path, store: Store, **callbacks: Any) -> SweepOutcome:
    """Execute an ablation on the cluster that this process is connected to, with the groups that its file says."""
    plan = expand(load_ablation(file))
    return Sweep(plan, store, run_on_ray, executor_name="ray", callbacks=Callbacks(**callbacks)).run()


def test_a_sweep_waits_for_postgresql_and_goes_on(cluster: str, postgres: Any, tmp_path: Path) -> None:
    """The server is away while a run ends, the next one is to be leased, and another sweep has a third one."""
    plan = write_ablation(tmp_path / "database.yaml", {"Long": LONG, "Short": SHORT, "Other": SHORT + 1})
    long, _, other = plan.runs
    store = Store(tmp_path / "store", index=postgres.new_database(), create=True)
    events = EventLog()
    restarts: list[threading.Thread] = []

    def restart() -> None:
        postgres.stop()
        while store.run(long.run_id).result is None and long.run_id not in {event.run_id for event in ended()}:
            time.sleep(0.1)
        time.sleep(2)
        postgres.start()
        leases.close()

    def ended() -> list[Event]:
        return [event for event in list(events) if event.status not in ("running", "pending")]

    def act(event: Event) -> None:
        if event.run_id == long.run_id and event.step and not restarts:
            restarts.append(threading.Thread(target=restart))
            restarts[0].start()

    with other_sweep(store) as leases:
        leases.acquire(other)
        outcome = train(tmp_path / "database.yaml", store, on_event=Listener(events, act))
    restarts[0].join()
    assert (outcome.trained, outcome.exit_code) == (3, 0)
    assert Counter(events.ends()) == {(run.run_id, "finished"): 1 for run in plan.runs}
    assert attempts(store, plan) == [1, 1, 1]
    assert store.sweep(outcome.sweep_id).status == "finished"


@contextlib.contextmanager
def node_without(folder: Path, address: str) -> Iterator[None]:
    """A further node of the cluster, on which an empty disk is mounted over `folder`."""
    enter = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*enter, "true"], capture_output=True).returncode:
        pytest.skip("this system does not allow namespaces of mounts")
    options = f"--address={address} --num-cpus=1 --dashboard-agent-listen-port={free_port()} --block"
    script = f"mount -t tmpfs none {folder} && exec {Path(sys.executable).with_name('ray')} start {options}"
    before = len(ray.nodes())
    process = subprocess.Popen([*enter, "sh", "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        until(lambda: process.poll() is not None or len(ray.nodes()) > before)
        assert process.poll() is None
        yield
    finally:
        process.terminate()  # `ray start --block` then ends its node
        process.wait()
        until(lambda: sum(node["Alive"] for node in ray.nodes()) < before + 1)


def test_a_node_where_the_store_is_not_mounted_is_left_out(cluster: str, cluster_nodes: Any, tmp_path: Path) -> None:
    write_ablation(tmp_path / "mounts.yaml", {"Long": 100 * LONG}, seeds=3, groups="auto")
    (tmp_path / "shared").mkdir()
    store = Store(tmp_path / "shared" / "store", create=True)
    notes: list[str] = []
    left_out: list[int] = []
    events = EventLog()

    def act(event: Event) -> None:
        if notes and len({each.run_id for each in events if each.step}) >= 2:
            left_out.append(store.index.activity().left_out)
            signal.raise_signal(signal.SIGTERM)

    with node_without(tmp_path / "shared", cluster):
        outcome = train(tmp_path / "mounts.yaml", store, on_event=Listener(events, act), on_note=notes.append)
    (note,) = notes
    assert "is left out" in note
    assert str(store.location) in note
    assert left_out[-1] == 1  # for the monitoring
    assert (outcome.failed, outcome.notes) == (0, (note,))
    assert len({event.worker_id for event in events if event.step}) == 2


@pytest.fixture
def second_cluster(ray_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Another cluster of two nodes, which a test may break."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="cg", dir="/tmp")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "dashboard_agent_listen_port": free_port()})
    nodes.add_node(num_cpus=1, dashboard_agent_listen_port=free_port())
    yield nodes
    nodes.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def test_the_death_of_the_head_is_noticed_and_another_cluster_goes_on(
    second_cluster: Any, cluster: str, tmp_path: Path
) -> None:
    # Ray takes 12 s and more to notice it; on a fast machine 12,000 steps end before.
    plan = write_ablation(tmp_path / "head.yaml", {"Long": 2 * LONG, "Longer": 24 * LONG}, groups=2)
    store = Store(tmp_path / "store", create=True)
    command = [*RUN, str(tmp_path / "head.yaml"), "--store", str(store.root), "--no-mlflow", "--address"]
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen([*command, str(second_cluster.address)], stdout=output, stderr=output)
        until(lambda: process.poll() is not None or all(is_training(store, run.run_id) for run in plan.runs))
        (head,) = second_cluster.head_node.all_processes["gcs_server"]
        head.process.kill()
        process.wait()
    text = (tmp_path / "output").read_text()
    assert process.returncode == 130, text
    (error,) = [line for line in text.splitlines() if line.startswith("error:")]
    assert str(second_cluster.address) in error
    assert "Traceback" not in text
    assert "Failed to connect to GCS" not in text  # with these words Ray itself ends the process, a minute later
    (interrupted,) = store.index.sweeps()
    assert interrupted.status == "interrupted"

    again = subprocess.run([*command, cluster], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert [store.status(run.run_id) for run in plan.runs] == ["finished", "finished"]
    assert all(number in (1, 2) for number in attempts(store, plan))
    assert max(attempts(store, plan)) == 2
    for run in plan.runs:
        assert max(Counter(logged(store, run.run_id)).values()) == 1


def test_a_sweep_whose_raylet_dies_has_no_failed_runs(ray_environment: dict[str, str], tmp_path: Path) -> None:
    plan = write_ablation(tmp_path / "raylet.yaml", {"Long": 20 * LONG})
    store = Store(tmp_path / "store", create=True)
    command = [*RUN, str(tmp_path / "raylet.yaml"), "--store", str(store.root), "--no-mlflow"]
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        until(lambda: process.poll() is not None or all(is_training(store, run.run_id) for run in plan.runs))
        started = psutil.Process(process.pid).children(recursive=True)
        (raylet,) = [each for each in started if each.name() == "raylet"]
        raylet.kill()
        process.wait()
    text = (tmp_path / "output").read_text()
    assert process.returncode == 130, text
    (error,) = [line for line in text.splitlines() if line.startswith("error:")]
    assert "raylet" in error
    until(lambda: not any(map(_runs, started)))
    # A worker may outlive the sweep by some seconds. Then its run is running until it ends.
    assert {store.status(run.run_id) for run in plan.runs} == {"interrupted"}


def test_a_sweep_waits_for_the_first_nodes_of_an_autoscaler(ray_environment: dict[str, str], tmp_path: Path) -> None:
    """With the settings of an ablation, on a cluster as in deploy/: only a head, which trains nothing."""
    plan = write_ablation(tmp_path / "zero.yaml", {"Short": SHORT}, seeds=2, groups="auto")
    store = Store(tmp_path / "store", create=True)
    with started_from_zero(ray_environment, tmp_path / "autoscaler.yaml") as address:
        command = [*RUN, str(tmp_path / "zero.yaml"), "--store", str(store.root), "--no-mlflow", "--address", address]
        answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr.count("waiting for nodes: a run needs 1 CPU, the largest node has 0") == 1
    assert [store.status(run.run_id) for run in plan.runs] == ["finished", "finished"]


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_without_its_head_a_cluster_of_the_sweep_leaves_nothing(
    ray_environment: dict[str, str], tmp_path: Path, fault: signal.Signals
) -> None:
    """The GCS dies, or hangs: it then accepts connections, and Ray's calls do not return."""
    plan = write_ablation(tmp_path / "own.yaml", {"Long": 200 * LONG})
    store = Store(tmp_path / "store", create=True)
    command = [*RUN, str(tmp_path / "own.yaml"), "--store", str(store.root), "--no-mlflow"]
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        until(lambda: process.poll() is not None or all(is_training(store, run.run_id) for run in plan.runs))
        started = psutil.Process(process.pid).children(recursive=True)
        (head,) = [each for each in started if each.name() == "gcs_server"]
        head.send_signal(fault)
        process.wait()
    text = (tmp_path / "output").read_text()
    assert process.returncode == 130, text
    (error,) = [line for line in text.splitlines() if line.startswith("error:")]
    assert "repeat the command" in error
    assert "another" not in error  # the user has no cluster
    assert not any(map(_runs, started))
    assert not (store.root / "ray").exists()
    assert {store.status(run.run_id) for run in plan.runs} == {"interrupted"}
    assert [sweep.status for sweep in store.index.sweeps()] == ["interrupted"]


def _runs(process: psutil.Process) -> bool:
    """Whether a process has not ended. A zombie has, also where nothing reaps it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
