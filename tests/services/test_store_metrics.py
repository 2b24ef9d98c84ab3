"""Metrics of the store: when they are read, and what they say where the index does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from cope_services.http import store_metrics
from cope_services.http.store_metrics import READ_EVERY_S, STATUSES, StoreMetrics

from cope_sweep.store import Store
from cope_sweep.store.index import IndexUnavailable, Lease, RunRow
from tests.tiny import tiny_run


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def acquire(store: Store, seed: int, ttl_s: float) -> None:
    run = tiny_run(seed=seed)
    row = RunRow(run.run_id, "running", run.model_dump(mode="json"))
    assert isinstance(store.index.acquire(row, "owner", ttl_s), Lease)


def samples(metrics: StoreMetrics) -> dict[tuple[str, ...], float]:
    return {(each.name, *each.labels.values()): each.value for family in metrics.collect() for each in family.samples}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return Store(tmp_path / "store", create=True)


def test_scrapes_within_a_few_seconds_share_their_numbers(store: Store) -> None:
    clock = Clock()
    metrics = StoreMetrics(lambda: store, clock)
    assert samples(metrics)["cope_runs", "running"] == 0
    acquire(store, 0, 60)
    clock.now_s += READ_EVERY_S / 2
    assert samples(metrics)["cope_runs", "running"] == 0
    clock.now_s += READ_EVERY_S
    assert samples(metrics)["cope_runs", "running"] == 1


def test_the_heartbeat_is_that_of_the_lease_that_expires_first(store: Store) -> None:
    assert samples(StoreMetrics(lambda: store))[("cope_heartbeat_age_seconds",)] == 0
    acquire(store, 0, 30)
    acquire(store, 1, 20)
    assert 10 <= samples(StoreMetrics(lambda: store))[("cope_heartbeat_age_seconds",)] <= 30


def test_an_index_that_does_not_answer_is_said(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(index: object) -> None:
        raise IndexUnavailable("no answer")

    monkeypatch.setattr(store_metrics, "activity", fail)
    found = samples(StoreMetrics(lambda: store))
    assert found.keys() == {("cope_index_up",), ("cope_disk_free_bytes",), ("cope_disk_size_bytes",)}
    assert found[("cope_index_up",)] == 0


def test_every_status_has_a_number_and_no_label_names_a_run(store: Store) -> None:
    for seed in range(5):
        acquire(store, seed, 60)
    found = samples(StoreMetrics(lambda: store))
    assert {key[1:] for key in found if key[0] in ("cope_runs", "cope_sweeps")} == {(each,) for each in STATUSES}
    assert all(len(key) == 1 for key in found if key[0] not in ("cope_runs", "cope_sweeps"))


def test_mlflow_has_a_backlog_only_where_it_is_used(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    acquire(store, 0, -1)
    assert ("cope_mlflow_backlog",) not in samples(StoreMetrics(lambda: store))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    assert samples(StoreMetrics(lambda: store))[("cope_mlflow_backlog",)] == 1
