"""What `kubectl kustomize` makes of deploy/kuberay, for the features that its files use:
resources, namespace, JSON patches, config maps of files."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import jsonpatch
from ruamel.yaml import YAML

KNOWN = {"apiVersion", "kind", "namespace", "resources", "patches", "configMapGenerator", "generatorOptions"}
CLUSTER_SCOPED = {"Namespace"}

Manifest = dict[str, Any]


def load_all(path: Path) -> list[Manifest]:
    """The documents of a YAML file as plain data; YAML 1.1, which Kubernetes' tools read, where a quoted "true" is text."""
    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 1)
    return [copy.deepcopy(each) for each in yaml.load_all(path.read_text())]


def build(folder: Path) -> list[Manifest]:
    """The manifests of a kustomization. Raises ValueError for what this function does not implement."""
    (kustomization,) = load_all(folder / "kustomization.yaml")
    if unknown := set(kustomization) - KNOWN:
        raise ValueError(f"{folder}: {unknown} is not implemented")
    manifests: list[Manifest] = []
    for name in kustomization.get("resources", []):
        path = folder / name
        manifests += build(path) if path.is_dir() else load_all(path)
    for each in kustomization.get("configMapGenerator", []):
        if kustomization["generatorOptions"] != {"disableNameSuffixHash": True}:
            raise ValueError(f"{folder}: names with a hash are not implemented")
        data = {name: (folder / name).read_text() for name in each["files"]}
        manifests.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": each["name"]}, "data": data})
    if namespace := kustomization.get("namespace"):
        for each in manifests:
            if each["kind"] not in CLUSTER_SCOPED:
                each["metadata"]["namespace"] = namespace
    for patch in kustomization.get("patches", []):
        targets = [each for each in manifests if _selected(each, patch["target"])]
        if not targets:
            raise ValueError(f"{folder}: no manifest is {patch['target']}")
        (operations,) = load_all(folder / patch["path"])
        for each in targets:
            jsonpatch.apply_patch(each, operations, in_place=True)
    return manifests


def _selected(manifest: Manifest, target: dict[str, str]) -> bool:
    found = {
        "group": manifest["apiVersion"].partition("/")[0],
        "kind": manifest["kind"],
        "name": manifest["metadata"].get("name", ""),
    }
    return all(re.fullmatch(value, found[key]) for key, value in target.items())
