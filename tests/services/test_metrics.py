"""Metrics for Prometheus, and the access log."""

from __future__ import annotations

import logging

import httpx
import pytest
from cope_services.http.app import Service, create_app
from cope_services.http.metrics import ACCESS, cumulative
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from tests.services.sample_store import API, SampleStore, serving

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
    found = samples(asked)
    route = f"{API}/runs/{{run_id}}"
    assert found[COUNTER, "GET", route, "200"] == 3
    assert found[COUNTER, "GET", route, "404"] == 1
    assert found[COUNTER, "DELETE", route, "405"] == 1
    assert found[COUNTER, "HEAD", f"{API}/runs/{{run_id}}/checkpoint/{{file}}", "200"] == 1
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
    assert found["cope_inference_batch_windows_bucket", "2"] == batches
    assert found[("cope_models",)] == 1
    assert found[("cope_models_loads_total",)] == 1
    assert found[("cope_models_hits_total",)] == 1
    assert found[("cope_models_bytes",)] > 1000
    assert found[("cope_inference_queued_tokens",)] == 0


def test_buckets_are_cumulative() -> None:
    assert list(cumulative([(1, 5), (2, 0), (4, 3), (8, 7)])) == [("1", 5), ("2", 5), ("4", 8)]


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


def test_an_error_of_the_server_counts(app: Service, asked: TestClient) -> None:
    @app.get("/failing")
    def failing() -> None:
        raise RuntimeError("wrong")

    assert asked.get("/failing").status_code == 500
    found = samples(asked)
    assert found[COUNTER, "GET", "/failing", "500"] == 1
    assert found[("cope_http_requests_active",)] == 1


def test_every_application_has_its_own_metrics(sample: SampleStore) -> None:
    first, second = (TestClient(create_app(sample.settings()), base_url="http://127.0.0.1") for _ in range(2))
    first.get("/health/live")
    assert (COUNTER, "GET", "/health/live", "200") in samples(first)
    assert (COUNTER, "GET", "/health/live", "200") not in samples(second)


def test_the_access_log_has_no_secrets(asked: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=ACCESS.name):
        asked.get(f"{API}/runs?key=hidden&limit=2", headers={"authorization": "Bearer hidden"})
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
