"""Who may ask what: keys and scopes, hosts and origins, and the headers of every response."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cope_services.http.access import AllowedHosts, _is_same_origin, is_loopback, is_open
from cope_services.http.app import create_app
from cope_services.http.keys import KeysFile
from cope_services.http.server import check_keys
from fastapi.routing import iter_route_contexts
from fastapi.testclient import TestClient
from starlette.routing import Mount

from cope_sweep.errors import UserError
from tests.services.sample_store import API, SampleStore, serving
from tests.services.test_errors import check_problem

SCOPES = ("read", "infer", "submit")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeysFile:
    return KeysFile(tmp_path_factory.mktemp("keys") / "keys.json")


@pytest.fixture(scope="module")
def secrets(keys: KeysFile) -> dict[str, str]:
    """A key for each scope, by its scope."""
    return {scope: keys.create(scope, [scope]) for scope in SCOPES}


@pytest.fixture(scope="module")
def locked(sample: SampleStore, keys: KeysFile, secrets: dict[str, str]) -> Iterator[httpx.Client]:
    """A client, without a key, of a server that has keys."""
    with serving(sample.settings(keys_file=keys.path)) as client:
        yield client


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


# -- scopes


def test_every_route_declares_one_scope_or_is_open(sample: SampleStore) -> None:
    app = create_app(sample.settings())
    contexts = list(iter_route_contexts(app.routes))
    assert len(contexts) > 30
    for context in contexts:
        if isinstance(context.route, Mount) or context.path == app.openapi_url:
            assert is_open(f"{context.path}/" if isinstance(context.route, Mount) else context.path)
            continue
        declared = [each.scopes for each in context.dependencies if hasattr(each, "scopes")]
        if is_open(context.path):
            assert declared == [], context.path
        else:
            assert len(declared) == 1, context.path
            assert len(declared[0]) == 1, context.path
            assert declared[0][0] in SCOPES


def test_the_document_has_the_scope_of_every_route(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    scheme = document["components"]["securitySchemes"]["API key"]
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if path.startswith("/health/"):
                assert "security" not in operation
                continue
            ((name, scopes),) = operation["security"][0].items()
            assert name == "API key"
            asks_model = path.endswith(("tokenizer_info", "/completions", "tokenize")) or (
                method == "post" and "sweeps" not in path
            )
            expected = "infer" if asks_model else "read" if method == "get" else "submit"
            assert scopes == [expected], (method, path)


def test_a_scope_does_not_include_another(locked: httpx.Client, secrets: dict[str, str], sample: SampleStore) -> None:
    requests = [
        ("read", "GET", f"{API}/runs", None),
        ("read", "GET", "/v1/models", None),
        ("read", "GET", "/metrics", None),
        ("read", "GET", f"{API}/version", None),
        ("read", "GET", f"{API}/runs/{sample.ids[0]}/checkpoint/model.safetensors", None),
        ("infer", "POST", f"{API}/perplexity", {"tokens": [[1, 15, 3]], "models": [sample.ids[0]]}),
        ("infer", "POST", f"{API}/runs/{sample.ids[0]}/probe", {"tokens": [1, 15, 3]}),
        ("infer", "GET", f"/tokenizer_info?model={sample.ids[0]}", None),
    ]
    for needed, method, path, body in requests:
        for scope, secret in secrets.items():
            response = locked.request(method, path, json=body, headers=bearer(secret))
            if scope == needed:
                assert response.status_code == 200, response.text
            else:
                assert response.status_code == 403
                problem = response.json().get("error") or response.json()
                assert problem["code"] == "missing_scope"
                assert f"this needs {needed};" in problem.get("detail", problem.get("message"))
                assert f'error="insufficient_scope", scope="{needed}"' in response.headers["www-authenticate"]


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer wrong", "Basic {}", "{}", "bearer{}", "Bearer {}x", "Bearer x {}", "Bearer \xff"],
)
def test_without_a_valid_key_nothing_is_answered(
    locked: httpx.Client, secrets: dict[str, str], header: str | None
) -> None:
    headers = {} if header is None else {"authorization": header.replace("{}", secrets["read"]).encode("latin-1")}
    for method, path in [("GET", f"{API}/runs"), ("GET", "/none"), ("POST", f"{API}/perplexity"), ("GET", "/metrics")]:
        response = locked.request(method, path, headers=headers, content=b"{" if method == "POST" else None)
        problem = check_problem(response, 401, "unauthorized")
        assert secrets["read"] not in json.dumps(problem)
        assert response.headers["www-authenticate"].startswith('Bearer realm="cope-sweep"')
    response = locked.get("/v1/models", headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (401, "unauthorized")


def test_two_keys_in_one_request_are_none(locked: httpx.Client, secrets: dict[str, str]) -> None:
    headers = [("authorization", f"Bearer {secrets['read']}"), ("authorization", "Bearer x")]
    assert locked.get(f"{API}/runs", headers=headers).status_code == 401


def test_the_page_the_documentation_and_health_are_open(locked: httpx.Client) -> None:
    for path in ("/", "/static/style.css", "/docs", "/docs/docs.js", "/openapi.json", "/health/live", "/health/ready"):
        assert locked.get(path).status_code == 200, path
    # Nothing else is reachable through the open folders.
    for path in ("/static/../api/v1/runs", "/static/%2e%2e/api/v1/runs", "/docs/../metrics", "//api/v1/runs"):
        assert locked.get(path).status_code in (401, 404), path


def test_a_key_may_be_revoked_and_made_while_the_server_runs(sample: SampleStore, tmp_path: Path) -> None:
    keys = KeysFile(tmp_path / "keys.json")
    with serving(sample.settings(keys_file=keys.path)) as client:
        assert client.get(f"{API}/runs").status_code == 200  # no keys, and only this machine can ask
        secret = keys.create("lab", ["read"])
        assert client.get(f"{API}/runs").status_code == 401
        assert client.get(f"{API}/runs", headers=bearer(secret)).status_code == 200
        keys.revoke("lab")
        assert client.get(f"{API}/runs", headers=bearer(secret)).status_code == 401
        assert client.get(f"{API}/runs").status_code == 401
        keys.path.write_text("{")
        check_problem(client.get(f"{API}/runs", headers=bearer(secret)), 503, "not_ready")


# -- where it listens


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "gpu.example", ""])
def test_listening_beyond_this_machine_needs_a_key(sample: SampleStore, tmp_path: Path, host: str) -> None:
    keys = KeysFile(tmp_path / "keys.json")
    settings = sample.settings(host=host, keys_file=keys.path)
    with pytest.raises(UserError, match="cope-sweep serve --new-key NAME --scope read --scope infer"):
        check_keys(settings)
    # An application that is started without this check refuses everything.
    client = TestClient(create_app(settings), base_url="http://127.0.0.1")
    assert client.get(f"{API}/runs").status_code == 401
    secret = keys.create("lab", ["read"])
    check_keys(settings)
    assert client.get(f"{API}/runs", headers=bearer(secret)).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_key(sample: SampleStore, host: str) -> None:
    check_keys(sample.settings(host=host))
    assert is_loopback(host)


@pytest.mark.parametrize(
    ("listens", "more", "host", "allowed"),
    [
        ("127.0.0.1", (), "127.0.0.1:8000", True),
        ("127.0.0.1", (), "localhost", True),
        ("127.0.0.1", (), "LOCALHOST.:80", True),
        ("127.0.0.1", (), "[::1]:8000", True),
        ("127.0.0.1", (), "evil.example", False),
        ("127.0.0.1", (), "127.0.0.1.evil.example", False),
        ("127.0.0.1", (), "localhost.evil.example:8000", False),
        ("127.0.0.1", (), "192.168.1.5", False),
        ("127.0.0.1", (), "", False),
        ("127.0.0.1", (), "[::1", False),
        ("127.0.0.1", (), "[::1]evil", False),
        ("127.0.0.1", ("gpu.example",), "gpu.example:80", True),
        ("127.0.0.1", ("gpu.example",), "evil.example", False),
        ("192.168.1.5", (), "192.168.1.5:8000", True),
        ("192.168.1.5", (), "192.168.1.6:8000", False),
        ("0.0.0.0", (), "192.168.1.6:8000", True),
        ("0.0.0.0", (), "[fe80::1]:8000", True),
        ("0.0.0.0", (), "evil.example", False),
        ("::", (), "10.0.0.1", True),
        ("gpu.example", (), "gpu.example", True),
    ],
)
def test_hosts(listens: str, more: tuple[str, ...], host: str, allowed: bool) -> None:
    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    client = TestClient(AllowedHosts(answer, listens, more), base_url="http://127.0.0.1")
    response = client.get("/", headers={"host": host})
    if allowed:
        assert response.status_code == 204
    else:
        assert (response.status_code, response.json()["code"]) == (421, "unknown_host")


def test_another_host_gets_nothing(client: httpx.Client) -> None:
    for path in ("/", "/openapi.json", f"{API}/runs", "/health/live", "/none"):
        problem = check_problem(client.get(path, headers={"host": "evil.example"}), 421, "unknown_host")
        assert "--allow-host" in problem["detail"]


def test_pages_of_other_origins_read_nothing_and_change_nothing(client: httpx.Client, sample: SampleStore) -> None:
    url, body = f"{API}/perplexity", {"models": [sample.ids[0]], "tokens": [[1, 15, 3]]}
    for origin in ("http://evil.example", "null", "http://127.0.0.1.evil.example", "http://[", "http://localhost:1"):
        check_problem(client.post(url, json=body, headers={"origin": origin}), 403, "cross_origin")
        preflight = {"origin": origin, "access-control-request-method": "POST"}
        response = client.options(url, headers=preflight)
        assert response.status_code == 403
        read = client.get(f"{API}/runs", headers={"origin": origin})
        for each in (response, read):
            assert not [name for name in each.headers if name.startswith("access-control")]
    host, port = client.base_url.host, client.base_url.port
    for origin in (f"http://{host}:{port - 1}", f"http://{host}", f"https://{host}:443", f"ftp://{host}:{port}"):
        check_problem(client.post(url, json=body, headers={"origin": origin}), 403, "cross_origin")
    for origin in (f"http://{host}:{port}", f"https://{host}:{port}"):  # the latter through a proxy that ends TLS
        assert client.post(url, json=body, headers={"origin": origin}).status_code == 200


@pytest.mark.parametrize(("site", "mode", "status"), [
    ("cross-site", "no-cors", 403), ("same-site", "cors", 403), ("cross-site", "navigate", 200),
    ("same-origin", "cors", 200), ("none", "navigate", 200),
])  # fmt: skip
def test_pages_of_other_origins_embed_nothing_that_costs(
    client: httpx.Client, site: str, mode: str, status: int
) -> None:
    headers = {"sec-fetch-site": site, "sec-fetch-mode": mode}
    assert client.get(f"{API}/runs", headers=headers).status_code == status
    assert client.get("/health/live", headers=headers).status_code == 200
    # A key is proof of the user's will.
    assert client.get(f"{API}/runs", headers=headers | {"authorization": "Bearer anything"}).status_code == 200


def test_origins_behind_a_proxy_that_ends_tls() -> None:
    assert _is_same_origin("https://sweeps.example", "sweeps.example", "http")
    assert _is_same_origin("https://sweeps.example", "sweeps.example:443", "https")
    assert _is_same_origin("http://[::1]:8000", "[::1]:8000", "http")
    assert not _is_same_origin("http://sweeps.example", "sweeps.example", "https")
    assert not _is_same_origin("https://sweeps.example", "sweeps.example:8000", "http")


# -- headers


def test_every_response_has_the_security_headers(
    client: httpx.Client, locked: httpx.Client, sample: SampleStore
) -> None:
    app = create_app(sample.settings())

    @app.get("/health/live/failing")
    def failing() -> None:
        raise RuntimeError("secret")

    broken = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False).get("/health/live/failing")
    assert broken.status_code == 500
    checkpoint = f"{API}/runs/{sample.ids[0]}/checkpoint/model.safetensors"
    responses = [
        broken,
        client.get("/"),
        client.get("/docs"),
        client.get("/static/style.css"),
        client.get("/none"),
        client.get("/", headers={"host": "evil.example"}),
        client.get(checkpoint),
        client.get(checkpoint, headers={"range": "bytes=1-2"}),
        client.get(checkpoint, headers={"range": "bytes=999999999-"}),
        client.post(f"{API}/perplexity", content=b" " * (1 << 21)),
        client.get(f"{API}/ablations/tiny/table"),
        locked.get(f"{API}/runs"),
    ]
    for response in responses:
        headers = response.headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["cross-origin-opener-policy"] == "same-origin"
        assert headers["cache-control"]
        policy = headers["content-security-policy"]
        assert headers.get_list("content-security-policy") == [policy]
        assert policy.startswith("default-src 'none'")
        assert "frame-ancestors 'none'" in policy
        assert "base-uri 'none'" in policy
        script = "script-src 'self';" in policy
        assert script == (response in responses[1:3])
        assert "unsafe" not in policy
        assert "server" not in headers
        assert "access-control-allow-origin" not in headers


def test_html_tables_have_their_styles_but_no_scripts(client: httpx.Client) -> None:
    policy = client.get(f"{API}/ablations/tiny/table?format=html").headers["content-security-policy"]
    assert "script-src" not in policy
    assert "default-src 'none'; style-src 'unsafe-inline'" in policy
    assert policy.endswith("sandbox")


def test_the_documentation_needs_no_network(client: httpx.Client) -> None:
    page = client.get("/docs").text
    assert "http:" not in page
    assert "https:" not in page
    assert "<script>" not in page
    for name in ("docs.js", "swagger-ui.css", "swagger-ui-bundle.js"):
        assert f'"/docs/{name}"' in page
        assert client.get(f"/docs/{name}").status_code == 200
    for path in ("/docs/none.js", "/docs/..%2fapp.py", "/redoc", "/docs/oauth2-redirect"):
        assert client.get(path).status_code == 404
