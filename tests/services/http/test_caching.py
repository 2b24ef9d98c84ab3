"""Answers that are kept: made once for each version, revalidated by ETag, and never shown to a key without the scope."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from cope_services.http import caching
from cope_services.http.access import KeysFile
from cope_services.http.caching import Answers

from cope_sweep.read.queries import Queries, ablations
from cope_sweep.store.index import IndexUnavailable
from tests.read.tables.ablations import begin
from tests.services.sample_store import API, TINY, SampleStore, serving
from tests.store.sweeps import end
from tests.store.waiting import until

POLLED = [
    "/ablations", "/ablations/tiny", "/ablations/tiny/table", "/ablations/tiny/curves", "/ablations/tiny/runs",
    "/ablations/tiny/figures", "/ablations/tiny/figures/summary?format=csv", "/ablations/tiny/report?format=markdown",
    "/runs", "/runs?filter=seed=0&sort=dense/loss", "/runs/{run}", "/runs/{run}/curve", "/runs/{run}/logs", "/sweeps",
    "/curves?run={run}&metric=train/loss", "/diff?left={run}&right={run}",
]  # fmt: skip


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


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The queries that reached the store, in order."""
    names: list[str] = []
    ask, state = Queries.ask, Queries.state

    def counted_ask(queries: Queries, question: Any) -> Any:
        names.append(type(question).__name__)
        return ask(queries, question)

    def counted_state(queries: Queries) -> Any:
        names.append("state")
        return state(queries)

    monkeypatch.setattr(Queries, "ask", counted_ask)
    monkeypatch.setattr(Queries, "state", counted_state)
    return names


def test_an_unchanged_store_is_not_asked_again(
    own_sample: SampleStore, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    monkeypatch.setattr(caching, "CHECK_EVERY_S", 3600.0)
    with serving(own_sample.settings()) as client:
        bodies = {client.get(f"{API}/runs").text for _ in range(20)}
        other = client.get(f"{API}/runs?status=failed").json()
    assert len(bodies) == 1
    assert other["total"] == 1
    assert (asked.count("ListRuns"), asked.count("state")) == (2, 1)


def test_a_change_is_shown_after_the_time_of_the_check(
    own_sample: SampleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caching, "CHECK_EVERY_S", 0.2)
    with serving(own_sample.settings()) as client:
        assert client.get(f"{API}/runs").json()["total"] == 3
        end(own_sample.store, begin(own_sample.store, own_sample.plan.runs[3]))
        until(lambda: client.get(f"{API}/runs").json()["total"] == 4)


def test_answers_of_a_store_that_changes_all_the_time_are_paced(
    own_sample: SampleStore, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    monkeypatch.setattr(caching, "PACE", 1e9)
    with serving(own_sample.settings()) as client:
        for _ in range(5):
            assert client.get(f"{API}/runs").json()["total"] == 3
            end(own_sample.store, begin(own_sample.store, own_sample.plan.runs[3]))
    assert asked.count("ListRuns") == 1


def test_requests_for_the_same_share_one_making(
    own_sample: SampleStore, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    ask = Queries.ask

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.5)
        return ask(*args, **kwargs)

    monkeypatch.setattr(caching, "CHECK_EVERY_S", 3600.0)
    monkeypatch.setattr(Queries, "ask", slow)
    with serving(own_sample.settings()) as client, ThreadPoolExecutor(8) as threads:
        client.get(f"{API}/sweeps")  # plans and version are known
        bodies = set(threads.map(lambda _: client.get(f"{API}/runs").text, range(8)))
    assert len(bodies) == 1
    assert asked.count("ListRuns") == 1


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


def test_a_kept_answer_needs_the_scope_of_its_route(own_sample: SampleStore) -> None:
    settings = own_sample.settings()
    keys = KeysFile(settings.keys_file)
    readers, others = keys.create("reader", ["read"]), keys.create("other", ["infer"])
    with serving(settings) as client:
        for _ in range(2):
            for secret, status in ((readers, 200), (others, 403), ("wrong", 401)):
                answer = client.get(f"{API}/runs", headers={"authorization": f"Bearer {secret}"})
                assert answer.status_code == status


def test_an_answer_that_is_known_does_not_wait_for_a_store_that_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "PATIENCE_S", 0.01)
    released = threading.Event()
    states = iter([lambda: 1, released.wait])

    class Stalling:
        def state(self) -> object:
            return next(states)()

    async def ask() -> tuple[str, str]:
        watched = Answers(Stalling())
        first = await watched.version()
        second = await watched.version()
        released.set()
        return first, second

    first, second = asyncio.run(ask())
    assert first == second != ""


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
    urls = [f"{API}/ablations/{BIG}/table"] * 30
    urls += [f"{API}/runs?offset={number}" for number in range(30)]
    with serving(own_sample.settings()) as client, ThreadPoolExecutor(60) as threads:
        try:
            waiting = [threads.submit(httpx.get, f"{client.base_url}{url}", timeout=120) for url in urls]
            assert gate.reached.wait(60)
            for path in ("/ablations/tiny", "/ablations/tiny/table", "/sweeps"):
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
        assert answer.json()["code"] == "invalid_ablation"
        assert "more than" in answer.json()["detail"]
        listed = {each["name"]: each for each in client.get(f"{API}/ablations").json()}
        assert "leave out axes" in listed[BIG]["error"]
        assert listed["tiny"]["runs"] == 4
