"""Proxies of the environment: this machine is reached without them, and errors of other requests name them."""

from __future__ import annotations

import http.server
from collections.abc import Iterator
from pathlib import Path

import pytest

from cope_sweep.client import Client, RetryPolicy
from cope_sweep.errors import UserError
from cope_sweep.proxies import is_this_machine, proxy_of
from cope_sweep.sweep.jobs import Cluster, submit_job
from cope_sweep.tracking.check import check_uri
from tests.helpers.errors import raises
from tests.helpers.processes import http_server
from tests.helpers.scripted_cluster import ScriptedCluster, serving_jobs
from tests.helpers.stub_server import Stub

ROOT = Path(__file__).parents[1]
VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
PROXY = "http://127.0.0.1:1"
"""Where nothing listens."""


@pytest.fixture(params=["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
def proxy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An environment with a proxy that has a password."""
    for name in VARIABLES:
        for each in (name, name.upper()):
            monkeypatch.setenv(each, "")  # restored at the end, also where the test sets it
            monkeypatch.delenv(each)
    monkeypatch.setenv(request.param, "http://me:secret@127.0.0.1:1")
    return PROXY


@pytest.fixture(params=["127.0.0.1", "localhost"])
def service(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a server on this machine that answers every request with an empty list."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"[]")

    with http_server(Handler) as url:
        yield url.replace("127.0.0.1", request.param)


def test_hosts_that_are_this_machine() -> None:
    assert all(
        map(is_this_machine, ("localhost", "LOCALHOST.", "a.localhost", "127.0.0.1", "127.1.2.3", "::1", "[::1]"))
    )
    assert not any(map(is_this_machine, ("host", "10.0.0.1", "localhost.com", "::2", "", "1270.0.0.1")))


def test_the_proxy_of_a_request(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert proxy_of("http://host:8000/") == proxy
    assert proxy_of("http://[::1]:8000/") is None
    assert proxy_of("sqlite:////s/mlflow.db") is None
    monkeypatch.setenv("NO_PROXY", "host")
    assert proxy_of("http://host:8000/") is None
    assert proxy_of("http://other:8000/") == proxy


def test_the_client_reaches_a_service_on_this_machine(proxy: str, service: str) -> None:
    with Client(service, retry=RetryPolicy(0)) as client:
        assert client.ablations() == []


def test_the_client_names_the_proxy(proxy: str) -> None:
    with (
        Client("http://service.invalid:8000", retry=RetryPolicy(0)) as client,
        raises("not_connected", proxy=proxy) as caught,
    ):
        client.ablations()
    assert "secret" not in str(caught.value)


def test_submit_reaches_a_cluster_on_this_machine(proxy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    (tmp_path / "cope_sweep").mkdir()
    with serving_jobs(ScriptedCluster()) as cluster:
        assert submit_job(["list"], Cluster(cluster.url, tmp_path), follow=False, job_id="one").status == "SUBMITTED"


def test_submit_names_the_proxy(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with raises("no_cluster", proxy=proxy, address="head.invalid:8265") as caught:
        submit_job(["list"], Cluster("head.invalid:8265", ROOT))
    assert "secret" not in str(caught.value)


@pytest.mark.slow
def test_an_mlflow_server_on_this_machine_is_reached(proxy: str) -> None:
    with Stub(None) as server:
        server.status, server.body = 200, b'{"experiments": []}'
        check_uri(server.url)


@pytest.mark.slow
def test_the_check_of_mlflow_names_the_proxy(proxy: str) -> None:
    with pytest.raises(UserError) as caught:
        check_uri("http://me:password@tracker.invalid:5000")
    assert caught.value.data["proxy"] == proxy
    assert proxy in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "password" not in str(caught.value)
