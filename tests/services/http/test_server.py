"""The server as a process: start without torch, shutdown, invalid settings, and addresses that cannot be used."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import httpx
import pytest
from cope_services.http.server import BindError, listen, main, serve

from tests.helpers.sample_store import SampleStore, server_process

pytestmark = pytest.mark.slow


def test_from_start_to_stop(sample: SampleStore) -> None:
    with server_process(sample.environment()) as (server, url), httpx.Client(base_url=url, timeout=120) as client:
        assert client.get("/health/ready").json() == {"status": "ready"}
        assert [a["name"] for a in client.get("/api/v1/ablations").json()] == ["broken", "tiny"]
        assert client.get("/api/v1/ablations/tiny/table?format=markdown").text.startswith("| position")
        assert client.get("/api/v1/runs").json()["total"] > 0
        maps = Path(f"/proc/{server.pid}/maps")
        if maps.exists():
            assert "libtorch" not in maps.read_text()

        body = {"models": [sample.ids[0]], "tokens": [[15, 2, 3, 4]], "log_probabilities": True}
        answer = client.post("/api/v1/perplexity", json=body).json()["results"][0]
        assert len(answer["sequences"][0]["log_probabilities"]) == 4

        server.send_signal(signal.SIGINT)
        _, err = server.communicate(timeout=120)
        assert (server.returncode, err) == (0, "")


# SIGTERM is uvicorn's own; the others of TERMINATION have one handler.
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_asks_for_an_end_stops_the_server(sample: SampleStore, signum: int) -> None:
    with server_process(sample.environment()) as (server, url):
        assert httpx.get(f"{url}/health/live", timeout=120).status_code == 200
        server.send_signal(signum)
        _, err = server.communicate(timeout=120)
        assert (server.returncode, err) == (-signal.SIGTERM, "")


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("ABLATIONS", "/nowhere", 2),
        ("STORE", "/etc/passwd", 2),
        ("PORT", "99999", 2),
        ("PORT", "-1", 2),
        ("HOST", "not a host", 1),
        ("HOST", "0.0.0.0", 2),
        ("DEVICE", "tpu", 2),
        ("MAX_TOKENS", "many", 2),
        ("MAX_TOKENS", "0", 2),
        ("MAX_SECONDS", "0", 2),
    ],
)
def test_invalid_settings_are_reported(
    sample: SampleStore,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: str,
    code: int,
) -> None:
    usual = {"ABLATIONS": str(sample.ablations), "STORE": str(sample.store_folder), "PORT": "0", "KEYS_FILE": "none"}
    for each, setting in (usual | {name: value}).items():
        monkeypatch.setenv(f"COPE_SWEEP_{each}", setting)
    assert main() == code
    out, err = capsys.readouterr()
    assert (out, err.startswith("error: ")) == ("", True)
    assert value in err


def test_serve_returns_1_for_a_port_in_use(sample: SampleStore, capsys: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1", 0) as busy:
        port = busy.getsockname()[1]
        assert serve(sample.settings(port=port)) == 1
    message = capsys.readouterr().err
    free = int(re.search(r"--port (\d+), or COPE_SWEEP_PORT=\1\n", message)[1])
    assert free != port
    with listen("127.0.0.1", free):
        pass


@pytest.mark.parametrize("host", ["not a host", "203.0.113.7"])
def test_an_address_of_another_machine_is_reported(host: str) -> None:
    with pytest.raises(BindError, match=re.escape(host)):
        listen(host, 0)


def test_an_ipv6_address_may_have_the_brackets_of_a_url(sample: SampleStore) -> None:
    assert sample.settings(host="[::1]").host == "::1"
    assert sample.settings(host="[::]").host == "::"
