"""Metrics for Prometheus, and the access log."""

from __future__ import annotations

import logging

import httpx
import pytest
from cope_services.http.app import Service, create_app
from cope_services.http.metrics import ACCESS, READ_EVERY_S, STATUSES, StoreMetrics
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from cope_sweep.store import RunRecord, Store
from cope_sweep.store.index import Index, IndexUnavailable, Lease
from cope_sweep.sweep.leases import LEASE_S
from tests.helpers.sample_store import API, SampleStore, serving
from tests.helpers.tiny import tiny_run

COUNTER, SECONDS = "cope_http_requests_total", "cope_http_request_duration_seconds"


@pytest.fixture
def app(sample: SampleStore) -> Service:
    return create_app(sample.settings(access_log=True))


@pytest.fixture
def asked(app: Service) -> TestClient:
    return TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)


def samples(client: httpx.Client) -> dict[tuple[str, ...], float]:
    """Every sample of `/metrics`: its name and the values of its labels, and its value."""
    response = client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(response.text)
    return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}


def test_requests_are_counted_by_template_method_and_status(asked: TestClient, sample: SampleStore) -> None:
    for run_id in sample.ids[:3]:
        asked.get(f"{API}/runs/{run_id}")
    asked.get(f"{API}/runs/none")
    asked.delete(f"{API}/runs/none")
    asked.head(f"{API}/runs/{sample.ids[0]}/checkpoint/model.safetensors")
    asked.get("/static/style.css")
    asked.get("/static/none.css")
    asked.get("/tokenizer_info?model=none")
    asked.get("/openai/none/tokenizer_info")
    found = samples(asked)
    route = f"{API}/runs/{{run_id}}"
    assert found[COUNTER, "GET", route, "200"] == 3
    assert found[COUNTER, "GET", route, "404"] == 1
    assert found[COUNTER, "DELETE", route, "405"] == 1
    assert found[COUNTER, "HEAD", f"{API}/runs/{{run_id}}/checkpoint/{{file}}", "200"] == 1
    assert found[COUNTER, "GET", "/tokenizer_info", "404"] == 1
    assert found[COUNTER, "GET", "/openai/{run_id}/tokenizer_info", "404"] == 1
    assert found[COUNTER, "GET", "/static", "200"] == 1
    assert found[COUNTER, "GET", "/static", "404"] == 1
    assert found[f"{SECONDS}_count", "GET", route] == 4
    assert 0 < found[f"{SECONDS}_sum", "GET", route] < 60
    assert found[("cope_http_requests_active",)] == 1  # the request for the metrics
    assert found[("process_resident_memory_bytes",)] > 1 << 20
    assert found[("cope_inference_requests",)] == 0


def test_inference_is_counted(sample: SampleStore) -> None:
    with serving(sample.settings()) as client:
        for _ in range(2):
            body = {"models": [sample.ids[0]], "tokens": [[1, 15, 3, 4], [15, 6, 7]]}
            assert client.post(f"{API}/perplexity", json=body).status_code == 200
        found = samples(client)
    assert found[("cope_inference_scored_tokens_total",)] == 2 * (3 + 2)
    assert found[("cope_inference_batch_windows_sum",)] == 4
    batches = found[("cope_inference_batch_windows_count",)]
    assert 2 <= batches <= 4
    buckets = {key[1]: value for key, value in found.items() if key[0] == "cope_inference_batch_windows_bucket"}
    assert list(buckets) == ["1", "2", "4", "8", "16", "32", "64", "128", "256", "+Inf"]
    assert {value for bound, value in buckets.items() if bound != "1"} == {batches}  # they are cumulative
    assert found[("cope_models",)] == 1
    assert found[("cope_models_loads_total",)] == 1
    assert found[("cope_models_hits_total",)] == 1
    assert found[("cope_models_bytes",)] > 1000
    assert found[("cope_inference_queued_tokens",)] == 0


def test_clients_cannot_add_labels(asked: TestClient) -> None:
    for number in range(20):
        asked.get(f"/none/{number}")
        asked.request(f"WORD{number}", "/health/live")
        asked.get("/", headers={"host": f"{number}.example"})
    found = [key[1:] for key in samples(asked) if key[0] == COUNTER]
    assert ("GET", "unknown", "404") in found
    assert ("unknown", "/health/live", "405") in found
    assert ("GET", "unknown", "421") in found
    assert len(found) == 3


def test_the_access_log_has_no_secrets(asked: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=ACCESS.name):
        asked.get(f"{API}/runs?search=hidden&limit=2", headers={"authorization": "Bearer hidden"})
        asked.get("/a%0ab%1b")
    first, second = (record.getMessage() for record in caplog.records if record.name == ACCESS.name)
    assert f'"GET {API}/runs" 200' in first
    assert '"GET /a%0ab%1b" 404' in second.replace("%0A", "%0a").replace("%1B", "%1b")
    assert "hidden" not in caplog.text


def test_the_version(client: httpx.Client) -> None:
    import platform

    import torch

    from cope_sweep import __version__

    version = client.get(f"{API}/version").json()
    assert version.keys() == {"version", "python", "torch", "can_submit"}
    assert version["can_submit"] is False
    assert (version["version"], version["python"]) == (__version__, platform.python_version())
    assert version["torch"] == torch.__version__.partition("+")[0]


# -- metrics of the store: when they are read, and what they say where the index does not answer -----------------------


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def acquire(store: Store, seed: int, ttl_s: float) -> None:
    run = tiny_run(seed=seed)
    row = RunRecord.of(run.run_id, "running", run.model_dump(mode="json"))
    assert isinstance(store.index.acquire(row, "sweep", ttl_s), Lease)


def store_samples(metrics: StoreMetrics) -> dict[tuple[str, ...], float]:
    return {(each.name, *each.labels.values()): each.value for family in metrics.collect() for each in family.samples}


def test_scrapes_within_a_few_seconds_share_their_numbers(store: Store) -> None:
    clock = Clock()
    metrics = StoreMetrics(lambda: store, clock)
    assert store_samples(metrics)["cope_runs", "pending"] == 0
    acquire(store, 0, 60)
    clock.now_s += READ_EVERY_S / 2
    assert store_samples(metrics)["cope_runs", "pending"] == 0
    clock.now_s += READ_EVERY_S
    assert store_samples(metrics)["cope_runs", "pending"] == 1


def test_the_heartbeat_is_that_of_the_lease_that_expires_first(store: Store) -> None:
    assert store_samples(StoreMetrics(lambda: store))[("cope_heartbeat_age_seconds",)] == 0
    acquire(store, 0, LEASE_S)
    acquire(store, 1, LEASE_S - 10)
    assert 10 <= store_samples(StoreMetrics(lambda: store))[("cope_heartbeat_age_seconds",)] <= LEASE_S


def test_an_index_that_does_not_answer_is_said(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(index: Index) -> None:
        raise IndexUnavailable("no answer")

    monkeypatch.setattr(Index, "activity", fail)
    found = store_samples(StoreMetrics(lambda: store))
    assert found.keys() == {("cope_index_up",), ("cope_disk_free_bytes",), ("cope_disk_size_bytes",)}
    assert found[("cope_index_up",)] == 0


def test_every_status_has_a_number_and_no_label_names_a_run(store: Store) -> None:
    for seed in range(5):
        acquire(store, seed, 60)
    found = store_samples(StoreMetrics(lambda: store))
    assert {key[1:] for key in found if key[0] in ("cope_runs", "cope_sweeps")} == {(each,) for each in STATUSES}
    assert all(len(key) == 1 for key in found if key[0] not in ("cope_runs", "cope_sweeps"))
