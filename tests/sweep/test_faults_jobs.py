"""A sweep that was submitted as a Ray job: its supervisor is killed; its store is on an S3 server."""

import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cope_sweep.config import Plan
from cope_sweep.read.tables import table
from cope_sweep.store import Store
from cope_sweep.sweep.jobs import Cluster, JobOutcome, submit_job
from cope_sweep.sweep.local_executor import run_local
from tests.chaos.chaos import mlflow_points
from tests.helpers import s3
from tests.helpers.fault_sweeps import (
    LONG,
    SHORT,
    attempts,
    commands_on,
    is_training,
    logged,
    processes,
    until,
    write_ablation,
)
from tests.helpers.sweep_runs import ONE_GROUP, train_by

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1200), pytest.mark.usefixtures("cluster")]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of this project, without what need not be sent."""
    folder = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "cope_sweep", folder / "cope_sweep", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


class Job:
    """`cope-sweep run` as a Ray job, followed in a thread."""

    def __init__(self, cluster: Any, tree: Path, arguments: list[str], environment: dict[str, str] | None = None):
        self.lines: list[str] = []
        self.outcomes: list[JobOutcome] = []
        address = str(cluster.head_node.webui_url)

        def follow() -> None:
            self.outcomes.append(
                submit_job(
                    ["run", *arguments],
                    Cluster(address, tree, environment=environment or {}),
                    on_line=self.lines.append,
                )
            )

        self.thread = threading.Thread(target=follow)
        self.thread.start()

    def outcome(self) -> JobOutcome:
        """The outcome, when the job has ended."""
        self.thread.join()
        return self.outcomes[0]


def test_a_job_whose_supervisor_is_killed_is_continued_by_the_same_command(
    cluster_nodes: Any, tree: Path, tmp_path: Path
) -> None:
    plan = write_ablation(tmp_path / "jobs.yaml", {"Short": SHORT, "Long": LONG})
    short, long = (run.run_id for run in plan.runs)
    store = Store(tmp_path / "store", create=True)
    arguments = [str(tmp_path / "jobs.yaml"), "--store", str(store.root)]

    killed = Job(cluster_nodes, tree, arguments)
    until(lambda: not killed.thread.is_alive() or is_training(store, long))
    (supervisor,) = processes(cluster_nodes, "ray::JobSupervisor")
    supervisor.kill()
    outcome = killed.outcome()
    assert (outcome.status, outcome.exit_code) == ("FAILED", 1), killed.lines
    assert outcome.message
    result = store.run(short).result
    assert store.run(long).result is None
    until(lambda: not processes(cluster_nodes) and not commands_on(str(store.root)))

    again = Job(cluster_nodes, tree, arguments)
    assert again.outcome().exit_code == 0, again.lines
    assert store.run(short).result == result
    assert attempts(store, plan) == [1, 2]
    facts = store.run(long).result
    assert facts["facts"]["resumed_from_step"] > 0
    for run in plan.runs:
        assert max(Counter(logged(store, run.run_id)).values()) == 1
        points = Counter((metric, step) for metric, step, _ in mlflow_points(store.root)[run.run_id])
        assert max(points.values()) == 1
        assert max(step for _, step in points) == run.train.steps
    until(lambda: not processes(cluster_nodes) and not commands_on(str(store.root)))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, dict[str, str]]]:
    """The URL of a store on an S3 server, and the environment of the processes that use it."""
    server = s3.start_server()
    environment = s3.set_environment(monkeypatch, server)
    yield f"s3://{s3.make_bucket()}/store", environment
    server.stop()


def test_a_store_on_an_s3_server_with_its_index_on_postgresql_is_trained_into_and_served(
    cluster_nodes: Any,
    tree: Path,
    tmp_path: Path,
    bucket: tuple[str, dict[str, str]],
    postgres: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from cope_services.http.settings import Settings

    from tests.helpers.sample_store import API, serving

    url, environment = bucket
    index = postgres.new_database()
    plan = write_ablation(tmp_path / "objects.yaml", {"Short": SHORT, "Longer": 2 * SHORT}, seeds=2, groups=2)
    environment |= {"COPE_SWEEP_INDEX": index, "COPE_SWEEP_CACHE": str(tmp_path / "on-the-cluster")}
    arguments = [str(tmp_path / "objects.yaml"), "--store", url, "--no-mlflow"]
    job = Job(cluster_nodes, tree, arguments, environment)
    assert job.outcome().exit_code == 0, job.lines

    monkeypatch.setenv("COPE_SWEEP_CACHE", str(tmp_path / "here"))
    expected = trained_here(plan, tmp_path)
    settings = Settings.model_validate({"ablations": tmp_path, "store": url, "index": index, "device": "cpu"})
    with serving(settings) as client:
        rows = client.get(f"{API}/ablations/objects/table", params={"format": "json"}).json()["rows"]
        assert rows == table(plan, expected).to_json()["rows"]
        assert [row["counts"]["finished"] for row in rows] == [2, 2]
        for run in plan.runs:
            answer = client.get(f"{API}/runs/{run.run_id}/checkpoint/model.safetensors")
            assert answer.status_code == 200
            assert answer.content == (expected.run(run.run_id).checkpoint / "model.safetensors").read_bytes()


def trained_here(plan: Plan, folder: Path) -> Store:
    """A store in a folder with the runs of a plan."""
    store = Store(folder / "expected", index="", create=True)
    train_by(run_local, plan.runs, store, ONE_GROUP, sweep_id="reference")
    return store
