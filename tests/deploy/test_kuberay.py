"""The manifests of deploy/kuberay: against the schemas of Kubernetes and KubeRay, against each other, and against pyproject.

The base, its overlay with GPUs, a job, and the models on Ray Serve.
"""

import functools
import gzip
import ipaddress
import json
import re
import shutil
import subprocess
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

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kuberay"
GUIDE = (ROOT / "docs" / "how-to" / "team-server.md").read_text()

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")


def load_all(text):
    """The documents of a YAML text, in YAML 1.1, which Kubernetes' tools read: there, a quoted "true" is text."""
    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 1)
    return list(yaml.load_all(text))


def kustomization(folder):
    (found,) = load_all((folder / "kustomization.yaml").read_text())
    return found


def files_of(folder):
    """The manifests of the files that a kustomization names, and of its folders. Patches and namespaces are not applied."""
    found = []
    for name in kustomization(folder).get("resources", []):
        path = folder / name
        found += files_of(path) if path.is_dir() else load_all(path.read_text())
    return found


def built(folder):
    """The manifests as `kubectl apply -k` would send them."""
    command = ["kubectl", "kustomize", str(folder)]
    return load_all(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@functools.cache
def crd(plural):
    with gzip.open(Path(__file__).parent / "schemas" / f"ray.io_{plural}.json.gz", "rt") as file:
        document = json.load(file)
    (version,) = [each for each in document["spec"]["versions"] if each["name"] == "v1"]
    return strict(version["schema"]["openAPIV3Schema"])


def strict(schema):
    """The schema, in which objects have no other properties than those that it declares."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: strict(value) for key, value in schema.items()}
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not open_ended:
        result["additionalProperties"] = False
    return result


def one(manifests, kind, name):
    (found,) = [each for each in manifests if (each["kind"], each["metadata"].get("name")) == (kind, name)]
    return found


def pod_specs(manifests):
    """(name, labels, pod specification) of everything that starts pods."""
    for each in manifests:
        spec = each.get("spec", {})
        if each["kind"] in ("RayCluster", "RayService"):
            spec = spec.get("rayClusterConfig", spec)
            groups = [
                ("head", spec["headGroupSpec"]),
                *((group["groupName"], group) for group in spec["workerGroupSpecs"]),
            ]
            for name, group in groups:
                labels = group["template"].get("metadata", {}).get("labels", {})
                if each["kind"] == "RayCluster":  # the cluster of a RayService has a name with a random part
                    labels = labels | {"ray.io/cluster": each["metadata"]["name"]}
                if name == "head":
                    labels = labels | {"ray.io/node-type": "head"}
                yield name, labels, group["template"]["spec"]
        elif each["kind"] == "RayJob":
            template = spec["submitterPodTemplate"]
            yield "submit", template["metadata"]["labels"], template["spec"]
        elif "template" in spec:
            yield each["metadata"]["name"], spec["template"]["metadata"]["labels"], spec["template"]["spec"]


def references(node):
    """(secret, key) of every reference; the key is None where all of them are read."""
    if isinstance(node, list):
        for each in node:
            yield from references(each)
    elif isinstance(node, dict):
        if "secretKeyRef" in node:
            yield node["secretKeyRef"]["name"], node["secretKeyRef"]["key"]
        if "secretRef" in node:
            yield node["secretRef"]["name"], None
        if "secretName" in node.get("secret", {}):
            yield node["secret"]["secretName"], None
        for each in node.values():
            yield from references(each)


BASE = files_of(FOLDER / "base")
JOB = load_all((FOLDER / "job" / "rayjob.yaml").read_text())
MODELS = files_of(FOLDER / "models")
PARTS = {"base": BASE, "job": JOB, "models": MODELS}
EVERYTHING = [each for manifests in PARTS.values() for each in manifests]
CLUSTER, SERVICE = one(BASE, "RayCluster", "sweeps"), one(MODELS, "RayService", "models")
OF_KUBERAY = {"models-serve-svc": 8000, "models-head-svc": 8265, "sweeps-head-svc": 8265}
"""The services that KubeRay makes, and their ports."""
SECRETS = {("ray-token", "auth_token"), ("redis", "password"), ("databases", "index"), ("databases", "mlflow")}
"""Secrets and keys that manifests read one by one."""


@pytest.mark.parametrize("name", PARTS)
def test_the_files_are_valid(name):
    check(PARTS[name])


@needs_kubectl
@pytest.mark.parametrize("name", ["base", "gpu", "models"])
def test_what_kubectl_builds_is_valid(name):
    manifests = built(FOLDER / name)
    check(manifests)
    assert {each["metadata"].get("namespace") for each in manifests if each["kind"] != "Namespace"} == {"cope-sweep"}


def check(manifests):
    for each in manifests:
        if each["apiVersion"] == "ray.io/v1":
            jsonschema.Draft202012Validator(crd(f"{each['kind'].lower()}s")).validate(each)
        else:
            kubernetes_validate.validate(each, "1.36", strict=True)
    # The schemas of KubeRay leave pods open in places; those of Kubernetes do not.
    for name, _, spec in pod_specs(manifests):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        kubernetes_validate.validate(pod, "1.36", strict=True)


def test_a_job_has_no_time_to_live_on_a_cluster_that_stays():
    """KubeRay refuses a job with a time to live unless it shuts its cluster down, and one with both a selector and that."""
    for job in JOB:
        spec = job["spec"]
        assert spec.get("shutdownAfterJobFinishes") or "ttlSecondsAfterFinished" not in spec
        assert not ("clusterSelector" in spec and spec.get("shutdownAfterJobFinishes"))


def test_clusters_have_the_version_of_ray_that_is_installed_and_the_token():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (ray,) = [each for each in map(Requirement, dependencies) if each.name == "ray"]
    assert "serve" in ray.extras
    for cluster in (CLUSTER["spec"], SERVICE["spec"]["rayClusterConfig"]):
        assert f"=={cluster['rayVersion']}" == str(ray.specifier)
        assert cluster["authOptions"] == {"mode": "token", "secretName": "ray-token"}
    submitter = JOB[0]["spec"]["submitterPodTemplate"]["spec"]["containers"][0]
    environment = {each["name"]: each for each in submitter["env"]}
    assert environment["RAY_AUTH_MODE"]["value"] == "token"
    assert environment["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "ray-token"


def test_image_tags_are_the_version():
    images = {
        pod: {container["image"] for container in spec["containers"]}
        for pod, _, spec in pod_specs([*BASE, *JOB, *MODELS])
    }
    assert images.pop("redis") == {"redis:7.4-bookworm"}
    assert images == {pod: {f"cope-sweep:{cope_sweep.__version__}"} for pod in images}
    with_cuda = re.findall(r"cope-sweep:[\w.-]+", (FOLDER / "gpu" / "workers.yaml").read_text())
    assert with_cuda == [f"cope-sweep:{cope_sweep.__version__}-cuda"] * 2  # of the head and of the workers


def test_secrets_are_referred_to_and_never_included():
    assert "Secret" not in {each["kind"] for each in EVERYTHING}
    found = set(references(EVERYTHING))
    assert {each for each in references([*BASE, *JOB]) if each[1]} == SECRETS
    assert {name for name, _ in found} >= {"object-store", "api-keys"}
    for name, key in found:
        command = re.search(rf"create secret generic {name} ((?:.*\\\n)*.*)", GUIDE)
        assert command, name
        assert key is None or f"--from-literal={key}=" in command[1], (name, key)


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
    assert environment["COPE_SWEEP_RAY_ADDRESS"] == f"http://{CLUSTER['metadata']['name']}-head-svc:8265"
    settings = one(BASE, "ConfigMap", "cope-sweep")["data"]
    forwarded = environment["COPE_SWEEP_MLFLOW_PAGE"].removeprefix("http://")
    assert forwarded in settings["MLFLOW_SERVER_ALLOWED_HOSTS"].split(",")
    assert f"port-forward service/mlflow {forwarded.partition(':')[2]}" in GUIDE
    assert settings["MLFLOW_TRACKING_URI"].removeprefix("http://") in addresses
    assert set(settings["MLFLOW_SERVER_ALLOWED_HOSTS"].split(",")) >= {"mlflow:5000", "localhost:5000"}
    for cluster in (CLUSTER["spec"], SERVICE["spec"]["rayClusterConfig"]):
        assert cluster["gcsFaultToleranceOptions"]["redisAddress"] in addresses


def test_every_pod_is_restricted():
    """What the namespace's pod security standard `restricted` asks, and a limit of memory."""
    assert one(BASE, "Namespace", "cope-sweep")["metadata"]["labels"] == {
        "pod-security.kubernetes.io/enforce": "restricted"
    }
    for name, _, spec in pod_specs(EVERYTHING):
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


def test_the_autoscaler_shares_the_folder_of_ray_with_the_head():
    """KubeRay mounts its volume `ray-logs` into the autoscaler, and takes the head's if it has that name."""
    for cluster in (CLUSTER["spec"], SERVICE["spec"]["rayClusterConfig"]):
        (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
        assert {"name": "ray-logs", "mountPath": "/tmp/ray"} in head["volumeMounts"]


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
    assert allowed("service", "mlflow", ports["mlflow"])  # finds pages of runs
    assert not allowed("service", "head", 6379)
    assert not allowed("service", "redis", ports["redis"])
    assert not allowed("submit", "mlflow", ports["mlflow"])
    assert policies["service"]["ingress"][0]["ports"] == [{"port": ports["service"]}]


@needs_kubectl
def test_the_overlay_differs_in_workers_only():
    def without_workers(manifests):
        return [each for each in manifests if each["kind"] != "RayCluster"]

    base, overlay = built(FOLDER / "base"), built(FOLDER / "gpu")
    assert without_workers(overlay) == without_workers(base)
    groups = {}
    for name, manifests in (("base", base), ("gpu", overlay)):
        (groups[name],) = one(manifests, "RayCluster", "sweeps")["spec"]["workerGroupSpecs"]
        assert groups[name]["minReplicas"] == 0
    limits = {name: group["template"]["spec"]["containers"][0]["resources"]["limits"] for name, group in groups.items()}
    assert "nvidia.com/gpu" not in limits["base"]
    assert limits["gpu"]["nvidia.com/gpu"] == 1
    assert {each["key"] for each in groups["gpu"]["template"]["spec"]["tolerations"]} == {"nvidia.com/gpu"}


def test_the_overlay_changes_what_the_base_has():
    """Without kubectl: every path that its patch replaces exists in the cluster of the base."""
    (patch,) = kustomization(FOLDER / "gpu")["patches"]
    assert patch["target"]["name"] == CLUSTER["metadata"]["name"]
    (operations,) = load_all((FOLDER / "gpu" / patch["path"]).read_text())
    for operation in operations:
        if operation["op"] == "replace":
            found = CLUSTER
            for key in operation["path"].strip("/").split("/"):
                found = found[int(key) if isinstance(found, list) else key]
            assert found is not None, operation["path"]


# The models on Ray Serve


def test_no_manifest_names_an_address_of_one_installation():
    for path in FOLDER.rglob("*.yaml"):
        for found in re.findall(r"\b\d+\.\d+\.\d+\.\d+\b", path.read_text()):
            assert ipaddress.ip_address(found).is_unspecified, path


def test_the_application_is_one_that_serve_accepts_and_that_fits_the_cluster():
    config = ServeDeploySchema.model_validate(YAML(typ="safe", pure=True).load(SERVICE["spec"]["serveConfigV2"]))
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
        assert environment["COPE_SWEEP_KEYS_FILE"] == "/run/keys/keys.txt"
    hosts = one(BASE, "ConfigMap", "cope-sweep")["data"]["COPE_SWEEP_ALLOW_HOSTS"].split(",")
    assert {"models-serve-svc", "models-serve-svc.cope-sweep"} <= set(hosts)


def test_models_are_reached_by_clients_kuberay_and_each_other_only():
    (policy,) = [each["spec"] for each in MODELS if each["kind"] == "NetworkPolicy"]
    label = {"app.kubernetes.io/name": "models"}
    assert policy["podSelector"] == {"matchLabels": label}
    assert {labels["app.kubernetes.io/name"] for _, labels, _ in pod_specs(MODELS)} == {"models"}
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
