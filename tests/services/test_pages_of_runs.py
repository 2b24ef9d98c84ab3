"""Pages of runs over REST: those from memory are those of the database, and errors are the same."""

from __future__ import annotations

from typing import Any

import pytest
from cope_services import freshness
from cope_services.app import create_app
from fastapi.testclient import TestClient

from cope_sweep.queries import Queries
from tests.results.ablations import begin, end
from tests.services.sample_store import API, SampleStore

VALID = [
    "", "?limit=1", "?limit=1&offset=1", "?status=failed", "?sort=dense/token_error&order=desc&limit=2",
    "?filter=model.position%3Dcope&filter=train.steps%3E1", "?filter=facts.device%3Dcpu&fields=status,step",
    "?fields=seed&fields=model.dim&sort=model.dim", "?filter=tags.row%3DCoPE", "?run={run}", "?ablation=tiny",
    "?ablation=tiny&scale=longer&limit=2", "?unknown=1&sort=seed",
]  # fmt: skip
FAULTY = [
    "?limit=0", "?limit=x", "?order=up", "?status=none", "?sort=nothing", "?filter=seed", "?filter=seed%3Da",
    "?scale=longer", "?fields=nothing", "?cursor=xyz", "?offset=-1",
]  # fmt: skip


@pytest.fixture
def client(own_sample: SampleStore, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its first state is kept: it does not look whether the store has changed."""
    monkeypatch.setattr(freshness, "CHECK_EVERY_S", 3600.0)
    with TestClient(create_app(own_sample.settings()), base_url="http://127.0.0.1") as client:
        yield client


def test_pages_from_memory_are_those_of_the_database(client: TestClient, sample: SampleStore, monkeypatch: Any) -> None:
    paths = [f"{API}/runs{query.format(run=sample.ids[0])}" for query in VALID]
    queries: Queries = client.app.state.components.queries  # type: ignore[attr-defined]
    asked: list[object] = []
    original = Queries.runs

    def counted(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(Queries, "runs", counted)
    with monkeypatch.context() as without:
        without.setattr(Queries, "known_runs", lambda *args, **kwargs: None)
        expected = {path: client.get(path).json() for path in paths}
    assert len(asked) == len(paths)
    for path in paths:
        client.get(f"{path}{'&' if '?' in path else '?'}n=1")  # another URL: the answer itself is not kept
        assert queries._catalogue is not None
        queries._catalogue.wait()
    asked.clear()
    for path in paths:
        answer = client.get(f"{path}{'&' if '?' in path else '?'}n=2")
        assert (answer.status_code, answer.json()) == (200, expected[path]), path
    assert len(asked) == 4, "tags, chosen runs, and two of an ablation"


def test_cursors_of_pages_from_memory(client: TestClient) -> None:
    found, cursor = [], ""
    while True:
        page = client.get(f"{API}/runs?limit=1&sort=seed{cursor}").json()
        found += [run["run_id"] for run in page["runs"]]
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert len(found) == len(set(found)) == 3


@pytest.mark.parametrize("query", FAULTY)
def test_faulty_queries_are_refused_alike(client: TestClient, query: str) -> None:
    first, again = client.get(f"{API}/runs{query}"), client.get(f"{API}/runs{query}&n=1")
    assert first.status_code == again.status_code == 422
    assert first.json()["detail"] == again.json()["detail"]


def test_a_run_that_ends_is_on_the_next_page(own_sample: SampleStore) -> None:
    with TestClient(create_app(own_sample.settings()), base_url="http://127.0.0.1") as client:
        queries: Queries = client.app.state.components.queries  # type: ignore[attr-defined]
        for _ in range(2):
            assert client.get(f"{API}/runs").json()["total"] == 3
            assert queries._catalogue is not None
            queries._catalogue.wait()
        end(own_sample.store, begin(own_sample.store, own_sample.plan.runs[3]))
        assert client.get(f"{API}/runs").json()["total"] == 4
