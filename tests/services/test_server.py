"""The server as a process: it starts without torch, streams ranges, stops in order, and explains a busy port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from cope_services.settings import Settings
from house import House
from pydantic import ValidationError

from cope_sweep.errors import UserError

ROOT = Path(__file__).parents[2]


def start(house: House, port: int = 0, **more: str) -> subprocess.Popen[str]:
    environment = os.environ | {
        "COPE_SWEEP_ABLATIONS": str(house.ablations),
        "COPE_SWEEP_STORE": str(house.store),
        "COPE_SWEEP_PORT": str(port),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "services"]
    return subprocess.Popen(command, env=environment | more, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextmanager
def process(house: House) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server and its address."""
    server = start(house)
    try:
        assert server.stdout is not None
        yield server, server.stdout.readline().split()[0]
    finally:
        server.kill()
        server.communicate()


def test_a_client_from_start_to_stop(house: House) -> None:
    with process(house) as (server, url), httpx.Client(base_url=url, timeout=60) as client:
        assert client.get("/health/ready").json() == {"status": "ready"}
        assert [a["name"] for a in client.get("/api/v1/ablations").json()] == ["broken", "tiny"]
        assert client.get("/api/v1/ablations/tiny/table?format=markdown").text.startswith("| position")
        maps = Path(f"/proc/{server.pid}/maps")
        if maps.exists():
            assert "libtorch" not in maps.read_text()

        path = f"/api/v1/runs/{house.ids[0]}/checkpoint/model.safetensors"
        whole = (house.ledger.run(house.ids[0]).checkpoint / "model.safetensors").read_bytes()
        with client.stream("GET", path) as broken_off:
            got = next(broken_off.iter_raw(1500))
        rest = client.get(path, headers={"range": f"bytes={len(got)}-", "if-range": broken_off.headers["etag"]})
        assert rest.status_code == 206
        assert got + rest.content == whole

        body = {"tokens": [[1, 2, 3, 4]], "log_probabilities": True}
        answer = client.post(f"/api/v1/runs/{house.ids[0]}/perplexity", json=body).json()
        assert len(answer["sequences"][0]["log_probabilities"]) == 4

        server.send_signal(signal.SIGINT)
        _, err = server.communicate(timeout=20)
        assert (server.returncode, err) == (0, "")


def test_a_busy_port_is_named_with_a_way_out(house: House) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        server = start(house, port)
        _, err = server.communicate(timeout=30)
    assert server.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in err
    assert "--port " in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("COPE_SWEEP_ABLATIONS", "/nowhere", "the ablations folder /nowhere does not exist"),
        ("COPE_SWEEP_STORE", "/etc/passwd", "is not a folder"),
        ("COPE_SWEEP_PORT", "99999", "COPE_SWEEP_PORT: "),
        ("COPE_SWEEP_HOST", "not a host", "is no address of this machine"),
    ],
)
def test_bad_settings_fail_at_once(house: House, name: str, value: str, message: str) -> None:
    server = start(house, **{name: value})
    _, err = server.communicate(timeout=30)
    assert server.returncode in (1, 2)
    assert message in err
    assert "Traceback" not in err


def test_settings_are_checked(house: House) -> None:
    with pytest.raises(UserError, match="set COPE_SWEEP_ABLATIONS"):
        house.settings(ablations="/nowhere")
    for bad in ({"port": -1}, {"max_tokens": 0}, {"device": "tpu"}, {"max_models": "many"}):
        with pytest.raises(ValidationError):
            house.settings(**bad)
    assert Settings.model_config["env_prefix"] == "COPE_SWEEP_"
