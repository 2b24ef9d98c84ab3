"""deploy/compose.yaml: against the schema of the compose specification, and against the files that it names."""

import gzip
import json
import os
import re
import subprocess
from pathlib import Path

import jsonschema
import pytest
from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
from ray.dashboard.http_server_agent import PUBLIC_EXACT_PATHS
from ruamel.yaml import YAML

import cope_sweep

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
GUIDE = ROOT / "docs" / "how-to" / "team-server.md"


load = YAML(typ="safe", pure=True).load
COMPOSE = load(DEPLOY / "compose.yaml")
SERVICES = COMPOSE["services"]
EVERY_SERVICE = pytest.mark.parametrize("name", SERVICES)


def variables(node):
    """The names of `${NAME:-default}`, with their defaults."""
    return dict(re.findall(r"\$\{(\w+):-([^}]*)\}", json.dumps(node)))


@pytest.fixture(scope="module")
def schema():
    with gzip.open(Path(__file__).parent / "schemas" / "compose-spec.json.gz", "rt") as file:
        return json.load(file)


def test_the_file_is_valid(schema):
    jsonschema.Draft202012Validator(schema).validate(COMPOSE)


def test_the_gpus_are_reserved_for_the_worker_alone(schema):
    """And no service gets two values from the two files, but that mapping."""
    more = load(DEPLOY / "compose.gpu.yaml")
    jsonschema.Draft202012Validator(schema).validate(more)
    ((name, service),) = more["services"].items()
    ((_, reserved),) = service["deploy"]["resources"].items()
    (device,) = reserved["devices"]
    assert (name, service.keys(), reserved.keys()) == ("ray-worker", {"deploy"}, {"devices"})
    assert (device["driver"], device["capabilities"], device["count"]) == ("nvidia", ["gpu"], "all")
    assert "reservations" not in SERVICES[name]["deploy"]["resources"]
    assert "--num-gpus" not in " ".join(SERVICES[name]["command"])  # Ray finds those that the container has


def test_whatever_reads_texts_has_the_folder_of_corpora():
    """The hub cannot be reached from inside."""
    for name in ("ray-head", "ray-worker", "service"):
        [mount] = [each for each in SERVICES[name]["volumes"] if isinstance(each, dict)]
        assert SERVICES[name]["environment"]["COPE_SWEEP_DATA"] == mount["target"]
        assert (mount["type"], mount["read_only"]) == ("bind", True)
        [default] = variables(mount).values()
        assert default.replace("./", "deploy/") in GUIDE.read_text()


def test_what_services_name_is_defined_and_every_definition_is_used():
    used = {"secrets": set(), "configs": set(), "volumes": set(), "networks": set()}
    for service in SERVICES.values():
        used["secrets"] |= set(service.get("secrets", []))
        used["configs"] |= {each["source"] for each in service.get("configs", [])}
        used["volumes"] |= {each.split(":")[0] for each in service.get("volumes", []) if ":" in each}
        used["networks"] |= set(service["networks"])
        for other, condition in service.get("depends_on", {}).items():
            if condition["condition"] == "service_healthy":
                # The image of the service has a check of its own.
                assert "healthcheck" in SERVICES[other] or other == "service"
    assert used == {kind: set(COMPOSE[kind]) for kind in used}
    assert all((DEPLOY / config["file"]).is_file() for config in COMPOSE["configs"].values())


@EVERY_SERVICE
def test_services_are_limited_and_restarted(name):
    service = SERVICES[name]
    assert service["restart"] in ("unless-stopped", "on-failure:5")
    assert "memory" in service["deploy"]["resources"]["limits"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    if "build" in service:
        assert service["cap_drop"] == ["ALL"]
        assert "cap_add" not in service
    assert "healthcheck" in service or name in ("service", "bucket")


def test_health_checks_ask_their_own_container_over_the_network():
    """`ray health-check` asks the head, on every node; without `-h`, pg_isready asks a server that only initialises."""
    for service in SERVICES.values():
        if "healthcheck" in service:
            command = service["healthcheck"]["test"]
            assert (command[:4] == ["CMD", "pg_isready", "-h", "127.0.0.1"]) or command[1] == "wget", command
            assert all(word.startswith("http://127.0.0.1:") for word in command if "://" in word)
    urls = {name: SERVICES[name]["healthcheck"]["test"][5:] for name in ("ray-head", "ray-worker")}
    path = "/api/local_raylet_healthz"
    assert path in PUBLIC_EXACT_PATHS  # asked without the token
    raylet = f"http://127.0.0.1:{DEFAULT_DASHBOARD_AGENT_LISTEN_PORT}{path}"
    assert urls == {"ray-head": [raylet, "http://127.0.0.1:8265/api/gcs_healthz"], "ray-worker": [raylet]}


def test_nothing_inside_is_asked_through_a_proxy_that_docker_gives_to_containers():
    """Empty variables: wget of BusyBox knows no others, and Docker only adds those that are not set."""
    for name, service in SERVICES.items():
        if name != "postgres":  # speaks no HTTP
            found = {
                key: value
                for key, value in service["environment"].items()
                if key.lower() in ("http_proxy", "all_proxy")
            }
            assert found == {"http_proxy": "", "HTTP_PROXY": "", "all_proxy": "", "ALL_PROXY": ""}, name


def test_only_the_proxy_is_reached_from_outside():
    assert [name for name, service in SERVICES.items() if "ports" in service] == ["proxy"]
    assert [name for name, service in SERVICES.items() if "outside" in service["networks"]] == ["proxy"]
    assert COMPOSE["networks"]["inside"] == {"internal": True}


def test_the_proxy_hides_metrics_and_asks_for_a_password_where_the_server_does_not():
    text = (DEPLOY / "compose" / "Caddyfile").read_text()
    sites = dict(re.findall(r"^\{\$(\w+)\} \{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    assert sites.keys() == {"SERVICE_HOST", "MLFLOW_HOST", "GRAFANA_HOST", "RAY_HOST"}
    for name, site in sites.items():
        assert "Strict-Transport-Security" in site, name  # a name without a scheme means HTTPS
        # Service, Grafana and Ray ask for keys, accounts and the token themselves.
        assert ("basic_auth {" in site) == (name == "MLFLOW_HOST"), name
    assert "@inside path /metrics /metrics/* /health /health/*\n\trespond @inside 404" in sites["SERVICE_HOST"]
    assert "import /run/secrets/mlflow_users" in sites["MLFLOW_HOST"]


def test_the_guide_says_how_to_trust_the_proxys_own_authority():
    assert "--verify root.crt" in GUIDE.read_text()


def test_the_keys_of_the_object_store_reach_one_bucket():
    text = GUIDE.read_text()
    (document,) = re.findall(r"printf '(\{\"identities\".*?)' \$KEY \$SECRET > s3_identities", text, re.DOTALL)
    (identity,) = json.loads(document)["identities"]
    bucket = re.search(r"s3://([^/]+)/", SERVICES["service"]["environment"]["COPE_SWEEP_STORE"])[1]
    assert {action.partition(":")[2] for action in identity["actions"]} == {bucket}
    assert "-s3.config=/run/secrets/s3_identities" in SERVICES["objects"]["command"]
    assert SERVICES["bucket"]["command"][-1] == bucket


@EVERY_SERVICE
def test_images_are_pinned(name):
    image = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", SERVICES[name]["image"])
    tag = image.partition(":")[2]
    assert re.search(r"\d+\.\d+", tag), image
    if "build" in SERVICES[name]:
        assert tag == cope_sweep.__version__


def test_secrets_come_from_files_only():
    assert all(set(each) == {"file"} and each["file"].startswith("secrets/") for each in COMPOSE["secrets"].values())
    for name, service in SERVICES.items():
        for key, value in service.get("environment", {}).items():
            if re.search("PASSWORD|TOKEN|SECRET|CREDENTIALS", key):
                assert value == "token" or value.startswith("/run/secrets/"), (name, key)
                if value.startswith("/run/secrets/"):
                    assert value.removeprefix("/run/secrets/") in service["secrets"]
    assert not re.search(r"PASSWORD|SECRET|TOKEN", (DEPLOY / ".env.example").read_text())


def test_everything_of_ray_has_the_token():
    for name in ("ray-head", "ray-worker", "service"):
        environment = SERVICES[name]["environment"]
        assert environment["RAY_AUTH_MODE"] == "token"
        assert environment["RAY_AUTH_TOKEN_PATH"] == "/run/secrets/ray_token"


def test_secrets_are_read_when_a_container_starts(tmp_path):
    """The password of PostgreSQL gets into the environment of the command, and into no command line."""
    (tmp_path / "postgres_password").write_text("0123")
    environment = {"PATH": os.environ["PATH"], "POSTGRES_PASSWORD_FILE": str(tmp_path / "postgres_password")}
    command = ["sh", DEPLOY / "compose" / "with-secrets.sh", "env"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "COPE_SWEEP_INDEX=postgresql://cope:0123@postgres" in found.stdout, found.stderr
    for service in SERVICES.values():
        assert not re.search(r"\$\{?\w*(PASSWORD|TOKEN|SECRET)", json.dumps(service.get("command", [])))


def test_the_example_of_settings_has_every_variable_with_its_default():
    lines = [line for line in (DEPLOY / ".env.example").read_text().splitlines() if line and line[0] != "#"]
    assert dict(line.split("=", 1) for line in lines) == variables(COMPOSE)


def test_addresses_are_those_of_services_and_their_ports():
    commands = {name: " ".join(service.get("command", [])) for name, service in SERVICES.items()}
    assert "--port 5000" in commands["mlflow"]
    assert "--port 8000" in commands["service"]
    assert "--port=6379" in commands["ray-head"]
    assert "--dashboard-port=8265" in commands["ray-head"]
    known = {"mlflow": "5000", "service": "8000", "ray-head": "8265", "grafana": "3000", "objects": "8333"}
    caddyfile = (DEPLOY / "compose" / "Caddyfile").read_text()
    proxied = dict(re.findall(r"reverse_proxy ([\w-]+):(\d+)", caddyfile))
    assert proxied == {name: known[name] for name in ("service", "mlflow", "grafana", "ray-head")}
    direct = COMPOSE["x-direct"].keys()
    assert set(re.findall(r"\{\$(\w+)\}", caddyfile)) == SERVICES["proxy"]["environment"].keys() - direct
    assert set(re.findall(r"/run/secrets/(\w+)", caddyfile)) == set(SERVICES["proxy"]["secrets"])
    for service in SERVICES.values():
        for value in service.get("environment", {}).values():
            for host, port in re.findall(r"http://([\w-]+):(\d+)", value):
                assert known[host] == port
    assert "--address=ray-head:6379" in commands["ray-worker"]


def test_links_to_mlflow_lead_through_the_proxy():
    host = SERVICES["proxy"]["environment"]["MLFLOW_HOST"]
    assert SERVICES["service"]["environment"]["COPE_SWEEP_MLFLOW_PAGE"] == f"https://{host}"


def test_prometheus_reads_services_at_the_ports_of_their_metrics():
    jobs = {each["job_name"]: each for each in load(DEPLOY / "monitoring" / "prometheus.yml")["scrape_configs"]}
    assert jobs["service"]["static_configs"] == [{"targets": ["service:8000"]}]
    (ray,) = jobs["ray"]["dns_sd_configs"]
    assert (ray["names"], ray["port"]) == (["ray-head", "ray-worker"], 8080)
    for name in ray["names"]:
        assert f"--metrics-export-port={ray['port']}" in SERVICES[name]["command"]


def test_prometheus_and_grafana_find_their_files():
    def targets(name):
        return {each["target"]: COMPOSE["configs"][each["source"]]["file"] for each in SERVICES[name]["configs"]}

    assert f"--config.file={next(iter(targets('prometheus')))}" in SERVICES["prometheus"]["command"]
    prometheus = load(DEPLOY / "monitoring" / "prometheus.yml")
    assert {path: targets("prometheus")[path] for path in prometheus["rule_files"]} == {
        "/etc/prometheus/alerts.yaml": "monitoring/alerts.yaml"
    }
    assert prometheus["scrape_configs"][0]["authorization"]["credentials_file"] == "/run/secrets/metrics_key"
    (provider,) = load(DEPLOY / "monitoring" / "grafana-dashboards.yaml")["providers"]
    folder = provider["options"]["path"]
    assert [file for path, file in targets("grafana").items() if path.startswith(f"{folder}/")] == [
        "monitoring/dashboard.json"
    ]
    (source,) = load(DEPLOY / "monitoring" / "grafana-datasource.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"


def test_the_guide_makes_every_secret():
    text = GUIDE.read_text()
    for name in COMPOSE["secrets"]:
        assert f"> {name}" in text or f" {name}" in text, name
