"""What may be added to deploy/kuberay's base: the models on Ray Serve, and the monitoring."""

import re
import tomllib
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
from cope_services.serve import Replicas
from packaging.requirements import Requirement
from ray.serve.schema import ServeDeploySchema
from ruamel.yaml import YAML

import cope_sweep
from tests.deploy.manifests import built, crd, files_of, kustomization, needs_kubectl, one, pod_specs, references

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kuberay"
BASE = files_of(FOLDER / "base")
PARTS = {name: files_of(FOLDER / name) for name in ("models", "monitoring")}
MONITORING = FOLDER.parent / "monitoring"
SERVICE = one(PARTS["models"], "RayService", "models")
OF_KUBERAY = {"models-serve-svc": 8000, "models-head-svc": 8265, "sweeps-head-svc": 8265}
"""The services that KubeRay makes, and their ports."""


def serve_config():
    return YAML(typ="safe", pure=True).load(SERVICE["spec"]["serveConfigV2"])


@pytest.mark.parametrize("name", PARTS)
def test_the_files_are_valid(name):
    check(PARTS[name])


@needs_kubectl
@pytest.mark.parametrize("name", PARTS)
def test_what_kubectl_builds_is_valid(name):
    manifests = built(FOLDER / name)
    check(manifests)
    assert {each["metadata"]["namespace"] for each in manifests} == {"cope-sweep"}
    if name == "monitoring":
        assert one(manifests, "ConfigMap", "monitoring")["data"] == config_files()


def config_files():
    """The files that monitoring mounts, by name."""
    (generated,) = kustomization(MONITORING)["configMapGenerator"]
    assert generated["name"] == "monitoring"
    return {name: (MONITORING / name).read_text() for name in generated["files"]}


def check(manifests):
    for each in manifests:
        if each["apiVersion"] == "ray.io/v1":
            jsonschema.Draft202012Validator(crd("rayservices")).validate(each)
        else:
            kubernetes_validate.validate(each, "1.36", strict=True)
    for pod, _, spec in pod_specs(manifests):
        found = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod}, "spec": spec}
        kubernetes_validate.validate(found, "1.36", strict=True)


@pytest.mark.parametrize("name", PARTS)
def test_every_pod_is_restricted(name):
    for pod, _, spec in pod_specs(PARTS[name]):
        assert spec["securityContext"]["runAsNonRoot"], pod
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, pod
        assert pod == "head" or spec["automountServiceAccountToken"] is False, pod  # the autoscaler asks Kubernetes
        claims = {"data"} if pod == "prometheus" else set()
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False, pod
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, pod
            assert "memory" in container["resources"]["limits"], pod
            mounted = {each["name"] for each in container["volumeMounts"]}
            assert mounted == {each["name"] for each in spec["volumes"]} | claims, pod


def test_models_have_the_version_of_ray_the_image_and_the_token():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (ray,) = [each for each in map(Requirement, dependencies) if each.name == "ray"]
    cluster = SERVICE["spec"]["rayClusterConfig"]
    assert "serve" in ray.extras
    assert f"=={cluster['rayVersion']}" == str(ray.specifier)
    assert cluster["authOptions"] == {"mode": "token", "secretName": "ray-token"}
    images = {container["image"] for _, _, spec in pod_specs([SERVICE]) for container in spec["containers"]}
    assert images == {f"cope-sweep:{cope_sweep.__version__}"}
    assert cluster["gcsFaultToleranceOptions"]["redisAddress"] == "redis:6379"


def test_the_application_is_one_that_serve_accepts_and_that_fits_the_cluster():
    config = ServeDeploySchema.model_validate(serve_config())
    (application,) = config.applications
    replicas = Replicas.model_validate(application.args)
    module, _, name = application.import_path.partition(":")
    assert (module, name) == ("cope_services.serve", "app")
    (group,) = SERVICE["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (worker,) = group["template"]["spec"]["containers"]
    # A node for each replica, from the fewest to the most.
    assert float(worker["resources"]["limits"]["cpu"]) == replicas.cpus
    assert (group["minReplicas"], group["maxReplicas"]) == (replicas.min_replicas, replicas.max_replicas)
    assert SERVICE["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for _, _, spec in pod_specs([SERVICE]):
        ports = {each["name"]: each["containerPort"] for each in spec["containers"][0]["ports"]}
        assert ports["serve"] == config.http_options.port == OF_KUBERAY["models-serve-svc"]
        environment = {each["name"]: each.get("value") for each in spec["containers"][0]["env"]}
        assert environment["COPE_SWEEP_KEYS_FILE"] == "/run/keys/keys.json"
    hosts = one(BASE, "ConfigMap", "cope-sweep")["data"]["COPE_SWEEP_ALLOW_HOSTS"].split(",")
    assert {"models-serve-svc", "models-serve-svc.cope-sweep"} <= set(hosts)


def test_secrets_are_those_that_the_readme_makes():
    text = (ROOT / "deploy" / "README.md").read_text()
    found = {each for manifests in PARTS.values() for each in references(manifests)}
    assert found
    for name, key in found:
        command = re.search(rf"create secret generic {name} ((?:.*\\\n)*.*)", text)
        assert command, name
        assert key is None or f"--from-literal={key}=" in command[1], (name, key)


def test_prometheus_reads_every_pod_of_the_services():
    manifests = [*BASE, *PARTS["monitoring"]]
    files = config_files()
    config = YAML(typ="safe", pure=True).load(files["prometheus-kubernetes.yml"])
    pods = list(pod_specs(manifests))
    for job in config["scrape_configs"]:
        for found in job.get("dns_sd_configs", []):
            (name,) = found["names"]
            spec = one(manifests, "Service", name)["spec"]
            assert spec["clusterIP"] == "None"
            assert [each["port"] for each in spec["ports"]] == [found["port"]]
            assert any(spec["selector"].items() <= labels.items() for _, labels, _ in pods), name
            policies = [
                each["spec"]
                for each in PARTS["monitoring"]
                if each["kind"] == "NetworkPolicy" and each["spec"]["podSelector"]["matchLabels"] == spec["selector"]
            ]
            prometheus = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}}
            allowed = {"from": [prometheus], "ports": [{"port": found["port"]}]}
            assert allowed in [rule for policy in policies for rule in policy["ingress"]], name
    assert config["rule_files"] == ["/etc/prometheus/alerts.yaml"]
    (prometheus,) = [spec["containers"][0] for pod, _, spec in pods if pod == "prometheus"]
    assert "--config.file=/etc/prometheus/prometheus-kubernetes.yml" in prometheus["args"]
    mounts = {each["mountPath"] for each in prometheus["volumeMounts"]}
    assert {"/etc/prometheus", "/run/secrets/metrics-key"} <= mounts
    assert config["scrape_configs"][0]["authorization"] == {"credentials_file": "/run/secrets/metrics-key/key"}


def test_grafana_has_the_dashboard_and_the_data_source():
    files = config_files()
    ((_, _, spec),) = [each for each in pod_specs(PARTS["monitoring"]) if each[0] == "grafana"]
    mounted = {each["mountPath"]: each.get("subPath") for each in spec["containers"][0]["volumeMounts"]}
    assert {name for name in mounted.values() if name} <= files.keys()
    load = YAML(typ="safe", pure=True).load
    (provider,) = load(files["grafana-dashboards.yaml"])["providers"]
    assert mounted[f"{provider['options']['path']}/cope-sweep.json"] == "dashboard.json"
    (source,) = load(files["grafana-datasource.yaml"])["datasources"]
    service = one(PARTS["monitoring"], "Service", "prometheus")
    assert source["url"] == f"http://prometheus:{service['spec']['ports'][0]['port']}"


def test_models_are_reached_by_clients_kuberay_and_each_other_only():
    (policy,) = [each["spec"] for each in PARTS["models"] if each["kind"] == "NetworkPolicy"]
    label = {"app.kubernetes.io/name": "models"}
    assert policy["podSelector"] == {"matchLabels": label}
    assert {labels["app.kubernetes.io/name"] for _, labels, _ in pod_specs(PARTS["models"])} == {"models"}
    inside, clients, operator = policy["ingress"]
    assert inside == {"from": [{"podSelector": {"matchLabels": label}}]}
    assert clients["ports"] == [{"port": 8000}]
    assert clients["from"] == [{"namespaceSelector": {"matchLabels": {"cope-sweep/ingress": "true"}}}]
    assert {each["port"] for each in operator["ports"]} == {8000, 8265}
    redis = one(BASE, "NetworkPolicy", "redis")["spec"]["ingress"][0]["from"]
    assert {"podSelector": {"matchLabels": label}} in redis


def test_the_command_of_the_issue_is_the_same_application():
    from cope_services import serve

    import services.serve

    assert services.serve.app is serve.app
