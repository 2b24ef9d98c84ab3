"""Submission, stop and retry of sweeps, with a dashboard that runs no job (test_sweeps_on_ray starts a real cluster)."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import httpx
import pytest
from cope_services.http import following, jobs, sweeps
from cope_services.http.following import EventStream, Watchers
from sse_starlette import ServerSentEvent

from cope_sweep.client import Client, server_events
from cope_sweep.config import expand, load_ablation
from cope_sweep.config.expand import row_of
from cope_sweep.errors import ClusterError
from cope_sweep.read.queries import Queries
from cope_sweep.read.queries.progress import ProgressTracker
from cope_sweep.records import Event as RunEvent
from cope_sweep.records import new_sweep_id
from cope_sweep.store import RunRecord, Store, SweepRecord, SweepRun, read_submission
from cope_sweep.store.index import index
from cope_sweep.sweep.jobs import job_submission
from tests.helpers.finished_runs import fail, finish
from tests.helpers.finished_runs import stop as stop_early
from tests.helpers.processes import until
from tests.helpers.sample_store import API, SEARCHED, TINY, SampleStore, ServedFolders, serving
from tests.helpers.scripted_cluster import ScriptedCluster, scripted_cluster
from tests.helpers.sweeps import end_sweep, sweep_record
from tests.helpers.tiny import tiny_run

pytestmark = pytest.mark.slow  # Ray's client takes seconds to import

INHERITED = {"inherit": "tiny", "title": "Mine", "base": {"train": {"steps": 3}}}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedCluster]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
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
    """Starts a server that lives as long as the test, and returns a client."""
    with ExitStack() as stack:

        def start(**changes: object) -> httpx.Client:
            settings = ServedFolders(folder).settings(**{"ray_address": cluster.url} | changes)
            return stack.enter_context(serving(settings))

        yield start


FIRST, SECOND = "20261121-101500-3f2a", "20261121-101501-3f2a"


def submit(client: httpx.Client, sweep_id: str | None = None, **body: Any) -> httpx.Response:
    return client.put(f"{API}/sweeps/{sweep_id or new_sweep_id()}", json=body)


def test_a_preview_says_what_would_be_trained_and_starts_nothing(
    serve: Serve, cluster: ScriptedCluster, folder: Path
) -> None:
    client = serve()
    request = {"ablation": "tiny", "set": ["seeds=[0, 1, 2]"], "max_runs": 5}
    answer = client.post(f"{API}/sweeps/preview", json=request)
    assert answer.status_code == 200
    assert (answer.json()["to_do"], len(answer.json()["runs"])) == (5, 6)
    assert {run["status"] for run in answer.json()["runs"]} == {"pending"}
    assert client.post(f"{API}/sweeps/preview", json=request | {"set": ["train.stepz=3"]}).status_code == 422
    assert client.post(f"{API}/sweeps/preview", json={"ablation": "none"}).status_code == 404
    assert cluster.submitted == []
    assert not (folder / "store").exists()


def test_a_submitted_sweep_is_a_job_that_finds_all_it_needs_in_the_store(
    serve: Serve, cluster: ScriptedCluster, folder: Path
) -> None:
    client = serve()
    answer = submit(client, ablation="tiny", scale="longer", set=["seeds=[0]"], max_runs=1)
    assert answer.status_code == 202
    state = answer.json()
    assert state["url"] == f"{API}/sweeps/{state['sweep_id']}"
    assert (state["status"], state["runs"], state["ablation"]) == ("pending", 2, "tiny")
    shown = client.get(state["url"]).json()
    assert shown["counts"] == {"pending": 2}
    assert shown["file_text"] == TINY
    assert shown["command"] == ["cope-sweep", "run", "tiny", "--scale", "longer", "--set", "seeds=[0]"]

    (job,) = cluster.submitted
    assert job["submission_id"] == state["sweep_id"]
    assert job["entrypoint"] == (
        f"python -m cope_sweep.cli run --submission {state['sweep_id']} --store {folder / 'store'}"
    )
    assert job["metadata"] == {"job_name": "tiny", "sweep_id": state["sweep_id"]}
    submission, plan = job_submission(Store(folder / "store"), state["sweep_id"])
    assert [run.run_id for run in plan.runs] == [member["run_id"] for member in shown["members"]]
    assert {run.train.steps for run in plan.runs} == {20}
    assert submission.max_runs == 1


def test_submissions_share_one_database(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    client = serve()
    assert submit(client, ablation="tiny").status_code == 202
    opened: list[str] = []
    database = index.Database

    def noted(url: str) -> index.Database:
        opened.append(url)
        return database(url)

    monkeypatch.setattr(index, "Database", noted)
    assert [submit(client, ablation="tiny").status_code for _ in range(3)] == [202] * 3
    assert opened == []


def test_a_cluster_that_does_not_answer_is_logged_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[object] = []

    def unreachable(self: object) -> None:
        asked.append(self)
        raise ClusterError("http://head:8265 does not answer")

    monkeypatch.setattr(jobs, "RECONCILE_S", 0.01)
    monkeypatch.setattr(jobs.SweepJobs, "reconcile_all", unreachable)
    serve()
    until(lambda: len(asked) > 3)
    (record,) = [each for each in caplog.records if each.name.startswith("cope_services")]
    assert (record.levelname, "http://head:8265 does not answer" in record.getMessage()) == ("WARNING", True)


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


TEXT_TASK = {"ablation": "tiny", "set": [f"task={json.dumps(TEXT)}", f"metrics={json.dumps(LOSS)}"]}
CORPUS = {"ablation": "tiny", "set": ["task={kind: last_sentence, corpus: ../..}", f"metrics={json.dumps(LOSS)}"]}


def spec(**keys: Any) -> dict[str, Any]:
    """A request with a spec of its own."""
    return {"name": "mine", "spec": BASE | keys}


INVALID: list[tuple[dict[str, Any], int, str]] = [
    (spec(bas={}), 422, "unknown_key"),
    (spec(base={"model": {"heads": 3}}), 422, "invalid_value"),
    (spec(plugins=["os"]), 422, "plugins_refused"),
    (spec(inherit="../secret"), 422, "invalid_name"),
    (spec(inherit="unknown"), 422, "no_such_file"),
    (spec(base={"task": TEXT}, metrics=LOSS), 422, "path_of_another_machine"),
    (spec(seeds=list(range(60))), 422, "too_many_runs"),
    (spec(grid={"train.lr": [1e-9 * i for i in range(1, 500)]}), 422, "too_many_points"),
    (spec() | {"name": "tiny"}, 422, "name_taken"),
    ({"name": "mine", "spec": {"a": {"b": float("1e300")}}}, 422, "missing_key"),
    ({"name": "mine", "spec": json.loads('{"a":' * 400 + "1" + "}" * 400)}, 422, "too_large"),
    ({"name": "mine", "spec": "title: x\nbase: [\n"}, 422, "invalid_yaml"),
    ({"name": "mine", "spec": "a: " + "{b: " * 3000}, 422, "too_large"),
    ({"name": "mine", "spec": {"a": [[0] * 100] * 600}}, 422, "too_large"),
    ({"name": "mine", "spec": "!!python/object/apply:os.system ['true']"}, 422, "not_a_mapping"),
    ({"name": "mine", "spec": "[]"}, 422, "not_a_mapping"),
    ({"ablation": "none"}, 404, "not_found"),
    ({"ablation": "tiny", "scale": "none"}, 422, "unknown_scale"),
    ({"ablation": "tiny", "set": ["model.dims=4"]}, 422, "unknown_key"),
    ({"ablation": "tiny", "set": ["plugins=[os]"]}, 422, "unknown_key"),
    (TEXT_TASK, 422, "path_of_another_machine"),
    (CORPUS, 422, "invalid_corpus_name"),
    ({"ablation": "tiny", "spec": BASE}, 422, "invalid_request"),
    ({"name": "x"}, 422, "invalid_request"),
    ({"ablation": "tiny", "only": ["finished"]}, 422, "invalid_request"),
    ({"ablation": "tiny", "shell": "rm"}, 422, "invalid_request"),
]


def test_invalid_requests_are_refused(serve: Serve) -> None:
    client = serve(max_sweep_runs=100)
    for body, status, code in INVALID:
        answer = submit(client, **body)
        assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
        assert answer.headers["content-type"] == "application/problem+json"


def test_the_same_id_is_the_same_sweep_also_at_once_from_several_services_and_after_a_restart(
    serve: Serve, cluster: ScriptedCluster
) -> None:
    services = [serve(max_sweeps=1), serve(max_sweeps=1)]
    barrier = threading.Barrier(6)

    def one(number: int) -> str:
        barrier.wait()
        answer = submit(services[number % 2], FIRST, ablation="tiny")
        assert answer.status_code == 202, answer.text
        return str(answer.json()["sweep_id"])

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(one, range(6))) == {FIRST}
    assert len(cluster.submitted) == 1
    again = serve()
    assert submit(again, FIRST, ablation="tiny").json()["sweep_id"] == FIRST
    cluster.jobs[FIRST]["status"] = "FAILED"
    again.post(f"{API}/sweeps/{FIRST}/stop")
    ended = submit(serve(ray_address=""), FIRST, ablation="tiny")  # it needs no cluster to say what there is
    assert (ended.status_code, ended.json()["status"]) == (202, "interrupted")
    refused = submit(again, FIRST, ablation="tiny", scale="longer")
    assert (refused.status_code, refused.json()["code"]) == (409, "used_id")
    assert submit(again, SECOND, ablation="tiny").json()["sweep_id"] == SECOND
    assert [job["submission_id"] for job in cluster.submitted] == [FIRST, SECOND]


def test_a_request_whose_answer_was_lost_is_sent_again_and_starts_one_job(
    serve: Serve, cluster: ScriptedCluster
) -> None:
    lost: list[httpx.Request] = []

    class Losing(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            answer = super().handle_request(request)
            if request.method == "PUT" and not lost:
                answer.read()
                lost.append(request)
                raise httpx.ReadError("the connection is gone", request=request)
            return answer

    with Client(str(serve().base_url), transport=Losing()) as client:
        state = client.submit("tiny")
    assert lost[0].url.path == f"{API}/sweeps/{state.sweep_id}"
    assert [job["submission_id"] for job in cluster.submitted] == [state.sweep_id]


def test_ids_of_another_form_are_refused(serve: Serve, cluster: ScriptedCluster, folder: Path) -> None:
    client = serve()
    for sweep_id in (
        "x", "20261121-101500-3F2A", "20261121-101500-", "20261121-101500-3f2a.json", "20261121-101500-3f2a%0A", "..%2Fx", "%2e%2e",
        "٢٠٢٦١١٢١-101500-3f2a", f"20261121-101500-{'a' * 33}", "20261121-101500-3f2a%00",
    ):  # fmt: skip
        answer = submit(client, sweep_id, ablation="tiny")
        assert answer.status_code in (404, 405, 422), (sweep_id, answer.text)
    assert cluster.submitted == []
    assert not (folder / "store").exists()


def test_a_sweep_whose_job_is_refused_has_failed_and_can_be_retried(serve: Serve, cluster: ScriptedCluster) -> None:
    client = serve()
    cluster.refuses = True
    refused = submit(client, FIRST, ablation="tiny")
    assert (refused.status_code, refused.json()["code"]) == (503, "job_refused")
    cluster.refuses = False
    again = submit(client, FIRST, ablation="tiny")  # the same answer to the same request: the sweep is there
    assert (again.status_code, again.json()["status"]) == (202, "failed")
    assert cluster.submitted == []
    retried = client.post(f"{API}/sweeps/{FIRST}/retry")
    assert (retried.status_code, retried.json()["retry_of"]) == (202, FIRST)
    assert len(cluster.submitted) == 1


def test_an_id_of_another_request_is_refused_also_at_the_same_time(
    serve: Serve, cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, check, other = serve(), jobs.check_cluster, []

    def submit_another(found: Any) -> None:
        """After this request has found its id unused, another one uses the id."""
        monkeypatch.setattr(jobs, "check_cluster", check)
        other.append(submit(client, FIRST, ablation="tiny", scale="longer"))

    monkeypatch.setattr(jobs, "check_cluster", submit_another)
    refused = submit(client, FIRST, ablation="tiny")
    assert (refused.status_code, refused.json()["code"]) == (409, "used_id"), refused.text
    assert [each.status_code for each in other] == [202]
    assert len(cluster.submitted) == 1


def test_the_id_of_a_sweep_that_a_command_has_started_is_refused(serve: Serve, folder: Path) -> None:
    Store(folder / "store", create=True).write_sweep(sweep_record(FIRST))
    refused = submit(serve(), FIRST, ablation="tiny")
    assert (refused.status_code, refused.json()["code"]) == (409, "used_id")


def test_without_a_cluster_it_says_how_to_name_one(serve: Serve) -> None:
    answer = submit(serve(ray_address=""), ablation="tiny")
    assert (answer.status_code, answer.json()["code"]) == (503, "no_cluster")
    assert "--ray-address" in answer.json()["detail"]


def test_sweeps_at_a_time_are_limited_until_their_jobs_have_ended(serve: Serve, cluster: ScriptedCluster) -> None:
    client = serve(max_sweeps=1)
    first = submit(client, ablation="tiny").json()
    busy = submit(client, ablation="tiny")
    assert busy.status_code == 429
    assert int(busy.headers["retry-after"]) > 0
    # The job ends and has recorded nothing: that is noticed.
    message = (
        "runtime_env setup failed: \nTraceback (most recent call last):\n  File x\nModuleNotFoundError: No module y"
    )
    cluster.jobs[first["sweep_id"]] |= {"status": "FAILED", "message": message}
    assert submit(client, ablation="tiny").status_code == 202
    ended = client.get(first["url"]).json()
    assert ended["status"] == "failed"
    shown = "runtime_env setup failed: … ModuleNotFoundError: No module y"
    assert ended["notes"][-1] == f"the job ended before the sweep did: {shown}"


def test_a_sweep_whose_record_is_damaged_keeps_no_other_from_being_reconciled(
    serve: Serve, cluster: ScriptedCluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "RECONCILE_S", 0.05)
    client = serve()
    ids = [submit(client, ablation="tiny", set=[f"train.steps={steps}"]).json()["sweep_id"] for steps in (3, 4, 5)]
    (folder / "store" / "submissions" / f"{ids[1]}.json").write_text("no JSON")
    for sweep_id in ids:
        cluster.jobs[sweep_id] |= {"status": "FAILED"}
    for each in (ids[0], ids[2]):
        until(lambda each=each: client.get(f"{API}/sweeps/{each}").json()["status"] == "failed")


def test_a_running_sweep_without_a_job_may_be_on_another_cluster(
    serve: Serve, cluster: ScriptedCluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "START_TIMEOUT_S", 0.0)
    client = serve(max_sweeps=2)
    urls = [submit(client, ablation="tiny", set=[f"train.steps={steps}"]).json()["url"] for steps in (3, 4)]
    store = Store(folder / "store")
    running = store.sweep(urls[0].rpartition("/")[2])
    assert running is not None
    store.write_sweep(running.model_copy(update={"status": "running"}), ttl_s=60)
    cluster.jobs.clear()
    assert submit(client, ablation="tiny").status_code == 202  # before that, it looks at the jobs of the two
    assert [client.get(url).json()["status"] for url in urls] == ["running", "failed"]
    assert client.post(f"{urls[0]}/stop").json()["stop_requested"]


def test_stop_and_retry(serve: Serve, cluster: ScriptedCluster, folder: Path) -> None:
    client = serve()
    sweep = submit(client, ablation="tiny").json()
    store, url = Store(folder / "store"), sweep["url"]
    assert client.post(f"{url}/retry").status_code == 409  # it is active
    for _ in range(2):  # it has not started, and ends at once
        stopped = client.post(f"{url}/stop")
        assert (stopped.status_code, stopped.json()["status"], stopped.json()["stop_requested"]) == (
            202,
            "interrupted",
            False,
        )
    assert store.sweep(sweep["sweep_id"]).notes == ["it was stopped before it had started"]
    assert cluster.stopped == [sweep["sweep_id"]]  # the job, which may still start

    _, plan = job_submission(store, sweep["sweep_id"])
    for run in plan.runs[:3]:
        finish(store, run, {"in_dist/token_error": 1.0, "dense/token_error": 1.0})
    fail(store, plan.runs[3])
    cluster.jobs[sweep["sweep_id"]]["status"] = "STOPPED"
    ended = client.post(f"{url}/stop").json()
    assert (ended["status"], ended["stop_requested"]) == ("interrupted", False)

    with ThreadPoolExecutor(4) as pool:
        (again,) = {answer.text for answer in pool.map(lambda _: client.post(f"{url}/retry"), range(4))}
    retried = json.loads(again)
    assert (retried["retry_of"], retried["status"]) == (sweep["sweep_id"], "pending")
    assert len(cluster.submitted) == 2
    assert read_submission(store, retried["sweep_id"]).data == read_submission(store, sweep["sweep_id"]).data

    stop_early(store, plan.runs[3])
    assert client.post(f"{API}/sweeps/preview", json={"ablation": "tiny"}).json()["to_do"] == 1, "there is no schedule"
    scheduled = {"ablation": "tiny", "set": ["schedule=asha"]}
    assert client.post(f"{API}/sweeps/preview", json=scheduled).json()["to_do"] == 0
    cluster.jobs[retried["sweep_id"]]["status"] = "SUCCEEDED"
    client.post(f"{retried['url']}/stop")
    retried = client.post(f"{retried['url']}/retry").json()
    assert retried["status"] == "pending"

    finish(store, plan.runs[3], {"in_dist/token_error": 1.0, "dense/token_error": 1.0})
    cluster.jobs[retried["sweep_id"]]["status"] = "SUCCEEDED"
    client.post(f"{retried['url']}/stop")
    nothing = client.post(f"{url}/retry")
    assert (nothing.status_code, nothing.json()["code"]) == (409, "nothing_left")
    for action in ("stop", "retry"):
        assert client.post(f"{API}/sweeps/20260101-000000-0000/{action}").status_code == 404


def test_a_search_that_ended_before_its_last_row_can_be_retried(
    serve: Serve, cluster: ScriptedCluster, folder: Path
) -> None:
    (folder / "ablations" / "searched.yaml").write_text(SEARCHED)
    client = serve()
    sweep_id = submit(client, ablation="searched", max_runs=1).json()["sweep_id"]
    store = Store(folder / "store")
    record = store.sweep(sweep_id)
    assert record is not None
    row = row_of(load_ablation(folder / "ablations" / "searched.yaml"), {"train.lr": 0.001})
    finish(store, row.runs[0], {"in_dist/token_error": 1.0})
    member = SweepRun(run_id=row.runs[0].run_id, row=row.name, labels=row.labels, seed=0)
    found_no_more = end_sweep(store, record.model_copy(update={"runs": [member]}))
    assert client.post(f"{API}/sweeps/{sweep_id}/retry").status_code == 409
    end_sweep(store, found_no_more, "interrupted")  # as by a budget
    assert client.post(f"{API}/sweeps/{sweep_id}/retry").status_code == 202


def test_the_index_of_the_service_is_that_of_the_job(serve: Serve, cluster: ScriptedCluster, folder: Path) -> None:
    index = f"sqlite:///{folder / 'elsewhere.db'}"
    assert submit(serve(index=index), ablation="tiny").status_code == 202
    (job,) = cluster.submitted
    assert job["runtime_env"]["env_vars"]["COPE_SWEEP_INDEX"] == index
    assert "elsewhere" not in job["entrypoint"]
    assert os.environ.get("RAY_AUTH_TOKEN", "no token") not in json.dumps(job)


# -- server-sent events ------------------------------------------------------------------------------------------------


SWEEP = "20260801-000000-aa"


class Sweep:
    """A running sweep of three runs, which a test moves on."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.runs = [tiny_run(seed=seed) for seed in range(3)]
        members = [SweepRun(run_id=run.run_id, row=f"row {run.seed}", labels={}, seed=run.seed) for run in self.runs]
        self.record: SweepRecord = sweep_record(SWEEP, members, status="running", ended_ms=None)
        store.write_sweep(self.record, ttl_s=60)

    def set(self, number: int, status: str, step: int = 0, worker: str = "host:1", message: str | None = None) -> None:
        run = self.runs[number]
        row = RunRecord.of(
            run.run_id, status, run.model_dump(mode="json"), step=step, worker_id=worker, message=message
        )
        self.store.index.write([row])
        if status == "running":
            self.store.index.acquire(row, SWEEP, 60)
            event = RunEvent(run_id=run.run_id, status="running", step=step, worker_id=worker)
            self.store.index.renew(SWEEP, 60, [event])

    def end(self, status: str = "finished") -> None:
        self.store.write_sweep(self.record.model_copy(update={"status": status, "ended_ms": 5}))


@pytest.fixture
def sweep(own_sample: SampleStore) -> Sweep:
    return Sweep(own_sample.store)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "TICK_S", 0.02)


@pytest.fixture
def client(own_sample: SampleStore, fast: None) -> Iterator[httpx.Client]:
    with serving(own_sample.settings(max_listeners=2)) as client:
        yield client


@dataclass
class Event:
    kind: str
    data: str
    id: str | None


def events(response: httpx.Response) -> Iterator[Event]:
    for each in server_events(response.iter_lines()):
        yield Event(*each)


def test_the_tracker_sums_up_a_sweep(sweep: Sweep) -> None:
    now_s = 0.0
    tracker = ProgressTracker(sweep.store, SWEEP, clock=lambda: now_s)
    first = tracker.poll()
    assert (first.status, first.runs, first.counts, first.groups, first.nodes) == ("running", 3, {"pending": 3}, 0, 0)
    assert (first.steps_per_s, first.eta_s, first.failures) == (None, None, [])

    sweep.set(0, "running", step=1, worker="one:1")
    sweep.set(1, "running", step=2, worker="one:2")
    now_s = 10.0
    second = tracker.poll()
    assert (second.counts, second.groups, second.nodes) == ({"pending": 1, "running": 2}, 2, 1)
    # 3 steps in 10 s; 5 + 4 + 6 steps are left: the pending run counts as long as the others.
    assert (second.steps_per_s, second.eta_s) == (pytest.approx(0.3), pytest.approx(15 / 0.3))

    sweep.set(0, "finished", step=6)
    sweep.set(1, "failed", step=2, message="Diverged")
    now_s = 20.0
    third = tracker.poll()
    assert third.counts == {"pending": 1, "finished": 1, "failed": 1}
    assert [(each.row, each.message) for each in third.failures] == [("row 1", "Diverged")]
    assert third.steps_per_s == pytest.approx((8 - 0) / 20)
    assert third.eta_s == pytest.approx(6 / third.steps_per_s)

    now_s = 200.0
    assert tracker.poll().steps_per_s is None  # nothing has changed for longer than the window
    sweep.end()
    last = tracker.poll()
    assert (last.status, last.groups, last.nodes, last.steps_per_s) == ("finished", None, None, None)


def test_a_sweep_is_followed_to_its_end(client: httpx.Client, sweep: Sweep) -> None:
    assert client.head(f"{API}/sweeps/{SWEEP}/events").content == b""  # it does not wait for events
    with client.stream("GET", f"{API}/sweeps/{SWEEP}/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        stream = events(response)
        first = next(stream)
        assert (first.kind, json.loads(first.data)["counts"]) == ("progress", {"pending": 3})
        sweep.set(0, "failed", message="Diverged")
        second = next(stream)
        assert json.loads(second.data)["failures"] == [
            {"run_id": sweep.runs[0].run_id, "row": "row 0", "message": "Diverged"}
        ]
        assert int(second.id or "") > int(first.id or "")
        sweep.end("failed")
        last = list(stream)[-1]
    assert (last.kind, last.id, json.loads(last.data)["status"]) == ("end", "end", "failed")
    assert client.get(f"{API}/sweeps/{SWEEP}/events", headers={"last-event-id": "end"}).status_code == 204


def test_it_is_resumed_after_the_last_event(client: httpx.Client, sweep: Sweep) -> None:
    with client.stream("GET", f"{API}/sweeps/{SWEEP}/events") as response:
        first = next(events(response))
    with client.stream("GET", f"{API}/sweeps/{SWEEP}/events", headers={"last-event-id": first.id or ""}) as response:
        sweep.set(0, "finished", step=6)
        again = next(events(response))  # not the first one once more
        assert json.loads(again.data)["counts"] == {"pending": 2, "finished": 1}
    sweep.set(1, "finished", step=6)
    with client.stream("GET", f"{API}/sweeps/{SWEEP}/events", headers={"last-event-id": first.id or ""}) as response:
        # The first may be a look that another listener had half a second ago.
        assert any(json.loads(each.data)["counts"] == {"pending": 1, "finished": 2} for each in events(response))


def test_listeners_are_limited(client: httpx.Client, sweep: Sweep) -> None:
    url = f"{API}/sweeps/{SWEEP}/events"
    with client.stream("GET", url) as first, client.stream("GET", url) as second:
        streams = [events(first), events(second)]  # a stream that is dropped is closed
        assert [next(stream).kind for stream in streams] == ["progress"] * 2
        refused = client.get(url)
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_requests")
        assert int(refused.headers["retry-after"]) > 0
        del streams
    until(lambda: _is_streamed(client, url))


def _is_streamed(client: httpx.Client, url: str) -> bool:
    with client.stream("GET", url) as response:
        return response.status_code == 200


def test_comments_keep_a_quiet_connection_open(
    own_sample: SampleStore, sweep: Sweep, fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "HEARTBEAT_S", 0.05)
    with (
        serving(own_sample.settings()) as client,
        client.stream("GET", f"{API}/sweeps/{SWEEP}/events") as response,
    ):
        text = ""
        for part in response.iter_text():
            text += part
            if text.count("\n: ping") >= 2:
                break
    assert text.count("data:") == 1


def test_listeners_share_one_look_and_a_slow_one_gets_the_latest(
    own_sample: SampleStore, sweep: Sweep, fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = Queries(own_sample.store)
    watchers = Watchers(lambda: queries.store)
    looks: list[None] = []
    poll = ProgressTracker.poll
    monkeypatch.setattr(ProgressTracker, "poll", lambda self: looks.append(None) or poll(self))

    async def scenario() -> None:
        streams = [watchers.events(SWEEP, None) for _ in range(50)]
        first = await asyncio.gather(*map(anext, streams))
        assert len({event.data for event in first}) == 1
        assert len(looks) < 5
        for step in range(5):
            sweep.set(0, "running", step=step)
            sweep.set(1, "failed", message=f"step {step}")
            assert await anext(streams[0])
        slow = json.loads((await anext(streams[1])).data or "")
        assert slow["failures"][0]["message"] == "step 4"
        sweep.end("failed")
        for stream in streams[1:]:
            assert [event.event async for event in stream][-1] == "end"
        await streams[0].aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize("stuck", ["event", "heartbeat"])
def test_a_listener_that_does_not_read_loses_its_place(stuck: str) -> None:
    sent, left = [], []

    async def events() -> AsyncIterator[ServerSentEvent]:
        try:
            yield ServerSentEvent("1")
            if stuck == "event":
                yield ServerSentEvent("2")
            await asyncio.sleep(3600)
        finally:
            left.append(True)

    async def send(message: Any) -> None:
        if len(sent) == 2:  # the head and the first event fill the buffers of the connection
            await asyncio.sleep(3600)
        sent.append(message["type"])

    async def receive() -> Any:
        await asyncio.sleep(3600)

    async def answered() -> None:
        stream = EventStream(events(), ping=1, send_timeout=0.1)
        await asyncio.wait_for(stream({"type": "http", "method": "GET"}, receive, send), 60)

    asyncio.run(answered())
    assert sent == ["http.response.start", "http.response.body"]
    assert left == [True]
