"""Who may ask what: keys and their rights, hosts and origins, and the headers of every response."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import httpx
import pytest
from cope_services.http import access
from cope_services.http.access import AllowedHosts, KeysFile, _is_same_origin, is_open
from cope_services.http.app import create_app
from cope_services.http.middleware import Refusals
from cope_services.http.server import check_api_keys
from fastapi.routing import iter_route_contexts
from fastapi.testclient import TestClient
from starlette.applications import Starlette
from starlette.routing import Mount

from tests.cli.conftest import Shell
from tests.helpers.errors import raises
from tests.helpers.sample_store import API, SampleStore, serving
from tests.services.http.test_errors import check_problem

RIGHTS = ("read", "submit")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeysFile:
    return KeysFile(tmp_path_factory.mktemp("keys") / "keys.txt")


@pytest.fixture(scope="module")
def secrets(keys: KeysFile) -> dict[str, str]:
    """A key for each right, by its right."""
    return {right: keys.create(right, may_submit=right == "submit") for right in RIGHTS}


@pytest.fixture(scope="module")
def locked(sample: SampleStore, keys: KeysFile, secrets: dict[str, str]) -> Iterator[httpx.Client]:
    """A client, without a key, of a server that has keys."""
    with serving(sample.settings(keys_file=keys.path)) as client:
        yield client


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


# -- keys


def test_every_route_declares_one_right_or_is_open(sample: SampleStore) -> None:
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
            assert declared in ([["read"]], [["submit"]]), context.path


def test_the_document_has_the_right_of_every_route(client: httpx.Client) -> None:
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
            changes = method != "get" and "sweeps" in path
            assert scopes == ["submit" if changes else "read"], (method, path)


def test_every_key_reads_and_asks_models_and_only_some_submit(
    locked: httpx.Client, secrets: dict[str, str], sample: SampleStore
) -> None:
    reading = [
        ("GET", f"{API}/runs", None),
        ("GET", "/v1/models", None),
        ("GET", "/metrics", None),
        ("GET", f"{API}/version", None),
        ("GET", f"{API}/runs/{sample.ids[0]}/checkpoint/model.safetensors", None),
        ("POST", f"{API}/perplexity", {"tokens": [[1, 15, 3]], "models": [sample.ids[0]]}),
        ("POST", f"{API}/runs/{sample.ids[0]}/probe", {"tokens": [1, 15, 3]}),
        ("GET", f"/tokenizer_info?model={sample.ids[0]}", None),
    ]
    for method, path, body in reading:
        for secret in secrets.values():
            response = locked.request(method, path, json=body, headers=bearer(secret))
            assert response.status_code == 200, response.text
    sweep = f"{API}/sweeps/20261128-080000-3f2a"
    for method, path in (
        ("PUT", sweep), ("POST", f"{API}/sweeps/preview"), ("POST", f"{sweep}/stop"), ("POST", f"{sweep}/retry")
    ):  # fmt: skip
        response = locked.request(method, path, json={"ablation": "tiny"}, headers=bearer(secrets["read"]))
        problem = check_problem(response, 403, "missing_scope")
        assert "--submit" in problem["detail"]
        assert 'error="insufficient_scope", scope="submit"' in response.headers["www-authenticate"]
    preview = locked.post(f"{API}/sweeps/preview", json={"ablation": "tiny"}, headers=bearer(secrets["submit"]))
    assert preview.status_code == 200


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


def test_a_key_may_be_revoked_and_made_while_the_server_runs(
    sample: SampleStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = KeysFile(tmp_path / "keys.txt")
    with serving(sample.settings(keys_file=keys.path)) as client:
        assert client.get(f"{API}/runs").status_code == 200  # no keys, and only this machine can ask
        secret = keys.create("lab")
        assert client.get(f"{API}/runs").status_code == 401
        assert client.get(f"{API}/runs", headers=bearer(secret)).status_code == 200
        keys.path.write_text("")  # deleting the line revokes
        assert client.get(f"{API}/runs", headers=bearer(secret)).status_code == 401
        assert client.get(f"{API}/runs").status_code == 401
        keys.path.write_text("{")
        refused = client.get(f"{API}/runs", headers=bearer(secret))
        check_problem(refused, 503, "not_ready")
        assert "keys.txt" not in refused.text, "it tells strangers nothing about the file"
        assert f"{keys.path}, line 1: " in caplog.text


def test_a_service_below_a_prefix(sample: SampleStore, tmp_path: Path) -> None:
    keys = KeysFile(tmp_path / "keys.txt")
    secret = keys.create("lab")
    app = create_app(sample.settings(keys_file=keys.path))
    client = TestClient(Starlette(routes=[Mount("/cope", app)]), base_url="http://127.0.0.1")
    for path in ("/", "/static/style.css", "/docs", "/openapi.json", "/health/live"):
        assert client.get(f"/cope{path}").status_code == 200, path
    assert client.get(f"/cope{API}/runs", headers=bearer(secret)).json()["total"] == 3
    check_problem(client.get(f"/cope{API}/runs"), 401, "unauthorized")
    assert client.get("/cope/v1/models").json()["error"]["code"] == "unauthorized"
    assert client.get("/openapi.json").status_code == 404


# -- where it listens


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "gpu.example", ""])
def test_listening_beyond_this_machine_needs_a_key(sample: SampleStore, tmp_path: Path, host: str) -> None:
    keys = KeysFile(tmp_path / "keys.txt")
    settings = sample.settings(host=host, keys_file=keys.path)
    with raises("no_key"):
        check_api_keys(settings)
    # An application that is started without this check refuses everything.
    client = TestClient(create_app(settings), base_url="http://127.0.0.1")
    assert client.get(f"{API}/runs").status_code == 401
    secret = keys.create("lab")
    check_api_keys(settings)
    assert client.get(f"{API}/runs", headers=bearer(secret)).status_code == 200


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

    client = TestClient(Refusals(answer, AllowedHosts(listens, more).check), base_url="http://127.0.0.1")
    response = client.get("/", headers={"host": host})
    if allowed:
        assert response.status_code == 204
    else:
        assert (response.status_code, response.json()["code"]) == (421, "unknown_host")


def test_another_host_gets_nothing(client: httpx.Client) -> None:
    for path in ("/", "/openapi.json", f"{API}/runs", "/health/live", "/none"):
        check_problem(client.get(path, headers={"host": "evil.example"}), 421, "unknown_host")


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


def test_the_documentation_needs_no_network(client: httpx.Client) -> None:
    page = client.get("/docs").text
    assert "http:" not in page
    assert "https:" not in page
    assert "<script>" not in page
    for name in ("docs.js", "swagger-ui.css", "swagger-ui-bundle.js"):
        assert f'"docs/{name}"' in page
        assert client.get(f"/docs/{name}").status_code == 200
    for path in ("/docs/none.js", "/docs/..%2fapp.py", "/redoc", "/docs/oauth2-redirect"):
        assert client.get(path).status_code == 404


# -- API keys: made, stored as digests, revoked, and read again when the file changes ----------------------------------


@pytest.fixture
def file(tmp_path: Path) -> KeysFile:
    return KeysFile(tmp_path / "keys.txt")


def test_a_key_is_found_by_its_text_only(file: KeysFile) -> None:
    assert not file.protects
    lab, ci = file.create("lab"), file.create("ci", may_submit=True)
    assert file.protects
    assert [(key.name, key.may_submit) for key in map(file.find, (lab, ci))] == [("lab", False), ("ci", True)]
    for wrong in ("", lab[:-1], lab + "x", lab.upper(), "\udc80", "x" * 10_000, file.all()[0].sha256):
        assert file.find(wrong) is None


def test_the_file_has_digests_and_only_its_owner_reads_it(file: KeysFile) -> None:
    secret = file.create("lab")
    assert len(secret) == len("cope_") + 43  # 256 bits in base64
    assert secret not in file.path.read_text()
    assert file.path.read_text() == f"lab read {sha256(secret.encode()).hexdigest()}\n"
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert [path.name for path in file.path.parent.iterdir()] == ["keys.txt"]


def test_a_change_of_another_process_is_seen(file: KeysFile) -> None:
    server = KeysFile(file.path)
    secret = file.create("lab")
    assert server.find(secret) is not None
    file.path.write_text("")
    assert server.find(secret) is None
    assert server.protects  # without keys, a server that had some stays closed
    assert not KeysFile(file.path).protects
    secret = file.create("lab")
    assert server.find(secret) is not None
    file.path.unlink()
    assert server.find(secret) is None
    assert server.protects


def test_wrong_names(file: KeysFile) -> None:
    file.create("lab")
    with raises("name_taken", name="lab", file=str(file.path)):
        file.create("lab")
    for name in ("", "a b", "../x", "-x", "x" * 65, "ü"):
        with raises("invalid_name", name=name):
            file.create(name)
    assert [key.name for key in file.all()] == ["lab"]


DIGEST = "0" * 64


@pytest.mark.parametrize(
    ("content", "line"),
    [("{", 1), (f"lab read {DIGEST}\nci read 00", 2), (f"lab all {DIGEST}", 1), (f"lab read,submit {DIGEST}", 1),
     (f"../lab read {DIGEST}", 1), (f"# of the lab\n\nread {DIGEST}", 3), (f"lab read {DIGEST} # of the lab", 1)],
)  # fmt: skip
def test_a_damaged_file_is_an_error(file: KeysFile, content: str, line: int) -> None:
    file.path.write_text(content)
    file.path.chmod(0o600)
    for ask in (lambda: file.protects, lambda: file.find("x"), lambda: file.create("lab")):
        with raises("damaged_keys", line=line, file=str(file.path)):
            ask()
    assert file.path.read_text() == content


def test_lines_may_be_edited(file: KeysFile) -> None:
    lab, ci = file.create("lab"), file.create("ci", may_submit=True)
    lines = file.path.read_text().splitlines()
    edited = "\ufeff# of the machines\r\n\r\n  # and the page\r\n" + lines[1].replace("submit", "read")
    file.path.write_text(edited)  # as an editor on Windows writes it, and without the last line break
    page = file.create("page")
    assert file.find(lab) is None
    assert [(key.name, key.may_submit) for key in map(file.find, (ci, page))] == [("ci", False), ("page", False)]


def test_a_file_that_others_may_write_to_is_refused(file: KeysFile) -> None:
    file.create("lab")
    file.path.chmod(0o620)
    with raises("writable_by_others", file=str(file.path)):
        _ = KeysFile(file.path).protects


def test_a_folder_is_no_keys_file(tmp_path: Path) -> None:
    with raises("not_a_file", file=str(tmp_path)):
        _ = KeysFile(tmp_path).protects
    with raises("not_writable", file=str(tmp_path / "none" / "keys.txt")):
        KeysFile(tmp_path / "none" / "keys.txt").create("lab")


def test_the_digests_are_compared_in_constant_time(file: KeysFile, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = [file.create(name) for name in ("a", "b", "c")]
    compared: list[tuple[str, str]] = []

    def compare(left: str, right: str) -> bool:
        compared.append((left, right))
        return left == right

    monkeypatch.setattr(access.hmac, "compare_digest", compare)
    assert file.find(secrets[0]).name == "a"
    assert len(compared) == 3  # the first match does not end the search
    assert {right for _, right in compared} == {sha256(secrets[0].encode()).hexdigest()}


def test_the_commands(tmp_path: Path) -> None:
    serve, path = Shell(tmp_path), tmp_path / "keys.txt"
    out, err = serve("serve", "--new-key", "lab", "--submit")
    found = KeysFile(path).find(out.strip())  # standard output is the key, and nothing else
    assert (found.name, found.may_submit) == ("lab", True)
    assert out.strip() not in err
    for said in (str(path.name), "submit", "Authorization: Bearer"):
        assert said in err
    out, err = serve("serve", "--new-key", "page")
    assert not KeysFile(path).find(out.strip()).may_submit
    assert "submit" not in err
    for arguments, code in [
        (["--new-key", "lab"], "name_taken"),
        (["--new-key", ""], "invalid_name"),
        (["--submit"], "missing_option"),
        (["--host", "0.0.0.0", "--keys-file", "none.txt"], "no_key"),
    ]:
        serve.refuses(code, "serve", *arguments)
    assert sorted(os.listdir(tmp_path)) == ["ablations", "keys.txt"]
