"""Every error has a status, a type and a message."""

from __future__ import annotations

import json

import httpx
import pytest
from cope_services.app import create_app
from fastapi.testclient import TestClient

from cope_sweep.errors import UserError
from cope_sweep.spec import SpecError
from cope_sweep.store import StoreError
from tests.services.sample_store import API, SampleStore


def test_every_error_has_the_same_shape(client: httpx.Client) -> None:
    for method, path, status, kind in [
        ("GET", "/nope", 404, "not_found"),
        ("GET", f"{API}/nope", 404, "not_found"),
        ("POST", f"{API}/ablations", 405, "method_not_allowed"),
        ("DELETE", f"{API}/runs/0123456789abcdef", 405, "method_not_allowed"),
        ("GET", f"{API}/ablations/%2e%2e%2fstore", 404, "not_found"),
        ("GET", f"{API}/ablations/tiny/table?format=exe", 422, "invalid_request"),
        ("GET", "/static/none.js", 404, "not_found"),
    ]:
        response = client.request(method, path)
        assert response.status_code == status
        assert set(response.json()) == {"error"}
        assert set(response.json()["error"]) == {"type", "message"}
        assert response.json()["error"]["type"] == kind
    assert client.request("POST", f"{API}/ablations").headers["allow"] == "GET"


@pytest.mark.parametrize(
    ("content", "status", "kind"),
    [
        (b"", 422, "invalid_request"),
        (b"{", 400, "invalid_json"),
        (b"null", 422, "invalid_request"),
        (b"[" * 100_000, 400, "invalid_json"),
        (b'{"tokens": [[1, NaN]]}', 422, "invalid_request"),
        (b'{"tokens": [[1, Infinity]]}', 422, "invalid_request"),
        (b'{"tokens": [[1, 1e400]]}', 422, "invalid_request"),
        (b'{"tokens": [[1, ' + b"9" * 10_000 + b"]]}", 400, "invalid_json"),
        (b'{"tokens": [[1, \xff]]}', 400, "invalid_json"),
        (b" " * (1 << 21), 413, "too_large"),
    ],
)
def test_invalid_bodies(client: httpx.Client, sample: SampleStore, content: bytes, status: int, kind: str) -> None:
    url, headers = f"{API}/runs/{sample.ids[0]}/perplexity", {"content-type": "application/json"}
    response = client.post(url, content=content, headers=headers)
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind), response.text


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_only_json_is_accepted(client: httpx.Client, sample: SampleStore, media: str) -> None:
    content = json.dumps({"tokens": [[1, 2]]}).encode()
    url = f"{API}/runs/{sample.ids[0]}/perplexity"
    response = client.post(url, content=content, headers={"content-type": media} if media else {})
    assert (response.status_code, response.json()["error"]["type"]) == (415, "unsupported_media_type")


class UnknownError(UserError):
    """A user error that the service does not list."""


class SpecialisedError(SpecError):
    """A subclass of a listed error."""


@pytest.mark.parametrize(
    ("error", "status", "kind", "message"),
    [
        (SpecError("bad file"), 409, "invalid_ablation", "bad file"),
        (SpecialisedError("bad key"), 409, "invalid_ablation", "bad key"),
        (StoreError("bad store"), 500, "damaged_store", "bad store"),
        (UnknownError("bad luck"), 500, "internal_error", "bad luck"),
        (RuntimeError("secret"), 500, "internal_error", "internal server error; the server's log has the traceback"),
    ],
)
def test_library_errors_have_a_status(
    sample: SampleStore, error: Exception, status: int, kind: str, message: str
) -> None:
    app = create_app(sample.settings())

    @app.get("/failing")
    def failing() -> None:
        raise error

    response = TestClient(app, raise_server_exceptions=False).get("/failing")
    assert response.status_code == status
    assert response.json() == {"error": {"type": kind, "message": message}}
