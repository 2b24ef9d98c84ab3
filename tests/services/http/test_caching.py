"""Answers are made once for each version of the store, revalidated by ETag, and never shown without a valid key."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from cope_services.http.access import KeysFile

from cope_sweep.read.queries import Queries, ablations
from cope_sweep.store.index import IndexUnavailable
from tests.helpers.finished_runs import begin
from tests.helpers.sample_store import API, TINY, SampleStore, serving
from tests.helpers.sweeps import end

POLLED = [
    "/ablations", "/ablations/tiny", "/ablations/tiny/table", "/ablations/tiny/curves", "/runs?ablation=tiny",
    "/ablations/tiny/figures", "/ablations/tiny/figures/summary?format=csv", "/ablations/tiny/report?format=markdown",
    "/runs", "/runs?filter=seed=0&sort=dense/loss", "/sweeps", "/diff?left={run}&right={run}",
]  # fmt: skip
FROM_FILES = ["/runs/{run}", "/runs/{run}/curve", "/runs/{run}/logs", "/curves?run={run}&metric=train/loss"]


@pytest.mark.parametrize("path", ["/", "/docs", "/health/live", "/health/ready", "/metrics", f"{API}/version"])
def test_pages_and_health_checks_answer_head(client: httpx.Client, path: str) -> None:
    head = client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == client.get(path).headers["content-type"]


@pytest.mark.parametrize("path", POLLED)
def test_what_is_polled_has_an_etag_and_answers_head(client: httpx.Client, sample: SampleStore, path: str) -> None:
    url = API + path.format(run=sample.ids[0])
    whole = client.get(url)
    assert whole.status_code == 200, whole.text
    assert whole.headers["cache-control"] == "no-cache"
    unchanged = client.get(url, headers={"if-none-match": whole.headers["etag"]})
    assert (unchanged.status_code, unchanged.content) == (304, b"")
    head = client.head(url, headers={"accept-encoding": "identity"})
    plain = client.get(url, headers={"accept-encoding": "identity"})
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["etag"] == plain.headers["etag"]
    assert int(head.headers["content-length"]) == len(plain.content) > 0
    assert client.head(f"{API}/ablations/none").status_code == 404


def test_any_version_is_unchanged_only_where_there_is_one(client: httpx.Client) -> None:
    paths = {"/ablations": 304, "/ablations/nope": 404, "/runs?nope=1": 422}
    for path, status in paths.items():
        assert client.get(API + path, headers={"if-none-match": "*"}).status_code == status, path


def test_a_plan_depends_on_the_load_of_the_machine_too(client: httpx.Client) -> None:
    assert "etag" not in client.get(f"{API}/ablations/tiny/plan").headers


@pytest.mark.parametrize("path", FROM_FILES)
def test_an_answer_from_files_of_runs_has_no_etag(client: httpx.Client, sample: SampleStore, path: str) -> None:
    """They change without the index."""
    url = API + path.format(run=sample.ids[0])
    whole = client.get(url)
    assert (whole.status_code, whole.headers["cache-control"], "etag" in whole.headers) == (200, "no-cache", False)
    assert client.get(url, headers={"if-none-match": "*"}).content == whole.content
    assert (client.head(url).status_code, client.head(url).content) == (200, b"")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The questions that reached the store, in order."""
    names: list[str] = []
    ask = Queries.ask

    def noting_ask(queries: Queries, question: Any) -> Any:
        names.append(type(question).__name__)
        time.sleep(0.2)
        return ask(queries, question)

    monkeypatch.setattr(Queries, "ask", noting_ask)
    return names


def test_an_answer_is_made_once_until_the_store_changes(own_sample: SampleStore, asked: list[str]) -> None:
    with serving(own_sample.settings()) as client, ThreadPoolExecutor(8) as threads:
        bodies = set(threads.map(lambda _: client.get(f"{API}/runs").text, range(8)))
        bodies |= {client.get(f"{API}/runs").text for _ in range(8)}
        assert len(bodies) == 1
        assert asked == ["ListRuns"]
        assert client.get(f"{API}/runs?status=failed").json()["total"] == 1
        end(own_sample.store, begin(own_sample.store, own_sample.plan.runs[3]))
        assert client.get(f"{API}/runs").json()["total"] == 4
    assert asked == ["ListRuns"] * 3


def test_an_error_is_not_kept(own_sample: SampleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise IndexUnavailable("no answer")

    with serving(own_sample.settings()) as client:
        with monkeypatch.context() as broken:
            broken.setattr(Queries, "ask", fail)
            for _ in range(2):
                assert client.get(f"{API}/runs").status_code == 503
        assert client.get(f"{API}/runs").status_code == 200
        with monkeypatch.context() as broken:
            broken.setattr(Queries, "state", fail)
            assert client.get(f"{API}/runs").status_code == 503
        assert client.get(f"{API}/runs").status_code == 200


def test_a_kept_answer_needs_a_key(own_sample: SampleStore) -> None:
    settings = own_sample.settings()
    keys = KeysFile(settings.keys_file)
    secret = keys.create("reader")
    with serving(settings) as client:
        for _ in range(2):
            for presented, status in ((secret, 200), ("wrong", 401)):
                answer = client.get(f"{API}/runs", headers={"authorization": f"Bearer {presented}"})
                assert answer.status_code == status


# -- plans are made once for all requests ------------------------------------------------------------------------------


BIG = "big"


class Gate:
    """Making the plan of the ablation `big` waits until it is opened."""

    def __init__(self) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        self.made = 0

    def wait(self) -> None:
        self.made += 1
        self.reached.set()
        assert self.open.wait(60)


@pytest.fixture
def gate(own_sample: SampleStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """The folder has the ablation `big`."""
    (own_sample.ablations / f"{BIG}.yaml").write_text(TINY)
    gate, expand = Gate(), ablations.expand

    def gated(loaded: Any, **kwargs: Any) -> Any:
        if loaded.name == BIG:
            gate.wait()
        return expand(loaded, **kwargs)

    monkeypatch.setattr(ablations, "expand", gated)
    yield gate
    gate.open.set()


def test_other_routes_answer_while_a_plan_is_made(own_sample: SampleStore, gate: Gate) -> None:
    # More waiting requests than the server has threads for requests.
    with serving(own_sample.settings()) as client, ThreadPoolExecutor(60) as threads:
        url = f"{client.base_url}{API}/ablations/{BIG}/table"
        try:
            waiting = [threads.submit(httpx.get, url, timeout=120) for _ in range(60)]
            assert gate.reached.wait(60)
            for path in ("/ablations/tiny", "/ablations/tiny/table", "/runs", "/sweeps"):
                assert client.get(API + path).status_code == 200
            assert client.get(f"{API}/ablations/none").status_code == 404
            assert client.get("/health/ready").status_code == 200
            assert not any(each.done() for each in waiting)
        finally:
            gate.open.set()
        assert {each.result().status_code for each in waiting} == {200}
        assert {each["name"]: each["runs"] for each in client.get(f"{API}/ablations").json()}[BIG] == 4
    assert gate.made == 2, "one making of its own size, one of its scale"


def test_a_file_with_too_many_runs_is_shown_with_an_error(own_sample: SampleStore) -> None:
    axes = "".join(f"  train.{key}: {[n * 1e-6 for n in range(1, 1001)]}\n" for key in ("lr", "weight_decay"))
    (own_sample.ablations / f"{BIG}.yaml").write_text(TINY.replace("grid:\n", f"grid:\n{axes}"))  # 4,000,000 runs
    with serving(own_sample.settings(max_plan_runs=1000)) as client:
        answer = client.get(f"{API}/ablations/{BIG}/table")
        assert answer.status_code == 409
        assert answer.json()["code"] == "too_many_points"
        listed = {each["name"]: each for each in client.get(f"{API}/ablations").json()}
        assert listed[BIG]["error"]
        assert listed["tiny"]["runs"] == 4
