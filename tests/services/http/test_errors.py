"""Every error has problem details, with a status, a code and a detail."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from cope_services.http.app import create_app
from cope_services.http.errors import INTERNAL_ERROR
from fastapi.testclient import TestClient

from cope_sweep.config import SpecError
from cope_sweep.errors import JsonValue, UserError
from cope_sweep.store import StoreError
from cope_sweep.store.errors import DamagedError
from tests.helpers.sample_store import API, SampleStore


def check_problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The problem details of a response, which has to have this status and code."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert int(response.headers["content-length"]) == len(response.content)
    problem = response.json()
    assert set(problem) == {"type", "title", "status", "detail", "code", "data"}
    assert (problem["type"], problem["title"]) == ("about:blank", response.reason_phrase)
    assert (problem["status"], problem["code"]) == (status, code)
    return problem


def test_every_error_has_the_same_shape(client: httpx.Client) -> None:
    for method, path, status, code in [
        ("GET", "/nope", 404, "not_found"),
        ("GET", f"{API}/nope", 404, "not_found"),
        ("POST", f"{API}/ablations", 405, "method_not_allowed"),
        ("DELETE", f"{API}/runs/0123456789abcdef", 405, "method_not_allowed"),
        ("GET", f"{API}/ablations/%2e%2e%2fstore", 404, "not_found"),
        ("GET", f"{API}/ablations/tiny/table?format=exe", 422, "invalid_request"),
        ("GET", "/static/none.js", 404, "not_found"),
    ]:
        problem = check_problem(client.request(method, path), status, code)
        assert problem["detail"]
    assert client.request("POST", f"{API}/ablations").headers["allow"] == "GET"


@pytest.mark.parametrize(("range_", "status"), [("bytes=999999999-", 416), ("lines=1-2", 400), ("bytes=5-2", 400)])
def test_ranges_that_cannot_be_sent(client: httpx.Client, sample: SampleStore, range_: str, status: int) -> None:
    path = f"{API}/runs/{sample.ids[0]}/checkpoint/model.safetensors"
    response = client.get(path, headers={"range": range_})
    assert response.status_code == status
    if status == 416:
        assert response.headers["content-range"] == f"bytes */{len(client.get(path).content)}"


def test_the_openai_protocol_has_its_own_errors(client: httpx.Client, sample: SampleStore) -> None:
    for response, status, code in [
        (client.get("/v1/models/none"), 404, "not_found"),
        (client.post("/v1/completions", json={"prompt": 1}), 400, "invalid_request"),
        (client.post("/v1/completions", content=b" " * (1 << 21)), 413, "too_large"),
        (client.delete("/v1/models"), 405, "method_not_allowed"),
        (client.get("/v1/nothing"), 404, "not_found"),
    ]:
        assert response.status_code == status
        assert response.headers["content-type"] == "application/json"
        assert set(response.json()) == {"error"}
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert response.json()["error"]["code"] == code


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"", 422, "invalid_request"),
        (b"{", 400, "invalid_json"),
        (b"null", 422, "invalid_request"),
        (b"[" * 10_000, 400, "invalid_json"),
        (b"[" * 100_000, 413, "too_large"),
        (b'{"tokens": [[1, NaN]]}', 422, "invalid_request"),
        (b'{"tokens": [[1, Infinity]]}', 422, "invalid_request"),
        (b'{"tokens": [[1, 1e400]]}', 422, "invalid_request"),
        (b'{"tokens": [[1, ' + b"9" * 10_000 + b"]]}", 400, "invalid_json"),
        (b'{"tokens": [[1, \xff]]}', 400, "invalid_json"),
    ],
)
def test_invalid_bodies(client: httpx.Client, content: bytes, status: int, code: str) -> None:
    url, headers = f"{API}/perplexity", {"content-type": "application/json"}
    response = client.post(url, content=content, headers=headers)
    assert (response.status_code, response.json()["code"]) == (status, code), response.text


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_only_json_is_accepted(client: httpx.Client, sample: SampleStore, media: str) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    with_body = [
        (method, path)
        for path, operations in paths.items()
        for method, operation in operations.items()
        if "requestBody" in operation
    ]
    assert len(with_body) == 10
    for method, path in with_body:
        headers = {"content-type": media} if media else {}
        url = path.replace("{run_id}", sample.ids[0]).replace("{sweep_id}", "20261128-080000-3f2a")
        response = client.request(method, url, content=b"{}", headers=headers)
        error = response.json().get("error") or response.json()
        assert (response.status_code, error["code"]) == (415, "unsupported_media_type"), path


class UnknownError(UserError):
    """A user error that the service does not list."""


class SpecialisedError(SpecError):
    """A subclass of a listed error."""


@pytest.mark.parametrize(
    ("error", "status", "code", "data"),
    [
        (SpecError("bad"), 409, "invalid_ablation", {}),
        (SpecError("bad", code="unknown_key", key="stepz"), 409, "unknown_key", {"key": "stepz"}),
        (SpecialisedError("bad"), 409, "invalid_ablation", {}),
        (StoreError("bad", files=["a", "b"]), 500, "damaged_store", {"files": ["a", "b"]}),
        (DamagedError("bad", file="a"), 409, "damaged_file", {"file": "a"}),
        (UnknownError("bad"), 500, "user_error", {}),
        (RuntimeError("secret"), 500, "internal_error", {}),
    ],
)
def test_an_error_of_the_library_arrives_with_status_code_and_data(
    sample: SampleStore, error: Exception, status: int, code: str, data: dict[str, JsonValue]
) -> None:
    app = create_app(sample.settings())

    @app.get("/failing")
    def failing() -> None:
        raise error

    response = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False).get("/failing")
    problem = check_problem(response, status, code)
    assert problem["data"] == data
    assert problem["detail"] == ("bad" if isinstance(error, UserError) else INTERNAL_ERROR)


def test_clients_are_not_told_where_the_service_is(sample: SampleStore) -> None:
    app = create_app(sample.settings())
    path = str(sample.ablations / "tiny.yaml")

    @app.get("/failing")
    def failing() -> None:
        raise SpecError(f"{path}: bad", place=path, names=[path], inner={"file": path})

    response = TestClient(app, base_url="http://127.0.0.1").get("/failing")
    problem = check_problem(response, 409, "invalid_ablation")
    shown = "ablations/tiny.yaml"
    assert problem["data"] == {"place": shown, "names": [shown], "inner": {"file": shown}}
    assert problem["detail"] == f"{shown}: bad"
