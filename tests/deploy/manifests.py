"""Kubernetes' manifests: as files, as `kubectl kustomize` builds them, and what tests ask of them."""

import gzip
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML

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


def crd(plural):
    """The schema of a kind of KubeRay's, in which objects have no other properties than those that it declares."""
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
