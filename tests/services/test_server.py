"""The server as a process: start without torch, downloads, shutdown, and errors at the start."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from cope_services.http.server import BindError, listen, serve

from tests.services.sample_store import SampleStore

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def start(sample: SampleStore, port: int = 0, **more: str) -> subprocess.Popen[str]:
    environment = os.environ | {
        "COPE_SWEEP_ABLATIONS": str(sample.ablations),
        "COPE_SWEEP_STORE": str(sample.store_folder),
        "COPE_SWEEP_PORT": str(port),
        "COPE_SWEEP_KEYS_FILE": str(sample.root / "keys.json"),
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "services"))),
    }
    command = [sys.executable, "-m", "cope_services"]
    return subprocess.Popen(command, env=environment | more, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextmanager
def process(sample: SampleStore) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server and its address."""
    server = start(sample)
    try:
        assert server.stdout is not None
        yield server, server.stdout.readline().split()[0]
    finally:
        server.kill()
        server.communicate()


def test_from_start_to_stop(sample: SampleStore) -> None:
    with process(sample) as (server, url), httpx.Client(base_url=url, timeout=120) as client:
        assert client.get("/health/ready").json() == {"status": "ready"}
        assert [a["name"] for a in client.get("/api/v1/ablations").json()] == ["broken", "tiny"]
        assert client.get("/api/v1/ablations/tiny/table?format=markdown").text.startswith("| position")
        maps = Path(f"/proc/{server.pid}/maps")
        if maps.exists():
            assert "libtorch" not in maps.read_text()

        path = f"/api/v1/runs/{sample.ids[0]}/checkpoint/model.safetensors"
        whole = (sample.store.run(sample.ids[0]).checkpoint / "model.safetensors").read_bytes()
        with client.stream("GET", path) as broken_off:
            got = next(broken_off.iter_raw(1500))
        rest = client.get(path, headers={"range": f"bytes={len(got)}-", "if-range": broken_off.headers["etag"]})
        assert rest.status_code == 206
        assert got + rest.content == whole

        body = {"models": [sample.ids[0]], "tokens": [[15, 2, 3, 4]], "log_probabilities": True}
        answer = client.post("/api/v1/perplexity", json=body).json()["results"][0]
        assert len(answer["sequences"][0]["log_probabilities"]) == 4

        server.send_signal(signal.SIGINT)
        _, err = server.communicate(timeout=120)
        assert (server.returncode, err) == (0, "")


def test_a_port_in_use_is_reported_with_a_free_one(sample: SampleStore) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        server = start(sample, port)
        _, err = server.communicate(timeout=120)
    assert server.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in err
    assert "--port " in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("COPE_SWEEP_ABLATIONS", "/nowhere", "the ablations folder /nowhere does not exist"),
        ("COPE_SWEEP_STORE", "/etc/passwd", "is not a folder"),
        ("COPE_SWEEP_PORT", "99999", "COPE_SWEEP_PORT=99999: it has to be 65535 or less"),
        ("COPE_SWEEP_HOST", "not a host", "is no address of this machine"),
        ("COPE_SWEEP_HOST", "0.0.0.0", "cope-sweep serve --new-key NAME --scope read --scope infer"),
        ("COPE_SWEEP_MAX_TOKENS", "abc", "COPE_SWEEP_MAX_TOKENS=abc: it has to be a whole number"),
    ],
)
def test_invalid_settings_are_reported(sample: SampleStore, name: str, value: str, message: str) -> None:
    server = start(sample, **{name: value})
    _, err = server.communicate(timeout=120)
    assert server.returncode in (1, 2)
    assert message in err
    assert "Traceback" not in err


def test_sigterm_stops_the_server(sample: SampleStore) -> None:
    with process(sample) as (server, url):
        assert httpx.get(f"{url}/health/live", timeout=120).status_code == 200
        server.send_signal(signal.SIGTERM)
        _, err = server.communicate(timeout=120)
        assert (server.returncode, err) == (-signal.SIGTERM, "")


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
    with pytest.raises(BindError, match=r"is no address of this machine; .* --host 127\.0\.0\.1"):
        listen(host, 0)
