"""Answers that are kept: made once for each version, revalidated by ETag, and never shown to a key without the scope."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from cope_services.http import cached_route, freshness
from cope_services.http.freshness import Freshness
from cope_services.http.keys import KeysFile

from cope_sweep.read.queries import Queries
from cope_sweep.store.index import IndexUnavailable
from tests.read.tables.ablations import begin, end
from tests.services.sample_store import API, SampleStore, serving

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
    monkeypatch.setattr(freshness, "CHECK_EVERY_S", 3600.0)
    with serving(own_sample.settings()) as client:
        bodies = {client.get(f"{API}/runs").text for _ in range(20)}
        other = client.get(f"{API}/runs?status=failed").json()
    assert len(bodies) == 1
    assert other["total"] == 1
    assert (asked.count("ListRuns"), asked.count("state")) == (2, 1)


def test_a_change_is_shown_after_the_time_of_the_check(
    own_sample: SampleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freshness, "CHECK_EVERY_S", 0.2)
    with serving(own_sample.settings()) as client:
        assert client.get(f"{API}/runs").json()["total"] == 3
        end(own_sample.store, begin(own_sample.store, own_sample.plan.runs[3]))
        deadline_s = time.monotonic() + 60
        while client.get(f"{API}/runs").json()["total"] == 3:
            assert time.monotonic() < deadline_s


def test_answers_of_a_store_that_changes_all_the_time_are_paced(
    own_sample: SampleStore, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    monkeypatch.setattr(cached_route, "PACE", 1e9)
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

    monkeypatch.setattr(freshness, "CHECK_EVERY_S", 3600.0)
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
    monkeypatch.setattr(freshness, "PATIENCE_S", 0.01)
    released = threading.Event()
    states = iter([lambda: 1, released.wait])

    class Stalling:
        def state(self) -> object:
            return next(states)()

    async def ask() -> tuple[str, str]:
        watched = Freshness(Stalling())  # type: ignore[arg-type]
        first = await watched.version()
        second = await watched.version()
        released.set()
        return first, second

    first, second = asyncio.run(ask())
    assert first == second != ""
