"""The application: health checks, web page and API documentation."""

from __future__ import annotations

from typing import get_args

import httpx
import pytest

from cope_sweep.store.event import Status
from tests.services.sample_store import API, SampleStore, serving


def test_health(client: httpx.Client) -> None:
    assert client.get("/health/live").json() == {"status": "live"}
    assert client.get("/health/ready").json() == {"status": "ready"}


def test_not_ready_without_the_folder_of_ablations(own_sample: SampleStore) -> None:
    with serving(own_sample.settings()) as client:
        for path in own_sample.ablations.iterdir():
            path.unlink()
        own_sample.ablations.rmdir()
        response = client.get("/health/ready")
        assert response.status_code == 503
        assert response.json()["code"] == "not_ready"


def test_a_missing_store_has_no_runs(sample: SampleStore) -> None:
    with serving(sample.settings(store=sample.store_folder / "none")) as client:
        assert client.get("/health/ready").status_code == 200
        assert client.get(f"{API}/runs").json()["total"] == 0
        assert client.get(f"{API}/ablations/tiny").json()["counts"] == {"pending": 4}
        assert client.get(f"{API}/ablations/tiny/table").json()["complete"] is False


def test_the_page_loads_only_its_own_files(client: httpx.Client) -> None:
    page = client.get("/")
    assert "script-src 'self'" in page.headers["content-security-policy"]
    for name in ("style.css", "page.js", "plot.js"):
        assert f"/static/{name}" in page.text
        asset = client.get(f"/static/{name}")
        assert asset.status_code == 200
        assert "https://" not in asset.text
    assert client.get("/static/../app.py").status_code == 404
    assert client.get("/static/%2e%2e/app.py").status_code == 404


@pytest.mark.parametrize("status", get_args(Status))
def test_the_page_has_a_sign_and_a_colour_for_every_status(client: httpx.Client, status: str) -> None:
    assert f' {status}: "' in client.get("/static/page.js").text.partition("SIGNS = {")[2].partition("}")[0]
    style = client.get("/static/style.css").text
    assert f"--{status}: light-dark(" in style
    assert f".{status} {{ background: var(--{status}); fill: var(--{status}); }}" in style


def test_the_api_documentation_has_every_endpoint_and_its_errors(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    paths = document["paths"]
    assert len(paths) == 39
    problem = document["components"]["schemas"]["ProblemDetails"]
    assert {"title", "status", "detail", "code"} <= set(problem["required"])
    for path, operations in paths.items():
        for operation in operations.values():
            if path.startswith(API):
                assert {"404", "422", "500"} < set(operation["responses"])
                for status, response in operation["responses"].items():
                    if status >= "400":
                        assert list(response["content"]) == ["application/problem+json"]
                        schema = response["content"]["application/problem+json"]["schema"]
                        assert schema["$ref"] == "#/components/schemas/ProblemDetails"
                assert ("requestBody" in operation) == ("415" in operation["responses"])
            elif path.startswith(("/v1", "/openai", "/token", "/detok")):
                schema = operation["responses"]["4XX"]["content"]["application/json"]["schema"]
                assert schema["$ref"].endswith("/OpenAIError")
                assert "422" not in operation["responses"]
