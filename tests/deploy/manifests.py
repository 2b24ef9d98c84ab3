"""What tests ask of Kubernetes' manifests: pods, references to secrets, KubeRay's schemas."""

import gzip
import json
from pathlib import Path


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
