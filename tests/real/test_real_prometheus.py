"""deploy/monitoring in a real Prometheus, which scrapes the real service after a sweep, and a real Ray."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from ruamel.yaml import YAML

from tests.helpers.processes import free_port, output_of, until
from tests.helpers.ray_heads import started_head
from tests.helpers.sample_store import TINY, server_process

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "monitoring"
RULES = [
    rule
    for group in YAML(typ="safe", pure=True).load((FOLDER / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
PANELS = [panel for panel in json.loads((FOLDER / "dashboard.json").read_text())["panels"] if panel["type"] != "row"]
QUERIES = [rule["expr"] for rule in RULES] + [each["expr"] for panel in PANELS for each in panel["targets"]]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """A client of Prometheus, which has scraped Ray, and a service that has trained and answered."""
    if missing := [name for name in ("prometheus", "promtool") if not shutil.which(name)]:
        pytest.skip(f"needs {', '.join(missing)}: on Debian, prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "ablations").mkdir()
    (folder / "ablations" / "tiny.yaml").write_text(TINY)
    settings = {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "services"))),
        "COPE_SWEEP_ABLATIONS": str(folder / "ablations"),
        "COPE_SWEEP_STORE": str(folder / "store"),
        "COPE_SWEEP_KEYS_FILE": str(folder / "keys.txt"),
        "COPE_SWEEP_PORT": "0",
    }
    output_of("-m", "cope_sweep.cli", "run", "tiny", "--local", "--no-mlflow", cwd=folder, **settings)
    for name in ("metrics", "me"):
        key = output_of("-m", "cope_sweep.cli", "serve", "--new-key", name, cwd=folder, **settings)
        (folder / f"{name}_key").write_text(key)
    ray_port = free_port()
    with (
        started_head(os.environ, token="t" * 32, metrics_port=ray_port),
        server_process(os.environ | settings, stderr=subprocess.DEVNULL) as (_, url),
    ):
        bearer = {"Authorization": f"Bearer {(folder / 'me_key').read_text().split()[-1]}"}
        with httpx.Client(base_url=url, headers=bearer, timeout=120) as client:
            (first, *_) = client.get("/v1/models").json()["data"]
            for path, body in (
                ("/v1/completions", {"model": first["id"], "prompt": [1, 2, 3], "max_tokens": 2}),
                ("/api/v1/perplexity", {"models": [first["id"]], "tokens": [[1, 15, 3]]}),
            ):
                assert client.post(path, json=body).status_code == 200
        text = (FOLDER / "prometheus.yml").read_text()
        for there, here in (
            ("scrape_interval: 15s", "scrape_interval: 1s"),
            ("/etc/prometheus/alerts.yaml", str(FOLDER / "alerts.yaml")),
            ("/run/secrets/metrics_key", str(folder / "metrics_key")),
            ("service:8000", url.removeprefix("http://")),
            (
                "dns_sd_configs:\n      - {names: [ray-head, ray-worker], type: A, port: 8080}",
                f"static_configs: [{{targets: [127.0.0.1:{ray_port}]}}]",
            ),
        ):
            assert there in text
            text = text.replace(there, here)
        (folder / "prometheus.yml").write_text(text)
        with (folder / "log").open("w") as log:
            server = subprocess.Popen(
                ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                 "--web.listen-address=127.0.0.1:0"],
                stdout=log, stderr=log,
            )  # fmt: skip
        try:
            until(lambda: re.search(r"Listening on.*address=(\S+)", (folder / "log").read_text()))
            address = re.search(r"Listening on.*address=(\S+)", (folder / "log").read_text())[1]
            with httpx.Client(base_url=f"http://{address}", timeout=60, trust_env=False) as client:
                until(lambda: [value(client, f'up{{job="{job}"}}') for job in ("service", "ray")] == ["1", "1"])
                yield client
        finally:
            server.kill()
            server.wait()


def query(client, expression):
    return client.get("/api/v1/query", params={"query": expression}).json()


def value(client, expression):
    """The value of the only series, as text; None where there is none."""
    found = query(client, expression).get("data", {}).get("result", [])
    return found[0]["value"][1] if found else None


def test_promtool_accepts_the_alerts(prometheus):
    done = subprocess.run(["promtool", "check", "rules", FOLDER / "alerts.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{len(RULES)} rules found" in done.stdout


def test_every_alert_is_loaded(prometheus):
    groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    assert {rule["name"] for group in groups for rule in group["rules"]} == {rule["alert"] for rule in RULES}


@pytest.mark.parametrize("expression", QUERIES)
def test_every_query_is_understood_and_its_metrics_are_there(prometheus, expression):
    answer = query(prometheus, expression.replace("$__rate_interval", "1m"))
    assert answer["status"] == "success", answer
    names = set(prometheus.get("/api/v1/label/__name__/values").json()["data"])
    assert set(re.findall(r"\bcope_\w+", expression)) <= names


def test_ray_is_scraped(prometheus):
    names = prometheus.get("/api/v1/label/__name__/values", params={"match[]": '{job="ray"}'}).json()["data"]
    assert {name for name in names if name.startswith("ray_node_")}


def test_the_numbers_are_those_of_the_sweep(prometheus):
    assert value(prometheus, 'cope_runs{status="finished"}') == "4"
    assert value(prometheus, 'cope_sweeps{status="finished"}') == "1"
