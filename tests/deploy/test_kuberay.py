"""The manifests of deploy/kuberay: against the schemas of Kubernetes and KubeRay, against each other, and against pyproject."""

import copy
import ipaddress
import re
import tomllib
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
from packaging.requirements import Requirement

import cope_sweep
from tests.deploy.manifests import (
    built,
    crd,
    files_of,
    kustomization,
    load_all,
    needs_kubectl,
    one,
    pod_specs,
    references,
)

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kuberay"
OVERLAYS = ("cpu", "gpu", "spot")
BASE = files_of(FOLDER / "base")
JOB = load_all((FOLDER / "job" / "rayjob.yaml").read_text())
SECRETS = {
    "ray-token": {"auth_token"},
    "redis": {"password"},
    "databases": {"index", "mlflow"},
    "object-store": set(),
    "api-keys": set(),
}
"""The secrets that deploy/README.md makes, and the keys that manifests read one by one."""


@pytest.fixture(scope="module")
def crds():
    return {"RayCluster": crd("rayclusters"), "RayJob": crd("rayjobs")}


@pytest.fixture(scope="module")
def overlays():
    return {name: built(FOLDER / "overlays" / name) for name in OVERLAYS}


def test_the_files_are_valid(crds):
    check([*BASE, *JOB], crds)


@needs_kubectl
@pytest.mark.parametrize("name", OVERLAYS)
def test_what_kubectl_builds_is_valid(name, overlays, crds):
    check(overlays[name], crds)


def check(manifests, crds):
    for each in manifests:
        if each["apiVersion"] == "ray.io/v1":
            jsonschema.Draft202012Validator(crds[each["kind"]]).validate(each)
        else:
            kubernetes_validate.validate(each, "1.36", strict=True)
    # The schemas of KubeRay leave pods open in places; those of Kubernetes do not.
    for name, _, spec in pod_specs(manifests):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        kubernetes_validate.validate(pod, "1.36", strict=True)


def test_a_misspelt_field_is_found(crds):
    cluster = copy.deepcopy(one(BASE, "RayCluster", "sweeps"))
    cluster["spec"]["headGroupSpec"]["rayStartParameters"] = {}
    with pytest.raises(jsonschema.ValidationError, match="rayStartParameters"):
        jsonschema.Draft202012Validator(crds["RayCluster"]).validate(cluster)


def test_the_ray_version_is_the_one_that_is_installed():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (ray,) = [each for each in map(Requirement, dependencies) if each.name == "ray"]
    assert f"=={one(BASE, 'RayCluster', 'sweeps')['spec']['rayVersion']}" == str(ray.specifier)


def test_image_tags_are_the_version():
    images = {pod: {each["image"] for each in spec["containers"]} for pod, _, spec in pod_specs([*BASE, *JOB])}
    assert images.pop("redis") == {"redis:7.4-bookworm"}
    assert images == {pod: {f"cope-sweep:{cope_sweep.__version__}"} for pod in images}
    with_cuda = re.findall(r"cope-sweep:[\w.-]+", (FOLDER / "overlays" / "gpu" / "workers.yaml").read_text())
    assert with_cuda == [f"cope-sweep:{cope_sweep.__version__}-cuda"] * 2  # of the head and of the workers


def test_secrets_are_referred_to_and_never_included():
    assert "Secret" not in {each["kind"] for each in BASE}
    found = set(references([*BASE, *JOB]))
    assert {name for name, _ in found} == SECRETS.keys()
    assert {(name, key) for name, key in found if key} == {(name, key) for name in SECRETS for key in SECRETS[name]} - {
        (name, key) for name, key in found if not key
    }
    cluster = one(BASE, "RayCluster", "sweeps")["spec"]
    assert cluster["authOptions"] == {"mode": "token", "secretName": "ray-token"}
    submitter = JOB[0]["spec"]["submitterPodTemplate"]["spec"]["containers"][0]
    environment = {each["name"]: each for each in submitter["env"]}
    assert environment["RAY_AUTH_MODE"]["value"] == "token"
    assert environment["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "ray-token"


def test_the_readme_makes_every_secret_and_key():
    text = (ROOT / "deploy" / "README.md").read_text()
    for name, keys in SECRETS.items():
        command = re.search(rf"create secret generic {name} ((?:.*\\\n)*.*)", text)
        assert command, name
        for key in keys:
            assert f"--from-literal={key}=" in command[1]


def test_services_lead_to_ports_of_pods_and_configured_addresses_to_services():
    pods = list(pod_specs(BASE))
    addresses = set()
    for each in BASE:
        if each["kind"] != "Service":
            continue
        selected = [spec for _, labels, spec in pods if each["spec"]["selector"].items() <= labels.items()]
        assert len(selected) == 1, each["metadata"]["name"]
        named = {port["name"] for container in selected[0]["containers"] for port in container.get("ports", [])}
        for port in each["spec"]["ports"]:
            assert port["targetPort"] in named
            addresses.add(f"{each['metadata']['name']}:{port['port']}")
    # KubeRay makes a service for the head of each cluster.
    (service,) = [spec["containers"][0] for name, _, spec in pods if name == "service"]
    environment = {each["name"]: each.get("value") for each in service["env"]}
    cluster = one(BASE, "RayCluster", "sweeps")
    assert environment["COPE_SWEEP_RAY_ADDRESS"] == f"http://{cluster['metadata']['name']}-head-svc:8265"
    settings = one(BASE, "ConfigMap", "cope-sweep")["data"]
    assert settings["MLFLOW_TRACKING_URI"].removeprefix("http://") in addresses
    assert set(settings["MLFLOW_SERVER_ALLOWED_HOSTS"].split(",")) >= {"mlflow:5000", "localhost:5000"}
    assert one(BASE, "RayCluster", "sweeps")["spec"]["gcsFaultToleranceOptions"]["redisAddress"] in addresses


def test_every_pod_is_restricted():
    """What the namespace's pod security standard `restricted` asks, and a limit of memory."""
    assert one(BASE, "Namespace", "cope-sweep")["metadata"]["labels"] == {
        "pod-security.kubernetes.io/enforce": "restricted"
    }
    for name, _, spec in pod_specs([*BASE, *JOB]):
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert name == "head" or spec["automountServiceAccountToken"] is False, name  # the autoscaler asks Kubernetes
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False, name
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name
            assert "memory" in container["resources"]["limits"], name
            mounted = {each["name"] for each in container.get("volumeMounts", [])}
            claims = {"data"} if name == "redis" else set()
            assert mounted == {each["name"] for each in spec.get("volumes", [])} | claims, name


def test_network_policies_allow_what_the_parts_need_and_deny_the_rest():
    policies = {each["metadata"]["name"]: each["spec"] for each in BASE if each["kind"] == "NetworkPolicy"}
    assert policies.pop("deny-all") == {"podSelector": {}, "policyTypes": ["Ingress"]}
    pods = {name: labels for name, labels, _ in pod_specs([*BASE, *JOB])}
    ports = {each["metadata"]["name"]: each["spec"]["ports"][0]["port"] for each in BASE if each["kind"] == "Service"}

    def selects(selector, labels):
        expressions = selector.get("matchExpressions", [])
        return selector.get("matchLabels", {}).items() <= labels.items() and all(
            each["operator"] == "In" and labels.get(each["key"]) in each["values"] for each in expressions
        )

    def allowed(source, target, port):
        for spec in policies.values():
            if not spec["podSelector"]["matchLabels"].items() <= pods[target].items():
                continue
            for rule in spec["ingress"]:
                open_ports = {each["port"] for each in rule.get("ports", [])}
                peers = [each["podSelector"] for each in rule["from"] if "namespaceSelector" not in each]
                if (not open_ports or port in open_ports) and any(selects(each, pods[source]) for each in peers):
                    return True
        return False

    workers = set(pods) - {"head", "redis", "mlflow", "service", "submit"}
    assert workers
    for worker in workers:
        assert allowed(worker, "head", 6379)
        assert allowed("head", worker, 10002)
        assert allowed(worker, "mlflow", ports["mlflow"])
    assert allowed("head", "redis", ports["redis"])
    assert allowed("submit", "head", 8265)
    assert not allowed("submit", "head", 6379)
    assert allowed("service", "head", 8265)  # submits sweeps
    assert not allowed("service", "head", 6379)
    assert not allowed("service", "redis", ports["redis"])
    assert not allowed("submit", "mlflow", ports["mlflow"])
    assert policies["service"]["ingress"][0]["ports"] == [{"port": ports["service"]}]


def test_disruption_budgets_select_pods():
    pods = [labels for _, labels, _ in pod_specs(BASE)]
    budgets = [each["spec"] for each in BASE if each["kind"] == "PodDisruptionBudget"]
    assert len(budgets) == 3
    for budget in budgets:
        assert sum(budget["selector"]["matchLabels"].items() <= labels.items() for labels in pods) == 1


@pytest.mark.parametrize("name", OVERLAYS)
def test_patches_are_of_resources_and_fields_that_exist(name):
    folder = FOLDER / "overlays" / name
    found = kustomization(folder)
    assert all((folder / each / "kustomization.yaml").is_file() for each in found["resources"])
    for patch in found["patches"]:
        target, (operations,) = patch["target"], load_all((folder / patch["path"]).read_text())
        manifest = one(files_of(folder), target["kind"], target["name"])
        assert manifest["apiVersion"].partition("/")[0] == target["group"]
        for each in operations:
            parent = manifest
            *names, last = each["path"].split("/")[1:]
            for key in names:
                if isinstance(parent, dict) and key == "tolerations":  # which the overlay below has added
                    break
                parent = parent[int(key) if isinstance(parent, list) else key]
            else:
                assert each["op"] == "add" or last in parent, each


@needs_kubectl
def test_overlays_differ_in_workers_only(overlays):
    def without_workers(manifests):
        return [each for each in manifests if each["kind"] != "RayCluster"]

    base, groups = built(FOLDER / "base"), {}
    for name in OVERLAYS:
        assert without_workers(overlays[name]) == without_workers(base)
        (groups[name],) = one(overlays[name], "RayCluster", "sweeps")["spec"]["workerGroupSpecs"]
        assert groups[name]["minReplicas"] == 0
    limits = {name: group["template"]["spec"]["containers"][0]["resources"]["limits"] for name, group in groups.items()}
    assert "nvidia.com/gpu" not in limits["cpu"]
    assert limits["gpu"]["nvidia.com/gpu"] == limits["spot"]["nvidia.com/gpu"] == 1
    spot = groups["spot"]["template"]["spec"]
    assert spot["nodeSelector"] == {"cope-sweep/spot": "true"}
    assert {each["key"] for each in spot["tolerations"]} == {"nvidia.com/gpu", "cope-sweep/spot"}
    assert spot["terminationGracePeriodSeconds"] > 15  # in which a worker writes the states of its runs


def test_no_manifest_names_an_address_of_one_installation():
    for path in FOLDER.rglob("*.yaml"):
        for found in re.findall(r"\b\d+\.\d+\.\d+\.\d+\b", path.read_text()):
            assert ipaddress.ip_address(found).is_unspecified, path
