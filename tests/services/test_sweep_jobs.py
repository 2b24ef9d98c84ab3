"""Submission, stop and retry of sweeps, with a dashboard that runs no job (test_sweeps_on_ray starts a real cluster)."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import httpx
import pytest
from cope_services.http import sweep_jobs

from cope_sweep.config import expand, load_ablation
from cope_sweep.store import Store, read_submission
from cope_sweep.sweep.jobs import job_submission
from tests.read.tables.ablations import fail, finish
from tests.services.sample_store import API, TINY, serving
from tests.services.scripted_cluster import ScriptedCluster, scripted_cluster

pytestmark = pytest.mark.slow  # Ray's client takes seconds to import

INHERITED = {"inherit": "tiny", "title": "Mine", "base": {"train": {"steps": 3}}}


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.delenv("RAY_ADDRESS", raising=False)
        yield


@pytest.fixture
def cluster(environment: None) -> Iterator[ScriptedCluster]:
    with scripted_cluster() as cluster:
        yield cluster


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the ablation `tiny`, and no store."""
    (tmp_path / "ablations").mkdir()
    (tmp_path / "ablations" / "tiny.yaml").write_text(TINY)
    return tmp_path


Serve = Callable[..., httpx.Client]


@pytest.fixture
def serve(folder: Path, cluster: ScriptedCluster) -> Iterator[Serve]:
    """Starts a server and returns a client; `serve.close()` ends the last one."""
    from contextlib import ExitStack

    from cope_services.http.settings import Settings

    with ExitStack() as stack:

        def start(**changes: object) -> httpx.Client:
            values = {"ablations": folder / "ablations", "store": folder / "store", "ray_address": cluster.url}
            return stack.enter_context(serving(Settings.model_validate(values | {"device": "cpu"} | changes)))

        yield start


def submit(client: httpx.Client, key: str | None = None, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"idempotency-key": key}
    return client.post(f"{API}/sweeps", json=body, headers=headers)


def test_a_submitted_sweep_is_a_job_that_finds_all_it_needs_in_the_store(
    serve: Serve, cluster: ScriptedCluster, folder: Path
) -> None:
    client = serve()
    answer = submit(client, ablation="tiny", scale="longer", set=["seeds=[0]"], max_runs=1)
    assert answer.status_code == 202
    state = answer.json()
    assert answer.headers["location"] == state["url"] == f"{API}/sweeps/{state['sweep_id']}"
    assert (state["status"], state["runs"], state["ablation"]) == ("pending", 2, "tiny")
    shown = client.get(state["url"]).json()
    assert shown["counts"] == {"pending": 2}
    assert shown["file_text"] == TINY
    assert shown["command"] == ["cope-sweep", "run", "tiny", "--scale", "longer", "--set", "seeds=[0]"]

    (job,) = cluster.submitted
    assert job["submission_id"] == state["sweep_id"]
    assert job["entrypoint"].endswith(
        f"-m cope_sweep.cli run --submission {state['sweep_id']} --store {folder / 'store'}"
    )
    submission, plan = job_submission(Store(folder / "store"), state["sweep_id"])
    assert [run.run_id for run in plan.runs] == [member["run_id"] for member in shown["members"]]
    assert {run.train.steps for run in plan.runs} == {20}
    assert submission.max_runs == 1


def test_only_the_package_is_sent(serve: Serve, cluster: ScriptedCluster) -> None:
    cluster.packages = {}
    assert submit(serve(), ablation="tiny").status_code == 202
    (package,) = cluster.packages.values()
    names = {name for name in ZipFile(BytesIO(package)).namelist() if not name.endswith("/")}
    assert "cope_sweep/cli/__main__.py" in names
    assert {name.split("/")[0] for name in names} == {"cope_sweep"}
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.parametrize("form", ["object", "text"])
def test_a_spec_in_the_body_has_the_runs_of_the_same_file(serve: Serve, folder: Path, form: str) -> None:
    client = serve()
    (folder / "ablations" / "mine.yaml").write_text(json.dumps(INHERITED))
    expected = [run.run_id for run in expand(load_ablation(folder / "ablations" / "mine.yaml")).runs]
    (folder / "ablations" / "mine.yaml").unlink()
    answer = submit(client, name="mine", spec=INHERITED if form == "object" else json.dumps(INHERITED, indent=1))
    assert answer.status_code == 202, answer.text
    sweep = client.get(answer.json()["url"]).json()
    assert {member["run_id"] for member in sweep["members"]} == set(expected)
    assert json.loads(sweep["file_text"]) == INHERITED
    _, plan = job_submission(Store(folder / "store"), sweep["sweep_id"])
    assert [run.run_id for run in plan.runs] == expected


BASE = {"title": "x", "inherit": "tiny"}
LOSS = [{"name": "train/loss"}]
TEXT = {"kind": "wikitext", "folder": "/etc", "tokens": 8, "vocabulary": 300}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"spec": {**BASE, "bas": {}}}, "mine: bas: unknown key 'bas'"),
        ({"spec": {**BASE, "base": {"model": {"heads": 3}}}}, "heads"),
        ({"spec": "title: x\nbase: [\n"}, "mine:3: not valid YAML"),
        ({"spec": {**BASE, "plugins": ["os"]}}, "plugins (os) are not allowed here"),
        ({"spec": {**BASE, "inherit": "../secret"}}, "'../secret' is not the name of an ablation"),
        ({"spec": {**BASE, "inherit": "unknown"}}, "no file"),
        ({"spec": {**BASE, "base": {"task": TEXT}, "metrics": LOSS}}, "task.folder: '/etc' names a place"),
        ({"spec": {**BASE, "seeds": list(range(60))}}, "120 runs are more than 100"),
        ({"spec": {**BASE, "grid": {"train.lr": [1e-9 * i for i in range(1, 500)]}}}, "more than 400 points"),
        ({"spec": BASE, "name": "tiny"}, "has the name 'tiny'"),
        ({"spec": {"a": {"b": float("1e300")}}}, "base"),
        ({"spec": json.loads('{"a":' * 400 + "1" + "}" * 400)}, "more than 30 levels"),
        ({"spec": "a: " + "{b: " * 3000}, "more than 30 levels"),
    ],
)
def test_an_invalid_spec_is_refused_with_key_and_value(serve: Serve, body: dict[str, Any], message: str) -> None:
    answer = submit(serve(max_sweep_runs=100), **{"name": "mine", **body})
    assert answer.status_code == 422
    assert message in answer.json()["detail"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"ablation": "none"}, 404, "no ablation 'none'"),
        ({"ablation": "tiny", "scale": "none"}, 422, "no scale 'none'"),
        ({"ablation": "tiny", "set": ["model.dims=4"]}, 422, "dims"),
        ({"ablation": "tiny", "set": ["plugins=[os]"]}, 422, "no key 'plugins'"),
        (
            {"ablation": "tiny", "set": [f"task={json.dumps(TEXT)}", f"metrics={json.dumps(LOSS)}"]},
            422,
            "names a place",
        ),
        (
            {"ablation": "tiny", "set": ["task={kind: last_sentence, corpus: ../..}", f"metrics={json.dumps(LOSS)}"]},
            422,
            "corpus",
        ),
        ({"ablation": "tiny", "spec": BASE}, 422, "either"),
        ({"name": "x"}, 422, "either"),
        ({"ablation": "tiny", "only": ["finished"]}, 422, "only"),
        ({"ablation": "tiny", "shell": "rm"}, 422, "shell"),
    ],
)
def test_an_invalid_request_is_refused(serve: Serve, body: dict[str, Any], status: int, message: str) -> None:
    answer = submit(serve(), **body)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert message in answer.json()["detail"]


def test_the_same_key_means_the_same_sweep_also_at_once_and_after_a_restart(
    serve: Serve, cluster: ScriptedCluster
) -> None:
    client = serve()
    barrier = threading.Barrier(6)

    def one(_: int) -> str:
        barrier.wait()
        answer = submit(client, "a key", ablation="tiny")
        assert answer.status_code == 202
        return str(answer.json()["sweep_id"])

    with ThreadPoolExecutor(6) as pool:
        (sweep_id,) = set(pool.map(one, range(6)))
    assert len(cluster.submitted) == 1
    again = serve()  # another process would see the same store
    assert submit(again, "a key", ablation="tiny").json()["sweep_id"] == sweep_id
    refused = submit(again, "a key", ablation="tiny", scale="longer")
    assert (refused.status_code, "Idempotency-Key" in refused.json()["detail"]) == (422, True)
    assert submit(again, "another", ablation="tiny").json()["sweep_id"] != sweep_id
    assert len(cluster.submitted) == 2


def test_a_job_that_is_refused_gives_its_key_back(serve: Serve, cluster: ScriptedCluster) -> None:
    client = serve()
    cluster.refuses = True
    refused = submit(client, "a key", ablation="tiny")
    assert (refused.status_code, refused.json()["code"]) == (503, "no_cluster")
    (failed,) = client.get(f"{API}/sweeps").json()["sweeps"]
    assert failed["status"] == "failed"
    cluster.refuses = False
    assert submit(client, "a key", ablation="tiny").json()["sweep_id"] != failed["sweep_id"]


def test_without_a_cluster_it_says_how_to_name_one(serve: Serve) -> None:
    answer = submit(serve(ray_address=""), ablation="tiny")
    assert answer.status_code == 503
    assert "--ray-address http://HOST:8265" in answer.json()["detail"]


def test_sweeps_at_a_time_are_limited_until_their_jobs_have_ended(serve: Serve, cluster: ScriptedCluster) -> None:
    client = serve(max_sweeps=1)
    first = submit(client, ablation="tiny").json()
    busy = submit(client, ablation="tiny")
    assert busy.status_code == 429
    assert int(busy.headers["retry-after"]) > 0
    # The job ends and has recorded nothing: that is noticed.
    cluster.jobs[first["sweep_id"]] |= {"status": "FAILED", "message": "the driver was killed"}
    assert submit(client, ablation="tiny").status_code == 202
    ended = client.get(first["url"]).json()
    assert ended["status"] == "failed"
    assert "the driver was killed" in ended["notes"][-1]


def test_a_job_that_has_failed_ends_its_sweep_without_a_listener(
    serve: Serve, cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_jobs, "RECONCILE_S", 0.05)
    client = serve()
    sweep = submit(client, ablation="tiny").json()
    message = (
        "runtime_env setup failed: \nTraceback (most recent call last):\n  File x\nModuleNotFoundError: No module 'y'"
    )
    cluster.jobs[sweep["sweep_id"]] |= {"status": "FAILED", "message": message}
    deadline = time.monotonic() + 60
    while client.get(f"{API}/sweeps").json()["sweeps"][0]["status"] == "pending":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ended = client.get(sweep["url"]).json()
    assert ended["status"] == "failed"
    assert ended["notes"][-1] == (
        "the job ended before the sweep did: runtime_env setup failed: … ModuleNotFoundError: No module 'y'"
    )


def test_a_sweep_whose_record_is_damaged_keeps_no_other_from_being_reconciled(
    serve: Serve, cluster: ScriptedCluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_jobs, "RECONCILE_S", 0.05)
    client = serve()
    ids = [submit(client, ablation="tiny", set=[f"train.steps={steps}"]).json()["sweep_id"] for steps in (3, 4, 5)]
    (folder / "store" / "submissions" / f"{ids[1]}.json").write_text("no JSON")
    for sweep_id in ids:
        cluster.jobs[sweep_id] |= {"status": "FAILED"}
    deadline = time.monotonic() + 60
    while [client.get(f"{API}/sweeps/{each}").json()["status"] for each in (ids[0], ids[2])] != ["failed"] * 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_stop_and_retry(serve: Serve, cluster: ScriptedCluster, folder: Path) -> None:
    client = serve()
    sweep = submit(client, ablation="tiny").json()
    store, url = Store(folder / "store"), sweep["url"]
    assert client.post(f"{url}/retry").status_code == 409  # it is active
    for _ in range(2):
        stopped = client.post(f"{url}/stop")
        assert (stopped.status_code, stopped.json()["stop_requested"]) == (202, True)
    assert store.stop_requested(sweep["sweep_id"])
    assert cluster.stopped == [sweep["sweep_id"]] * 2  # the job, because it has not begun the sweep

    _, plan = job_submission(store, sweep["sweep_id"])
    for run in plan.runs[:3]:
        finish(store, run, {"in_dist/token_error": 1.0, "dense/token_error": 1.0})
    fail(store, plan.runs[3])
    cluster.jobs[sweep["sweep_id"]]["status"] = "STOPPED"
    ended = client.post(f"{url}/stop").json()
    assert (ended["status"], ended["stop_requested"]) == ("failed", False)

    with ThreadPoolExecutor(4) as pool:
        (again,) = {answer.text for answer in pool.map(lambda _: client.post(f"{url}/retry"), range(4))}
    retried = json.loads(again)
    assert (retried["retry_of"], retried["status"]) == (sweep["sweep_id"], "pending")
    assert len(cluster.submitted) == 2
    assert read_submission(store, retried["sweep_id"]).data == read_submission(store, sweep["sweep_id"]).data

    finish(store, plan.runs[3], {"in_dist/token_error": 1.0, "dense/token_error": 1.0})
    cluster.jobs[retried["sweep_id"]]["status"] = "SUCCEEDED"
    client.post(f"{retried['url']}/stop")
    nothing = client.post(f"{url}/retry")
    assert (nothing.status_code, "nothing" not in nothing.json()["code"]) == (409, True)
    assert "have ended as planned" in nothing.json()["detail"]
    for action in ("stop", "retry"):
        assert client.post(f"{API}/sweeps/20260101-000000-0000/{action}").status_code == 404


def test_a_request_that_is_no_json_is_refused(serve: Serve) -> None:
    answer = serve().post(f"{API}/sweeps", content="{}", headers={"content-type": "text/plain"})
    assert answer.status_code == 415


def test_the_index_of_the_service_is_that_of_the_job(serve: Serve, cluster: ScriptedCluster, folder: Path) -> None:
    index = f"sqlite:///{folder / 'elsewhere.db'}"
    assert submit(serve(index=index), ablation="tiny").status_code == 202
    (job,) = cluster.submitted
    assert job["runtime_env"]["env_vars"]["COPE_SWEEP_INDEX"] == index
    assert "elsewhere" not in job["entrypoint"]
    assert os.environ.get("RAY_AUTH_TOKEN", "no token") not in json.dumps(job)
